"""What is new or changed in this checkout: functions and other pieces of Python files, by the lines that git says.

Compared with where this branch left main, or, on main itself, with ten commits ago; `K8E_SINCE` names another commit.
A clone that has less history is compared with the oldest that it has; without any, nothing counts as changed, and the
head of the run says so."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BACK = 10  # commits
# Whatever the user's own configuration says about prefixes and colours.
_DIFF = ("diff", "--unified=0", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
HUNK = re.compile(r"@@ -[0-9,]+ \+([0-9]+)(?:,([0-9]+))? @@")


class Changes:
    """Which lines of which files are not what they were."""

    def __init__(self, root: Path, since: str = "") -> None:
        self._root = root
        self.base = since or self._find_base()
        self._lines = self._read() if self.base else {}
        self._definitions, self._strings = functools.cache(find_definitions), functools.cache(find_strings)
        self._new = self._git("ls-files", "--others", "--exclude-standard").split("\n")

    def _git(self, *words: str) -> str:
        command = ["git", "-c", "safe.directory=*", "-c", "core.quotepath=off", *words]
        try:
            done = subprocess.run(command, cwd=self._root, capture_output=True, text=True)
        except FileNotFoundError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    def _find_base(self) -> str:
        head = self._git("rev-parse", "HEAD")
        for main in ("origin/main", "main"):
            left = self._git("merge-base", "HEAD", main)
            if left and left != head:
                return left
        history = self._git("rev-list", "--first-parent", f"--max-count={BACK + 1}", "HEAD").split()
        return history[-1] if len(history) > 1 else ""

    def _read(self) -> dict[str, set[int]]:
        """With the working tree, and with where something was only removed."""
        found: dict[str, set[int]] = {}
        lines: set[int] = set()
        for line in self._git(*_DIFF, self.base).splitlines():
            if line.startswith("+++ "):
                lines = found.setdefault(line.removeprefix("+++ b/"), set())
            elif match := HUNK.match(line):
                first, count = int(match[1]), int(match[2] or "1")
                lines.update(range(first, first + max(count, 1)))
        return found

    def lines(self, path: str | Path) -> set[int] | None:
        """None: all of them."""
        name = Path(path).resolve().relative_to(self._root).as_posix()
        return None if name in self._new else self._lines.get(name, set())

    def touch(self, path: str | Path, first: int, last: int) -> bool:
        lines = self.lines(path)
        return lines is None or any(first <= line <= last for line in lines)

    def touch_function(self, function: Callable[..., Any]) -> bool:
        code = function.__code__
        return self.touch_definition(code.co_filename, code.co_qualname)

    def touch_definition(self, path: str | Path, qualified: str) -> bool:
        """A function or method by its name in its file; one that is not found there counts as changed."""
        if not (span := self._definitions(str(path)).get(qualified)):
            return True
        return self.touch(path, *span)

    def touch_text(self, path: str | Path, text: str) -> bool:
        """A string that stands in a file of data."""
        if self.lines(path) == set():
            return False
        spans = self._strings(str(path)).get(text)
        return spans is None or any(self.touch(path, *span) for span in spans)

    def __str__(self) -> str:
        if not self.base:
            return "git has no history here: nothing counts as changed"
        return f"what changed since {self.base[:12]} is always taken ({len(self._lines)} files)"


def find_definitions(path: str) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                found[prefix + child.name] = (first, child.end_lineno or child.lineno)
                inner = "." if isinstance(child, ast.ClassDef) else ".<locals>."
                walk(child, prefix + child.name + inner)
            else:
                walk(child, prefix)

    walk(ast.parse(Path(path).read_bytes()), "")
    return found


def find_strings(path: str) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.setdefault(node.value, []).append((node.lineno, node.end_lineno or node.lineno))
    return found


@functools.cache
def current_changes() -> Changes:
    return Changes(ROOT, os.environ.get("K8E_SINCE", ""))

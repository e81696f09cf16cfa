"""What the documents promise: links lead somewhere, no page is hidden, and what says that it has every command, request
or error code has them."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from k8e.cli.commands import build_parser
from k8e.core.access.keys import Keys
from k8e.core.model import Phase
from k8e.doors.http.handlers import list_handlers
from k8e.doors.mcp.endpoint import McpEndpoint

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("sdk/*/README.md")])
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TO_COME: set[str] = set()
CODE = re.compile(r"[a-z]+(_[a-z]+)*")
# What makes an error, and which of its arguments is the code.
MAKERS = {
    **dict.fromkeys(("Fault", "HttpRefusal", "GrpcRefusal"), 1),
    **dict.fromkeys(("Failure", "ProfileError", "StartRefused", "SettingsError", "_deny", "_exhausted", "_failure"), 0),
    **dict.fromkeys(("BadToken", "BuildFailed", "ClusterError", "JoinRefused", "StartFailed"), 0),
}
# What makes an error that has a hint; `Fault` and the others are kinds of ExplainedError (k8e.errors).
HINTED = {
    "Fault",
    "HttpRefusal",
    "GrpcRefusal",
    "Failure",
    "ServiceError",
    "ProfileError",
    "StartRefused",
    "SettingsError",
    "BadToken",
    "BuildFailed",
    "ClusterError",
    "JoinRefused",
    "StartFailed",
}


def read_prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def list_anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", read_prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", read_prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in list_anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    named = set(re.findall(r"`((?:src|tests|scripts|docs|deploy|bench|agent|sdk|proto)/[\w./-]*)`", read_prose(page)))
    assert not [path for path in named - TO_COME if not (ROOT / path).exists() and not (page.parent / path).exists()]


def test_the_list_of_pages_has_every_page() -> None:
    listed = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


def list_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices
            for command in action.choices.values():
                yield from list_options(command)
        yield from (option for option in action.option_strings if option not in ("-h", "--help"))


def test_the_page_of_the_command_line_has_every_command_and_option() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    words = set(re.findall(r"(?<![\w-])[\w-]+", page))
    assert not [option for option in list_options(build_parser()) if option not in words]


def test_the_page_of_the_http_door_has_every_request_and_no_other(tmp_path: Path) -> None:
    unused: Any = Mock()  # is asked for nothing: what counts is where it could be
    keys = Keys(tmp_path, audit=unused)
    handlers = (*list_handlers(unused, unused, lambda: "", keys, unused), McpEndpoint(unused, keys))
    made = {(route.method, "/" + "/".join(route.path)) for each in handlers for route in each.routes}
    requests = re.findall(r"`(GET|POST|PUT|DELETE) (/[\w/]+)`", (ROOT / "docs" / "http-api.md").read_text())
    documented = {(method, re.sub(r"/(ID|NAME|PORT)\b", "/*", path)) for method, path in requests}
    assert (made - documented, documented - made) == (set(), set())


def list_codes() -> Iterator[str]:
    """As they stand in calls that make an error, and in tables that lead from somebody else's errors to ours. Engines
    have no codes: core gives them some."""
    for phase in set(Phase) - {Phase.ACTIVE, Phase.DESTROYED}:
        yield f"session_{phase.value}"
    for file in (ROOT / "src" / "k8e").rglob("*.py"):
        if "engine" in file.parts or file.name.endswith("_pb2.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            words = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
            maker = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
            led = bool(words) and ast.unparse(words[0]).startswith("Kind.")
            position = MAKERS.get(maker, 1 if led else len(words))
            found = words[position] if position < len(words) else None
            if isinstance(found, ast.Constant) and CODE.fullmatch(str(found.value)):
                yield str(found.value)


def test_the_page_of_errors_has_every_code_and_no_other() -> None:
    rows = re.findall(r"^\| (`[a-z].*?) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    documented = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    made = set(list_codes())
    assert len(made) > 150, "the way in which errors are made has changed: look for them anew"
    assert (made - documented, documented - made) == (set(), set())


def may_be_empty(value: ast.expr) -> bool:
    """Whether a text can be seen to be empty, in one of its forms."""
    if isinstance(value, ast.IfExp):
        return may_be_empty(value.body) or may_be_empty(value.orelse)
    if isinstance(value, ast.BoolOp):
        return may_be_empty(value.values[-1])
    return isinstance(value, ast.Constant) and not value.value


def list_hints(node: ast.AST) -> Iterator[ast.expr]:
    """The hints of an error that is made here, of a row of a table of errors, of a variable or a parameter."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in HINTED:
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if None not in given:  # **members: those of another error
            yield given.get("hint", ast.Constant(""))
    elif isinstance(node, ast.Tuple) and len(node.elts) > 2 and ast.unparse(node.elts[0]).startswith("Kind."):
        yield node.elts[-1]
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("hint", "error.hint"):
        yield node.value
    elif isinstance(node, ast.FunctionDef):
        arguments = node.args.args[-len(node.args.defaults) :] if node.args.defaults else []
        defaults = dict(zip((one.arg for one in arguments), node.args.defaults, strict=True))
        if "hint" in defaults and "hint or " not in ast.unparse(node):
            yield defaults["hint"]


def test_no_error_is_without_a_hint() -> None:
    """Every place that makes an error gives the next step. Engines' errors may have none: core then gives one."""
    empty, seen = [], 0
    for file in (ROOT / "src" / "k8e").rglob("*.py"):
        if "engine" in file.parts or file.name.endswith("_pb2.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            hints = list(list_hints(node))
            seen += len(hints)
            empty += [f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}" for hint in hints if may_be_empty(hint)]
    assert seen > 300, "the way in which errors are made has changed: look for them anew"
    assert empty == []


def test_the_design_has_a_row_for_every_package() -> None:
    rows = re.findall(r"^\| (`src/k8e/.*?) \|", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    listed = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    files = [path for path in (ROOT / "src" / "k8e").rglob("*.py") if path.name != "__init__.py"]
    packages = {str(path.parent.relative_to(ROOT)) for path in files} - {"src/k8e"}
    modules = {str(path.relative_to(ROOT)) for path in files if path.parent == ROOT / "src" / "k8e"}
    assert (packages | modules) - listed == set()
    assert listed - packages - modules - {name.rstrip("/") for name in TO_COME} == set()


def test_no_page_has_a_second_word_for_what_the_glossary_names() -> None:
    glossary = ROOT / "docs" / "glossary.md"
    cells = re.findall(r"^\|.*\| ([^|]*) \|$", glossary.read_text(), re.MULTILINE)
    words = {word.strip() for cell in cells for word in cell.split(",")}
    banned = {word for word in words if re.fullmatch(r"[a-z ]{3,}", word)} - {"not"}
    assert {"cage", "stranger", "front door"} <= banned, "the glossary's last column has changed"
    wrong = re.compile(rf"\b({'|'.join(sorted(banned))})s?\b", re.IGNORECASE)
    for page in set(PAGES) - {glossary}:
        prose = re.sub(r"`[^`]*`", "", read_prose(page))
        assert not wrong.findall(prose), page.name

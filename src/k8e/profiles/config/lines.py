"""Finds the line of every key in a TOML text, which `tomllib` does not tell. Pure.

The text has been parsed before, so it is valid TOML; tests compare the keys found here with those of `tomllib`.
"""

from __future__ import annotations

import tomllib

Path = tuple[str, ...]
_BARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def find_lines(text: str) -> dict[Path, int]:
    """Returns the line of every key and table, by path. The path of an element of an array of tables has its index."""
    return _Scanner(text.replace("\r\n", "\n")).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._lines: dict[Path, int] = {}
        self._counts: dict[Path, int] = {}  # elements of arrays of tables so far

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while self._skip_blank(newlines=True):
            if self._peek() == "[":
                table = self._read_header()
            else:
                self._read_pair(table)
        return self._lines

    # Tables and pairs

    def _read_header(self) -> Path:
        line = self._line
        many = self._text.startswith("[[", self._at)
        self._at += 2 if many else 1
        path = self._resolve(self._read_key())
        self._skip_blank()
        self._at += 2 if many else 1
        if many:
            self._counts[path] = self._counts.get(path, -1) + 1
            path = (*path, str(self._counts[path]))
        for depth in range(1, len(path) + 1):
            self._note(path[:depth], line)
        return path

    def _resolve(self, path: Path) -> Path:
        """`[a.b]` below `[[a]]` belongs to the last element of a."""
        resolved: Path = ()
        for index, part in enumerate(path):
            resolved = (*resolved, part)
            if resolved in self._counts and index < len(path) - 1:
                resolved = (*resolved, str(self._counts[resolved]))
        return resolved

    def _read_pair(self, table: Path) -> None:
        line = self._line
        path = (*table, *self._read_key())
        for depth in range(len(table) + 1, len(path) + 1):
            self._note(path[:depth], line)
        self._skip_blank()
        self._at += 1  # =
        self._skip_blank()
        self._read_value(path)

    def _note(self, path: Path, line: int) -> None:
        self._lines.setdefault(path, line)

    # Keys and values

    def _read_key(self) -> Path:
        parts = []
        while True:
            self._skip_blank()
            if self._peek() in "\"'":
                parts.append(self._read_quoted_key())
            else:
                start = self._at
                while self._peek() in _BARE:
                    self._at += 1
                parts.append(self._text[start : self._at])
            self._skip_blank()
            if self._peek() != ".":
                return tuple(parts)
            self._at += 1

    def _read_value(self, path: Path) -> None:
        first = self._peek()
        if first in "\"'":
            self._skip_string()
        elif first == "[":
            self._read_list(path)
        elif first == "{":
            self._read_inline(path)
        else:
            while self._peek() not in ",]}#\n" and self._at < len(self._text):
                self._at += 1

    def _read_list(self, path: Path) -> None:
        self._at += 1
        index = 0
        while self._skip_blank(newlines=True) and self._peek() != "]":
            self._note((*path, str(index)), self._line)
            self._read_value((*path, str(index)))
            index += 1
            self._skip_blank(newlines=True)
            if self._peek() == ",":
                self._at += 1
        self._at += 1

    def _read_inline(self, path: Path) -> None:
        self._at += 1
        while self._skip_blank(newlines=True) and self._peek() != "}":
            self._read_pair(path)
            self._skip_blank(newlines=True)
            if self._peek() == ",":
                self._at += 1
        self._at += 1

    def _read_quoted_key(self) -> str:
        start = self._at
        self._skip_string()
        (key,) = tomllib.loads(f"{self._text[start : self._at]} = 1")  # the parser knows all the escapes
        return key

    def _skip_string(self) -> None:
        quote = self._peek()
        end = quote * 3 if self._text.startswith(quote * 3, self._at) else quote
        self._at += len(end)
        while not self._text.startswith(end, self._at):
            if self._peek() == "\\" and quote == '"':
                self._at += 1
            if self._peek() == "\n":
                self._line += 1
            self._at += 1
        while len(end) == 3 and self._text.startswith(quote, self._at + 3):
            self._at += 1  # up to two quotes may stand before the end
        self._at += len(end)

    # Characters

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else "\0"

    def _skip_blank(self, *, newlines: bool = False) -> bool:
        """Skips spaces and comments; returns whether anything follows."""
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif letter == "\n" and newlines:
                self._line += 1
                self._at += 1
            elif letter in " \t":
                self._at += 1
            else:
                break
        return self._at < len(self._text)

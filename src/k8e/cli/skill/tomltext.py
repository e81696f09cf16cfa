"""Changes one table of a TOML text and leaves every other byte as it is. Pure.

TOML has many ways to write a table. The plain ones are edited, and the result is parsed and compared with the intended
content: if it differs, nothing is changed, and NotToml is raised.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from typing import Any

Path = tuple[str, ...]


class NotToml(Exception):
    """Or not a TOML that can be changed without guessing."""


def parse(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.replace("\r\n", "\n"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise NotToml(str(error)) from error


def set_table(text: str, path: Path, values: dict[str, Any], others: tuple[str, ...]) -> str:
    """The text in which that table has these values and none of the others; what else is in it stays. A value that is
    a table is added to the one that is there."""
    before = parse(text)
    expected = copy.deepcopy(before)
    table = _open_table(expected, path)
    for key in others:
        table.pop(key, None)
    for key, value in values.items():
        table[key] = {**_open_table(table, (key,)), **value} if isinstance(value, dict) else value
    if expected == before:
        return text
    changed, inline = text, {}
    for key, value in values.items():
        if isinstance(value, dict) and _find_table(text, (*path, key)) is not None:
            changed = set_table(changed, (*path, key), value, ())
        else:
            inline[key] = table[key]
    return _checked(_set_lines(changed, path, inline, others), expected)


def _open_table(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Makes tables on the way where they are missing."""
    for index, name in enumerate(path):
        content = content.setdefault(name, {})
        if not isinstance(content, dict):
            raise NotToml(f"{'.'.join(path[: index + 1])} is no table")
    return content


def _set_lines(text: str, path: Path, values: dict[str, Any], others: tuple[str, ...]) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = "".join(f"{key} = {_render(value)}{newline}" for key, value in values.items())
    found = _find_table(text, path)
    if found is None:
        above = text if not text or text.endswith("\n") else text + newline
        gap = newline if above.strip() else ""
        return f"{above}{gap}[{'.'.join(path)}]{newline}{lines}"
    start, end = found
    head, body = _split_head(text[start:end])
    body = _without(body, (*values, *others))
    return text[:start] + head + lines + body + text[end:]


def remove_table(text: str, path: Path) -> str:
    """For the path of a table in a group."""
    before = parse(text)
    group, name = path
    if name not in before.get(group, {}):
        return text
    expected = copy.deepcopy(before)
    del expected[group][name]
    if not expected[group] and not re.search(rf"(?m)^[ \t]*\[[ \t]*{re.escape(group)}[ \t]*\]", text):
        del expected[group]  # it was only there for this
    changed = text
    while (found := _find_table(changed, path, below=True)) is not None:
        start, end = found
        # The empty line that was put before it goes with it.
        before_it = re.sub(r"(\r?\n)\r?\n$", r"\1", changed[:start]) if end == len(changed) else changed[:start]
        changed = before_it + changed[end:]
    return _checked(changed, expected)


def _find_table(text: str, path: Path, *, below: bool = False) -> tuple[int, int] | None:
    """From its header to the next one; with `below` those of its own tables count too."""
    name = r"[ \t]*\.[ \t]*".join(rf"(?:{re.escape(part)}|\"{re.escape(part)}\"|'{re.escape(part)}')" for part in path)
    more = r"(?:[ \t]*\.[^\]\r\n]*)?" if below else ""
    header = re.compile(rf"(?m)^[ \t]*\[[ \t]*{name}[ \t]*{more}\][^\r\n]*(?:\r?\n|$)")
    match = header.search(text)
    if match is None:
        return None
    following = re.compile(r"(?m)^[ \t]*\[").search(text, match.end())
    return match.start(), following.start() if following else len(text)


def _split_head(block: str) -> tuple[str, str]:
    end = block.find("\n") + 1
    return (block[:end], block[end:]) if end else (block + "\n", "")


def _without(body: str, keys: tuple[str, ...]) -> str:
    names = "|".join(map(re.escape, keys))
    return re.sub(rf"(?m)^[ \t]*(?:{names})[ \t]*=[^\r\n]*(?:\r?\n|$)", "", body)


def _render(value: Any) -> str:
    """Strings and lists of them, which TOML writes as JSON does, and tables of them."""
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(key)} = {_render(each)}" for key, each in value.items())
        return f"{{ {inner} }}"
    return json.dumps(value, ensure_ascii=False)


def _checked(text: str, expected: dict[str, Any]) -> str:
    try:
        if parse(text) == expected:
            return text
    except NotToml:
        pass
    raise NotToml("the table is written in a way that cannot be changed without touching the rest")

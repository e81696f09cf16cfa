"""Changes one member of a JSON text and leaves every other byte as it is. Pure.

The configuration of AI agents belongs to people and to other programs: a library that reads and writes such a file
changes its layout, its numbers, and drops its comments. So positions are found here, and text is inserted or removed
there. Comments (`//`, `/* */`) are understood, because some agents allow them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

_BLANK: Final = re.compile(r"(?:[ \t\r\n]|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_COMMENT: Final = re.compile(r"//[^\r\n]*|/\*.*?\*/", re.DOTALL)
_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_SCALAR: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")

Path = tuple[str, ...]


class NotJson(Exception):
    """Or not a JSON that can be changed without guessing."""


@dataclass(frozen=True, slots=True)
class Member:
    key: str
    start: int  # of the key
    value: int  # where the value starts
    end: int  # behind the value


@dataclass(frozen=True, slots=True)
class Node:
    """A value, and its position in the text."""

    start: int
    end: int
    content: Any
    members: tuple[Member, ...] | None = None  # of an object
    parts: dict[str, Node] | None = None
    items: tuple[Member, ...] | None = None  # of a list; their keys are their numbers


def parse(text: str) -> Node:
    try:
        found = _read(text, _skip(text, 0))
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    if _skip(text, found.end) != len(text):
        raise NotJson(f"there is more after the end, {_where(text, _skip(text, found.end))}")
    return found


def _skip(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return match.end() if match else at


def _where(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1}"


def _read(text: str, at: int) -> Node:
    letter = text[at : at + 1]
    if letter == "{":
        return _read_object(text, at)
    if letter == "[":
        return _read_list(text, at)
    match = (_STRING if letter == '"' else _SCALAR).match(text, at)
    if match is None:
        raise NotJson(f"a value is missing or malformed, {_where(text, at)}")
    try:
        return Node(at, match.end(), json.loads(match[0]))
    except ValueError as error:
        raise NotJson(f"{error}, {_where(text, at)}") from error


def _read_object(text: str, start: int) -> Node:
    members: list[Member] = []
    parts: dict[str, Node] = {}
    at = _skip(text, start + 1)
    while text[at : at + 1] != "}" or members:
        if text[at : at + 1] != '"':
            raise NotJson(f"a key is missing or malformed, {_where(text, at)}")
        key = _read(text, at)
        colon = _skip(text, key.end)
        if text[colon : colon + 1] != ":":
            raise NotJson(f"a colon is missing, {_where(text, colon)}")
        value = _read(text, _skip(text, colon + 1))
        if key.content in parts:
            raise NotJson(f"the key {key.content!r} is there twice, {_where(text, at)}")
        members.append(Member(key.content, at, value.start, value.end))
        parts[key.content] = value
        at = _skip(text, value.end)
        if text[at : at + 1] == "}":
            break
        if text[at : at + 1] != ",":
            raise NotJson(f"a comma or brace is missing, {_where(text, at)}")
        at = _skip(text, at + 1)
    return Node(start, at + 1, {key: part.content for key, part in parts.items()}, tuple(members), parts)


def _read_list(text: str, start: int) -> Node:
    content: list[Any] = []
    items: list[Member] = []
    at = _skip(text, start + 1)
    while text[at : at + 1] != "]" or items:
        item = _read(text, at)
        items.append(Member(str(len(items)), item.start, item.start, item.end))
        content.append(item.content)
        at = _skip(text, item.end)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise NotJson(f"a comma or bracket is missing, {_where(text, at)}")
        at = _skip(text, at + 1)
    return Node(start, at + 1, content, items=tuple(items))


def set_member(text: str, path: Path, value: Any) -> str:
    """The text with that member; objects on the way to it are made where they are missing."""
    if not text.strip():
        return json.dumps(_nest(path, value), indent=2, ensure_ascii=False) + "\n"
    node = parse(text)
    for index, key in enumerate(path):
        if node.parts is None:
            raise NotJson(f"{'.'.join(path[:index]) or 'the whole'} is no object")
        if key not in node.parts:
            return _insert(text, node, key, _nest(path[index + 1 :], value))
        node = node.parts[key]
    if node.content == value and isinstance(node.content, bool) == isinstance(value, bool):
        return text
    rendered = _render(text, value, _indent_at(text, node.start))
    return text[: node.start] + rendered + text[node.end :]


def remove_member(text: str, path: Path) -> str:
    """The text without that member, if it is there."""
    if not text.strip():
        return text
    node = parse(text)
    for key in path[:-1]:
        if node.parts is None or key not in node.parts:
            return text
        node = node.parts[key]
    for index, member in enumerate(node.members or ()):
        if member.key == path[-1]:
            return _cut(text, node, index)
    return text


def add_item(text: str, path: Path, value: Any) -> str:
    """The text in which that list has the value; the list is made where it is missing."""
    node = _find(text, path)
    if node is None:
        return set_member(text, path, [value])
    if node.items is None:
        raise NotJson(f"{'.'.join(path)} is no list")
    return text if value in node.content else _insert(text, node, "", value)


def remove_item(text: str, path: Path, value: Any) -> str:
    """The text in which that list does not have the value."""
    node = _find(text, path)
    if node is None or node.items is None or value not in node.content:
        return text
    return _cut(text, node, node.content.index(value))


def _find(text: str, path: Path) -> Node | None:
    if not text.strip():
        return None
    node = parse(text)
    for index, key in enumerate(path):
        if node.parts is None:
            raise NotJson(f"{'.'.join(path[:index]) or 'the whole'} is no object")
        if key not in node.parts:
            return None
        node = node.parts[key]
    return node


def _nest(path: Path, value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _insert(text: str, node: Node, key: str, value: Any) -> str:
    """As the last member of an object, or item of a list."""
    members = _members(node)
    name = "" if node.items is not None else f"{json.dumps(key)}: "
    closing = node.end - 1
    newline = _newline(text)
    last = members[-1].end if members else node.start + 1
    comma = "," if members else ""
    on_one_line = "\n" not in text[node.start : node.end]
    if on_one_line and members:
        return f"{text[:last]}, {name}{json.dumps(value, ensure_ascii=False)}{text[last:]}"
    outer = _indent_at(text, node.start)
    inner = _indent_at(text, members[0].start) if members else outer + _unit(text)
    member = f"{newline}{inner}{name}{_render(text, value, inner)}"
    # A comment behind the last member stays there, and the space before the brace stays before the brace.
    at = len(text[last:closing].rstrip(" \t\r\n")) + last
    end = newline + outer if not members and "\n" not in text[at:closing] else ""
    return text[:last] + comma + text[last:at] + member + end + text[at:]


def _members(node: Node) -> tuple[Member, ...]:
    members = node.items if node.items is not None else node.members
    assert members is not None
    return members


def _cut(text: str, node: Node, index: int) -> str:
    """With the space before it. Comments stay."""
    members = _members(node)
    member = members[index]
    comma = _skip(text, members[index - 1].end) if index else node.start
    start = _end_of_comments(text, comma + 1, member.start, text[member.end :])
    if index:
        return text[:comma] + text[comma + 1 : start] + text[member.end :]
    if len(members) > 1:
        comma = _skip(text, member.end)
        return text[:start] + text[member.end : comma] + text[comma + 1 :]
    rest = text[member.end : node.end - 1]
    return text[:start] + (rest if rest.strip() or start > node.start + 1 else "") + text[node.end - 1 :]


def _end_of_comments(text: str, start: int, end: int, following: str) -> int:
    comments = list(_COMMENT.finditer(text, start, end))
    if not comments:
        return start
    last = comments[-1]
    if last[0].startswith("//") and not following.lstrip(" \t\r").startswith("\n"):
        return text.index("\n", last.end()) + 1  # without it the comment would swallow what follows
    return last.end()


def _render(text: str, value: Any, indent: str) -> str:
    shown = json.dumps(value, indent=_unit(text), ensure_ascii=False)
    return shown.replace("\n", _newline(text) + indent)


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _indent_at(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """How much deeper a level is."""
    match = re.search(r"\n([ \t]+)\S", text)
    return match[1] if match else "  "

"""One entry in the list of MCP servers of an AI agent's file, put in and taken out; the rest of the text stays as it
is. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from k8e.cli.skill import jsontext, tomltext
from k8e.cli.skill.jsontext import NotJson

# The keys of the entry that are ours. All others stay as they are.
KEYS: Final = ("type", "command", "args", "url", "serverUrl", "httpUrl")


def put_entry(file: Path, text: str, entry: dict[str, Any], server: str) -> str:
    """The text of that file with the entry. Variables are added to those that the entry has."""
    others = tuple(key for key in KEYS if key not in entry)
    if file.suffix == ".toml":
        return tomltext.set_table(text, ("mcp_servers", server), entry, others)
    mark, body = _split_mark(text)
    before = jsontext.parse(body).content if body.strip() else {}
    path = ("mcpServers", server)
    servers = before.get("mcpServers", {}) if isinstance(before, dict) else None
    if not isinstance(servers, dict) or not isinstance(servers.get(server, {}), dict):
        raise NotJson("mcpServers, or our entry in it, is no object")
    found = servers.get(server, {})
    merged = entry
    if "env" in entry:
        if not isinstance(found.get("env", {}), dict):
            raise NotJson("env of our entry is no object")
        merged = {**entry, "env": {**found.get("env", {}), **entry["env"]}}
    changed = body
    if server not in servers:
        changed = jsontext.set_member(changed, path, entry)
    else:
        for key in others:
            changed = jsontext.remove_member(changed, (*path, key))
        for key, value in entry.items():
            if key == "env" and "env" in found:
                for name, text in value.items():
                    changed = jsontext.set_member(changed, (*path, key, name), text)
            else:
                changed = jsontext.set_member(changed, (*path, key), value)
    kept = {key: value for key, value in found.items() if key not in others}
    return mark + _checked(changed, {**before, "mcpServers": {**servers, server: {**kept, **merged}}})


def drop_entry(file: Path, text: str, server: str) -> str:
    if file.suffix == ".toml":
        return tomltext.remove_table(text, ("mcp_servers", server))
    mark, body = _split_mark(text)
    before = jsontext.parse(body).content if body.strip() else {}
    servers = before.get("mcpServers") if isinstance(before, dict) else None
    if not isinstance(servers, dict) or server not in servers:
        return text
    rest = {name: each for name, each in servers.items() if name != server}
    changed = jsontext.remove_member(body, ("mcpServers", server))
    return mark + _checked(changed, {**before, "mcpServers": rest})


def _split_mark(text: str) -> tuple[str, str]:
    """Splits off a byte order mark, with which some editors begin a file."""
    return (text[:1], text[1:]) if text.startswith("\ufeff") else ("", text)


def _checked(text: str, expected: object) -> str:
    if jsontext.parse(text).content != expected:
        raise NotJson("it is written in a way that cannot be changed without touching the rest")
    return text

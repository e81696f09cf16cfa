"""`agentkernel plugin install claude|codex|gemini`: tells an AI agent to start our MCP server, and which of its tools
need no permission. The files belong to the agent: docs/skills.md says how they are changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from k8e.cli.agentkernel.output import say
from k8e.cli.agentkernel.plan import find_file, read_user_config
from k8e.cli.process import Failure, print_json
from k8e.cli.skill import jsontext
from k8e.cli.skill.config_file import ConfigFile, Edit
from k8e.cli.skill.install import Agent, drop_entry, put_entry
from k8e.cli.skill.jsontext import NotJson
from k8e.profiles.config.file import AGENTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


SERVER: Final = "agentkernel"
COMMAND: Final[dict[str, Any]] = {"command": "agentkernel", "args": ["mcp", "server"]}
PAGE: Final = "docs/agentkernel.md"
PREFIX: Final = "mcp__agentkernel__"
PERMISSIONS: Final = {
    "allow": ("sandbox_run", "sandbox_exec", "sandbox_list", "sandbox_file_read"),
    "ask": ("sandbox_file_write", "sandbox_create"),
    "deny": (),
}


def install(parsed: argparse.Namespace) -> int:
    name, everywhere = parsed.agent or find_preferred(), getattr(parsed, "global")
    places = [(ConfigFile(path, within), put, drop) for path, within, put, drop in list_changes(name, everywhere)]
    texts = [place.edit(drop if parsed.uninstall else put, PAGE) for place, put, drop in places]
    for place, _, _ in places:
        place.check_writable()  # before anything is changed
    told = []
    for (place, put, _), text in zip(places, texts, strict=True):
        content = place.find_former(text, [put]) if parsed.uninstall else text.encode()
        told.append(place.save(content, dry_run=parsed.dry_run))
    if parsed.json:
        print_json({"ok": True, "agent": name, "dry_run": parsed.dry_run, "files": told})
    else:
        for each in told:
            say(f"{each['path']}: {each['action']}" + (" (dry run)" if parsed.dry_run else ""))
    return 0


def find_preferred() -> str:
    configs = (find_file(None)[0], read_user_config())
    for config in configs:
        if config is not None and config.preferred:
            return config.preferred
    raise Failure("usage", "which agent?", hint=f"agentkernel plugin install {'|'.join(AGENTS)}")


def list_changes(agent: str, everywhere: bool) -> list[tuple[Path, Path | None, Edit, Edit]]:
    """The files of an AI agent, the directory that must contain them, and the edits to install and uninstall."""
    home, here = Path.home(), Path.cwd()
    root, within = (home, None) if everywhere else (here, here)
    if agent == "claude":
        servers = home / ".claude" / "mcp.json" if everywhere else here / ".mcp.json"
        entry = {**COMMAND, "env": {}} if not everywhere else COMMAND
        permissions = root / ".claude" / "settings.json"
        return [with_server(agent, servers, within, entry), (permissions, within, grant, withdraw)]
    if agent == "gemini":
        return [with_server(agent, root / ".gemini" / "settings.json", within, COMMAND)]
    # Codex reads its own folder only, so it is for all projects whatever was asked.
    folder = Path(os.environ.get("CODEX_HOME") or home / ".codex")
    return [with_server(agent, folder / "config.toml", None, COMMAND)]


def with_server(
    agent: str, path: Path, within: Path | None, entry: dict[str, Any]
) -> tuple[Path, Path | None, Edit, Edit]:
    described = Agent(agent, path, path.parent)
    return (
        path,
        within,
        lambda text: put_entry(described, text, entry, SERVER),
        lambda text: drop_entry(described, text, SERVER),
    )


def grant(text: str) -> str:
    """Adds the tools that are on no list yet: a tool that the user has put on a list stays there."""
    if not text.strip():
        lists = {name: [PREFIX + tool for tool in tools] for name, tools in PERMISSIONS.items()}
        return json.dumps({"permissions": lists}, indent=2) + "\n"
    decided = list_decided(text)
    for name, tools in PERMISSIONS.items():
        for tool in tools:
            if PREFIX + tool not in decided:
                text = jsontext.add_item(text, ("permissions", name), PREFIX + tool)
    return text


def withdraw(text: str) -> str:
    if not text.strip():
        return text
    list_decided(text)
    for name, tools in PERMISSIONS.items():
        for tool in tools:
            text = jsontext.remove_item(text, ("permissions", name), PREFIX + tool)
    return text


def list_decided(text: str) -> set[str]:
    content = jsontext.parse(text).content
    permissions = content.get("permissions", {}) if isinstance(content, dict) else None
    if not isinstance(permissions, dict):
        raise NotJson("permissions is no object")
    return {
        each for tools in permissions.values() if isinstance(tools, list) for each in tools if isinstance(each, str)
    }

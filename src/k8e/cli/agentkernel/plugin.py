"""`agentkernel plugin install AGENT`: tells an AI agent to start our MCP server, and Claude which of its tools need no
permission. The files belong to the AI agent: docs/skills.md says how they are changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from k8e.cli.agentkernel.output import say
from k8e.cli.agentkernel.plan import find_file, read_user_config
from k8e.cli.process import Failure, print_json
from k8e.cli.skill import jsontext
from k8e.cli.skill.agents import NAMES, Agent, find_agent, find_claude_folder
from k8e.cli.skill.config_file import ConfigFile, Edit
from k8e.cli.skill.entry import drop_entry, put_entry
from k8e.cli.skill.inquiry import ask
from k8e.cli.skill.jsontext import NotJson
from k8e.cli.skill.report import list_lines
from k8e.cli.skill.server import Entry, describe_command, find_command, list_notes, list_variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


SERVER: Final = "agentkernel"
PAGE: Final = "docs/agentkernel.md"
PREFIX: Final = "mcp__agentkernel__"
PERMISSIONS: Final = {
    "allow": ("sandbox_run", "sandbox_exec", "sandbox_list", "sandbox_file_read"),
    "ask": ("sandbox_file_write", "sandbox_create"),
    "deny": (),
}

Change = tuple[Path, Edit, Edit]


def install(parsed: argparse.Namespace) -> int:
    agent = find_agent(parsed.agent or find_preferred(), project=not getattr(parsed, "global"))
    entry = describe_entry(agent)
    places = [(ConfigFile(path, agent.within), put, drop) for path, put, drop in list_changes(agent, entry)]
    texts = [place.edit(drop if parsed.uninstall else put, PAGE) for place, put, drop in places]
    for place, _, _ in places:
        place.check_writable()  # before anything is changed
    told = []
    for (place, put, _), text in zip(places, texts, strict=True):
        content = place.find_former(text, [put]) if parsed.uninstall else text.encode()
        told.append(place.save(content, dry_run=parsed.dry_run))
    report: dict[str, Any] = {"ok": True, "agent": agent.name, "dry_run": parsed.dry_run, "files": told}
    report["scope"] = "user" if agent.within is None else "project"
    if parsed.uninstall:
        show(report, as_json=parsed.json)
        return 0
    report["server"], report["notes"] = entry, list_notes(entry, SERVER, shared=agent.within is not None)
    answer = None if parsed.dry_run else ask(agent.name, SERVER, str(agent.within or Path.home()))
    problem = None
    if answer is not None:
        report["client"], problem = answer.body, answer.find_problem(agent.name, SERVER)
        report["ok"] = problem is None
    show(report, as_json=parsed.json)
    if problem is not None:
        raise problem
    return 0


def show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for line in list_lines(report, dry_run=report["dry_run"]):
        say(line)


def find_preferred() -> str:
    configs = (find_file(None)[0], read_user_config())
    for config in configs:
        if config is not None and config.preferred:
            return config.preferred
    raise Failure("usage", "which agent?", hint=f"agentkernel plugin install {'|'.join(NAMES)}")


def describe_entry(agent: Agent) -> Entry:
    command = find_command("agentkernel", shared=agent.within is not None)
    entry = describe_command(command, "mcp", "server", variables=list_variables())
    # Claude's own command writes an empty one into a project's file.
    return {**entry, "env": list_variables()} if agent.name == "claude" and agent.within is not None else entry


def list_changes(agent: Agent, entry: Entry) -> list[Change]:
    """The files of an AI agent, and the edits to install and uninstall."""
    changes = [with_server(path, entry) for path in agent.configs]
    if agent.name == "claude":
        folder = find_claude_folder() if agent.within is None else agent.within / ".claude"
        changes.append((folder / "settings.json", grant, withdraw))
    return changes


def with_server(path: Path, entry: Entry) -> Change:
    return (
        path,
        lambda text: put_entry(path, text, entry, SERVER),
        lambda text: drop_entry(path, text, SERVER),
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

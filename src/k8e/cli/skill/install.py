"""`k8e sandbox-install-skill`: writes an MCP server and a skill into the files of AI agents (docs/skills.md)."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k8e.cli.process import FAILED, Failure, print_json
from k8e.cli.skill import jsontext, tomltext
from k8e.cli.skill.config_file import ConfigFile, Edit
from k8e.cli.skill.jsontext import NotJson

SERVER: Final = "k8e-sandbox"
SKILL: Final = "k8e-sandbox-skill"
PAGE: Final = "docs/skills.md"
# The keys of the entry that are ours. All others stay as they are.
KEYS: Final = ("type", "command", "args", "url", "httpUrl")

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    config: Path
    skills: Path
    within: Path | None = None  # where its files must lie
    typed: bool = False  # wants to be told that a url is HTTP

    @property
    def is_toml(self) -> bool:
        return self.config.suffix == ".toml"


def find_agents() -> dict[str, Agent]:
    home, here = Path.home(), Path.cwd()
    codex = Path(os.environ.get("CODEX_HOME") or home / ".codex")
    found = (
        Agent("kiro", here / ".kiro" / "settings.json", here / ".kiro" / "skills", within=here),
        Agent("claude", home / ".claude.json", home / ".claude" / "skills", typed=True),
        Agent("gemini", home / ".gemini" / "settings.json", home / ".gemini" / "skills", typed=True),
        Agent("codex", codex / "config.toml", codex / "skills"),
    )
    return {agent.name: agent for agent in found}


def describe_server(agent: Agent, address: str) -> Entry:
    if not address:
        return {"command": "k8e", "args": ["sandbox-mcp"]}
    if "://" in address:
        url = address
    else:
        host, _, port = address.rpartition(":")
        near = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        plain = host in ("", "localhost", "[::1]") or host.startswith("127.")  # elsewhere there is always TLS
        url = f"{'http' if plain else 'https'}://{near}:{port}/mcp"
    return {"type": "http", "url": url} if agent.typed else {"url": url}


def put_entry(agent: Agent, text: str, entry: Entry, server: str = SERVER) -> str:
    others = tuple(key for key in KEYS if key not in entry)
    if agent.is_toml:
        return tomltext.set_table(text, ("mcp_servers", server), entry, others)
    mark, body = _split_mark(text)
    before = jsontext.parse(body).content if body.strip() else {}
    path = ("mcpServers", server)
    servers = before.get("mcpServers", {}) if isinstance(before, dict) else None
    if not isinstance(servers, dict) or not isinstance(servers.get(server, {}), dict):
        raise NotJson("mcpServers, or our entry in it, is no object")
    changed = body
    if server not in servers:
        changed = jsontext.set_member(changed, path, entry)
    else:
        for key in others:
            changed = jsontext.remove_member(changed, (*path, key))
        for key, value in entry.items():
            changed = jsontext.set_member(changed, (*path, key), value)
    kept = {key: value for key, value in servers.get(server, {}).items() if key not in others}
    return mark + _checked(changed, {**before, "mcpServers": {**servers, server: {**kept, **entry}}})


def drop_entry(agent: Agent, text: str, server: str = SERVER) -> str:
    if agent.is_toml:
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


def find_skill() -> Path:
    """The skill is beside the code in a wheel, and at the root of a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "_skills" / SKILL, package.parents[1] / "skills" / SKILL):
        if (folder / "SKILL.md").is_file():
            return folder
    raise Failure("skill_missing", "this installation has no skill files", hint="install k8e again")


class Installer:
    def __init__(self, agent: Agent, *, dry_run: bool) -> None:
        self._agent = agent
        self._dry_run = dry_run
        self.files: list[dict[str, str]] = []

    def install(self, address: str) -> None:
        config = ConfigFile(self._agent.config, self._agent.within)
        text = config.edit(self._edit_for(address), PAGE)
        skills = [(self._skill_file(file.name), file.read_bytes()) for file in sorted(find_skill().iterdir())]
        for place, _ in skills:
            place.check_writable()  # before anything is changed
        self._save(config, text.encode())
        for place, content in skills:
            self._save(place, content)

    def uninstall(self) -> None:
        config = ConfigFile(self._agent.config, self._agent.within)
        text = config.edit(lambda text: drop_entry(self._agent, text), PAGE)
        if config.content is not None:
            addresses = ("", os.environ.get("K8E_SANDBOX_MCP_ADDR", ""))
            self._save(config, config.find_former(text, map(self._edit_for, addresses)))
        for file in sorted(find_skill().iterdir()):
            place = self._skill_file(file.name)
            if place.content is not None:
                self._save(place, None)
        folder = self._skill_file("SKILL.md").target.parent
        if not self._dry_run and folder.name == SKILL and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def _edit_for(self, address: str) -> Edit:
        return lambda text: put_entry(self._agent, text, describe_server(self._agent, address))

    def _skill_file(self, name: str) -> ConfigFile:
        return ConfigFile(self._agent.skills / SKILL / name, self._agent.within)

    def _save(self, place: ConfigFile, content: bytes | None) -> None:
        report = place.save(content, dry_run=self._dry_run)
        if place.target != Path(os.path.abspath(place.path)):
            report["target"] = str(place.target)
        self.files.append(report)


def install_skill(options: argparse.Namespace) -> int:
    agents = find_agents()
    names = list(agents) if options.agent == "all" else [options.agent]
    told: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for name in names:
        installer = Installer(agents[name], dry_run=options.dry_run)
        problem: dict[str, Any] = {}
        try:
            if options.uninstall:
                installer.uninstall()
            else:
                installer.install(os.environ.get("K8E_SANDBOX_MCP_ADDR", ""))
        except Failure as failure:
            failures.append(failure)
            problem = failure.body
        told.append({"agent": name, "files": installer.files, **problem})
    answer: dict[str, Any] = {"ok": not failures, "dry_run": options.dry_run, "agents": told}
    if failures:
        answer = {**failures[0].body, **answer}
    print_json(answer)
    return FAILED if failures else 0

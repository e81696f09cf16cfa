"""`k8e sandbox-install-skill`: writes an MCP server and a skill into the files of AI agents (docs/skills.md)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Final

from k8e.cli.process import FAILED, Failure, is_for_person, print_json, write_all
from k8e.cli.skill.agents import NAMES, Agent, find_agent
from k8e.cli.skill.config_file import ConfigFile, Edit
from k8e.cli.skill.entry import drop_entry, put_entry
from k8e.cli.skill.inquiry import ask
from k8e.cli.skill.report import list_lines
from k8e.cli.skill.server import Entry, describe_address, describe_command, find_command, list_notes, list_variables
from k8e.cli.view import show_error
from k8e.profiles.text import clean

SERVER: Final = "k8e-sandbox"
SKILL: Final = "k8e-sandbox-skill"
PAGE: Final = "docs/skills.md"
ADDRESS: Final = "K8E_SANDBOX_MCP_ADDR"


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
        self.report: dict[str, Any] = {"agent": agent.name, "files": []}

    def install(self, address: str) -> None:
        entry = self._describe(address)
        self.report["server"] = entry
        if notes := list_notes(entry, "k8e", shared=self._agent.within is not None):
            self.report["notes"] = notes
        configs = [ConfigFile(path, self._agent.within) for path in self._agent.configs]
        texts = [config.edit(put(config.path, entry), PAGE) for config in configs]
        skills = [(self._skill_file(file.name), file.read_bytes()) for file in sorted(find_skill().iterdir())]
        for place in (*configs, *(place for place, _ in skills)):
            place.check_writable()  # before anything is changed
        for config, text in zip(configs, texts, strict=True):
            self._save(config, text.encode())
        for place, content in skills:
            self._save(place, content)
        if not self._dry_run:
            self._ask()

    def uninstall(self) -> None:
        former = [self._describe(address) for address in ("", os.environ.get(ADDRESS, ""))]
        former.append(describe_command("k8e", "sandbox-mcp"))
        for path in self._agent.configs:
            config = ConfigFile(path, self._agent.within)
            text = config.edit(drop(path), PAGE)
            if config.content is not None:
                self._save(config, config.find_former(text, [put(path, entry) for entry in former]))
        for file in sorted(find_skill().iterdir()):
            place = self._skill_file(file.name)
            if place.content is not None:
                self._save(place, None)
        folder = self._skill_file("SKILL.md").target.parent
        if not self._dry_run and folder.name == SKILL and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def _describe(self, address: str) -> Entry:
        if address:
            return describe_address(self._agent, address)
        command = find_command("k8e", shared=self._agent.within is not None)
        return describe_command(command, "sandbox-mcp", variables=list_variables())

    def _skill_file(self, name: str) -> ConfigFile:
        return ConfigFile(self._agent.skills / SKILL / name, self._agent.within)

    def _save(self, place: ConfigFile, content: bytes | None) -> None:
        report = place.save(content, dry_run=self._dry_run)
        if place.target != Path(os.path.abspath(place.path)):
            report["target"] = str(place.target)
        self.report["files"].append(report)

    def _ask(self) -> None:
        folder = self._agent.within or Path.home()
        if (answer := ask(self._agent.name, SERVER, str(folder))) is not None:
            self.report["client"] = answer.body
            if (problem := answer.find_problem(self._agent.name, SERVER)) is not None:
                raise problem


def put(path: Path, entry: Entry) -> Edit:
    return lambda text: put_entry(path, text, entry, SERVER)


def drop(path: Path) -> Edit:
    return lambda text: drop_entry(path, text, SERVER)


def install_skill(options: argparse.Namespace) -> int:
    told: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for name in NAMES if options.agent == "all" else [options.agent]:
        # Kiro's files are a project's; those of the others are the user's.
        installer = Installer(find_agent(name, project=name == "kiro"), dry_run=options.dry_run)
        problem: dict[str, Any] = {}
        try:
            if options.uninstall:
                installer.uninstall()
            else:
                installer.install(os.environ.get(ADDRESS, ""))
        except Failure as failure:
            failures.append(failure)
            problem = failure.body
        told.append({**installer.report, **problem})
    if is_for_person():
        lines = [line for report in told for line in list_lines(report, dry_run=options.dry_run)]
        write_all(1, "".join(f"{clean(line)}\n" for line in lines).encode("utf-8", "backslashreplace"))
        for each in failures:
            show_error(each.body)
    else:
        answer = {"ok": not failures, "dry_run": options.dry_run, "agents": told}
        print_json({**failures[0].body, **answer} if failures else answer)
    return FAILED if failures else 0

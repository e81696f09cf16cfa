"""`agentkernel plugin install`: the files that AI agents read. None of it needs a daemon."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.agentkernel.house import AGENTKERNEL, House, link, list_tree

SEED_PERMISSIONS = {
    "permissions": {
        "allow": [
            "mcp__agentkernel__sandbox_run",
            "mcp__agentkernel__sandbox_exec",
            "mcp__agentkernel__sandbox_list",
            "mcp__agentkernel__sandbox_file_read",
        ],
        "ask": ["mcp__agentkernel__sandbox_file_write", "mcp__agentkernel__sandbox_create"],
        "deny": [],
    }
}


class Unconfigured(House):
    """No variable says where the daemon is: the entry would have it."""

    @property
    def env(self) -> dict[str, str]:
        return {name: value for name, value in super().env.items() if not name.startswith("K8E_")}


GLOBAL = {"command": str(AGENTKERNEL), "args": ["mcp", "server"]}  # it is in no directory that every program looks into


def read_entry(file: Path) -> Any:
    text = file.read_text()
    servers = tomllib.loads(text)["mcp_servers"] if file.suffix == ".toml" else json.loads(text)["mcpServers"]
    return servers["agentkernel"]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return Unconfigured(tmp_path / "none", tmp_path)


def test_claude_from_nothing_is_the_seed_s_configuration(house: House) -> None:
    before = list_tree(house.project)
    house.ok("plugin", "install", "claude")
    servers = json.loads((house.project / ".mcp.json").read_text())
    entry = {"command": "agentkernel", "args": ["mcp", "server"], "env": {}}
    assert servers == {"mcpServers": {"agentkernel": entry}}
    assert json.loads((house.project / ".claude" / "settings.json").read_text()) == SEED_PERMISSIONS
    again = house.object("plugin", "install", "claude")
    assert {each["action"] for each in again["files"]} == {"unchanged"}
    house.ok("plugin", "install", "claude", "--uninstall")
    assert list_tree(house.project) == before


def test_everywhere(house: House) -> None:
    """In the file that Claude reads; tests/clients asks Claude."""
    told = house.object("plugin", "install", "claude", "--global")
    assert told["scope"] == "user"
    servers = json.loads((house.home / ".claude.json").read_text())
    assert servers["mcpServers"]["agentkernel"] == GLOBAL
    assert json.loads((house.home / ".claude" / "settings.json").read_text()) == SEED_PERMISSIONS
    assert list_tree(house.project) == {}


@pytest.mark.parametrize(
    ("agent", "here", "everywhere"),
    [
        ("gemini", [".gemini/settings.json"], ".gemini/settings.json"),
        ("kiro", [".kiro/settings.json", ".kiro/settings/mcp.json"], ".kiro/settings/mcp.json"),
        ("cursor", [".cursor/mcp.json"], ".cursor/mcp.json"),
        ("windsurf", [], ".codeium/windsurf/mcp_config.json"),
        ("codex", [], ".codex/config.toml"),
    ],
)
def test_the_files_of_each(house: House, agent: str, here: list[str], everywhere: str) -> None:
    told = house.object("plugin", "install", agent)
    assert told["scope"] == ("project" if here else "user")
    assert sorted(list_tree(house.project)) == here
    for file in here:
        assert read_entry(house.project / file) == {"command": "agentkernel", "args": ["mcp", "server"]}
    house.ok("plugin", "install", agent, "--global")
    assert read_entry(house.home / everywhere) == GLOBAL
    house.ok("plugin", "install", agent, "--uninstall")
    house.ok("plugin", "install", agent, "--uninstall", "--global")
    assert list_tree(house.home) == {}


def test_what_others_wrote_stays_to_the_byte(house: House) -> None:
    servers = '{\n\t"mcpServers": {"other": {"command": "x"}},  // mine\n\t"big": 1.50e3\n}\n'
    settings = (
        '{\n  "permissions": {\n    "allow": ["Bash(ls)" /* list */],\n'
        '    "deny": ["mcp__agentkernel__sandbox_run"]\n  }, "model": "x"\n}'
    )
    house.write(".mcp.json", servers)
    house.write(".claude/settings.json", settings)
    house.ok("plugin", "install", "claude")
    merged = (house.project / ".claude" / "settings.json").read_text()
    assert '"Bash(ls)", "mcp__agentkernel__sandbox_exec"' in merged
    assert "/* list */" in merged
    assert "mcp__agentkernel__sandbox_run" not in merged.partition('"deny"')[0]  # what was denied stays denied
    assert '"model": "x"' in merged
    assert "// mine" in (house.project / ".mcp.json").read_text()
    house.ok("plugin", "install", "claude", "--uninstall")
    assert (house.project / ".mcp.json").read_text() == servers
    assert (house.project / ".claude" / "settings.json").read_text() == settings


def test_a_dry_run_writes_nothing(house: House) -> None:
    before = list_tree(house.home)
    told = house.object("plugin", "install", "claude", "--dry-run")
    assert [each["action"] for each in told["files"]] == ["created", "created"]
    assert list_tree(house.home) == before


def test_what_the_agent_s_program_says_is_shown(house: House) -> None:
    program = house.home / "bin" / "claude"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'agentkernel: x - ✗ Failed to connect'\n")
    program.chmod(0o755)
    house.overrides["PATH"] = f"{program.parent}:{house.env['PATH']}"
    done = house.ak("plugin", "install", "claude")
    assert (done.code, done.stdout) == (1, b"")
    assert "[server_not_connected]" in done.stderr.decode()
    assert ".mcp.json: created" in done.stderr.decode()
    assert house.ak("plugin", "install", "claude", "--uninstall").code == 0
    program.write_text("#!/bin/sh\necho 'agentkernel: x - ⏸ Pending approval'\n")
    done = house.ak("plugin", "install", "claude")
    assert done.code == 0
    assert f"hint: start claude in {house.project}" in done.stderr.decode()


def test_the_agent_of_the_project_is_meant_where_none_is_named(house: House) -> None:
    assert "[usage]" in house.refusal("plugin", "install")
    house.write("agentkernel.toml", '[agent]\npreferred = "gemini"\n')
    assert house.object("plugin", "install")["agent"] == "gemini"


def test_what_is_not_understood_is_left_alone(house: House) -> None:
    house.write(".mcp.json", "{ broken")
    before = list_tree(house.project)
    assert "[file_unparsable]" in house.refusal("plugin", "install", "claude")
    assert list_tree(house.project) == before


def test_a_project_does_not_choose_what_is_written_to(house: House) -> None:
    victim = house.home / "victim.json"
    victim.write_text("{}")
    link(house.project / ".mcp.json", str(victim))
    assert "[link_refused]" in house.refusal("plugin", "install", "claude")
    assert victim.read_text() == "{}"

"""`k8e sandbox-install-skill` on homes as people have them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.machine import K8E, ROOT, Done, Machine, make_folder, run_launcher
from tests.cli.test_views import type_at_terminal

SKILL_MD = ROOT / "skills" / "k8e-sandbox-skill" / "SKILL.md"
AGENTS = {
    "kiro": (".kiro/settings/mcp.json", ".kiro/skills"),
    "claude": (".claude.json", ".claude/skills"),
    "gemini": (".gemini/settings.json", ".gemini/skills"),
    "codex": (".codex/config.toml", ".codex/skills"),
    "cursor": (".cursor/mcp.json", ".cursor/skills"),
    "windsurf": (".codeium/windsurf/mcp_config.json", ".codeium/windsurf/skills"),
}
ALSO = {"kiro": (".kiro/settings.json",)}  # as k8e's documents name it
DAEMON = ("K8E_RUN_DIR", "K8E_STATE_DIR", "K8E_CONFIG")


class Home(Machine):
    """A home of which nothing says where its daemon is: nothing here needs one."""

    @property
    def env(self) -> dict[str, str]:
        return {name: value for name, value in super().env.items() if name not in DAEMON or name in self.overrides}


@pytest.fixture
def home(tmp_path: Path) -> Machine:
    return Home(tmp_path / "none", tmp_path)


def command_for(name: str) -> dict[str, Any]:
    """In a project's file the name is enough, because k8e is on the PATH; in a user's own it is not in a directory that
    every program looks into."""
    return {"command": "k8e" if name == "kiro" else str(K8E), "args": ["sandbox-mcp"]}


def install(home: Machine, *words: str, **settings: Any) -> Done:
    return home.k8e("sandbox-install-skill", *words, **settings)


def read_servers(file: Path) -> Any:
    text = file.read_text()
    return tomllib.loads(text)["mcp_servers"] if file.suffix == ".toml" else json.loads(text)["mcpServers"]


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_all_of_them_from_nothing(home: Machine) -> None:
    done = install(home, "all")
    assert (done.code, done.json["ok"]) == (0, True)
    for name, (config, skills) in AGENTS.items():
        for file in (config, *ALSO.get(name, ())):
            assert read_servers(home.home / file) == {"k8e-sandbox": command_for(name)}, name
        assert (home.home / skills / "k8e-sandbox-skill" / "SKILL.md").read_bytes() == SKILL_MD.read_bytes()
        assert stat.S_IMODE((home.home / config).stat().st_mode) == 0o600
    told = {file["path"]: file["action"] for agent in done.json["agents"] for file in agent["files"]}
    assert set(told) == {str(home.home / path) for path in list_files(home.home)}
    assert set(told.values()) == {"created"}
    before = list_files(home.home)
    again = install(home)
    assert {file["action"] for agent in again.json["agents"] for file in agent["files"]} == {"unchanged"}
    assert list_files(home.home) == before
    assert install(home, "--uninstall").code == 0
    assert list_files(home.home) == {}


@pytest.mark.parametrize("name", AGENTS)
def test_one_of_them(home: Machine, name: str) -> None:
    assert install(home, name).code == 0
    config, skills = AGENTS[name]
    assert set(list_files(home.home)) == {config, *ALSO.get(name, ()), f"{skills}/k8e-sandbox-skill/SKILL.md"}


EXISTING = {
    "claude": '{\n    "n": 17, "big": 1e-400,\n\t"mcpServers": {\n  "other": {"command": "x"}},\r\n "z": "\\u00e9"}',
    "gemini": '// mine\n{\n  "ui": {"theme": "dark"}, /* keep */\n  "mcpServers": {} // none yet\n}\n',
    "codex": '# mine\nmodel = "m"   # why not\n\n[mcp_servers.other]\ncommand = "x"\n\n[profiles.a]\nb = 1_000',
}


@pytest.mark.parametrize("name", EXISTING)
def test_what_is_there_stays_to_the_byte(home: Machine, name: str) -> None:
    file = home.home / AGENTS[name][0]
    file.parent.mkdir(parents=True, exist_ok=True)
    before = EXISTING[name].encode()
    file.write_bytes(before)
    file.chmod(0o640)
    done = install(home, name)
    assert done.code == 0, done
    after = file.read_bytes()
    assert b"sandbox-mcp" in after
    # All of it is there, with our entry in between.
    start = next(at for at in range(len(before) + 1) if before[at : at + 1] != after[at : at + 1])
    assert after.endswith(before[start:])
    backup = file.with_name(file.name + ".k8e-backup")
    assert done.json["agents"][0]["files"][0] == {"path": str(file), "action": "updated", "backup": str(backup)}
    assert backup.read_bytes() == before
    assert {stat.S_IMODE(one.stat().st_mode) for one in (file, backup)} == {0o640}
    assert install(home, name).json["agents"][0]["files"][0]["action"] == "unchanged"
    assert install(home, name, "--uninstall").code == 0
    assert file.read_bytes() == before
    assert not (home.home / AGENTS[name][1] / "k8e-sandbox-skill").exists()


def test_taking_it_out_keeps_what_was_changed_since(home: Machine) -> None:
    file = home.home / ".claude.json"
    file.write_text('{"a": 1}')
    install(home, "claude")
    file.write_text(file.read_text().replace('"a": 1', '"a": 2'))
    install(home, "claude", "--uninstall")
    assert json.loads(file.read_text()) == {"a": 2, "mcpServers": {}}


def test_an_address_instead_of_a_command(home: Machine) -> None:
    install(home, "all")
    for address, url in (
        (":8811", "http://127.0.0.1:8811/mcp"),
        ("localhost:8811", "http://localhost:8811/mcp"),
        ("10.0.0.1:8811", "https://10.0.0.1:8811/mcp"),
        ("0.0.0.0:8811", "https://127.0.0.1:8811/mcp"),
        ("https://mcp.example.com/x", "https://mcp.example.com/x"),
    ):
        assert install(home, "all", env={"K8E_SANDBOX_MCP_ADDR": address}).code == 0
        for name, (config, _) in AGENTS.items():
            typed = {"type": "http"} if name in ("claude", "gemini") else {}
            key = "serverUrl" if name == "windsurf" else "url"
            assert read_servers(home.home / config) == {"k8e-sandbox": {**typed, key: url}}
    install(home, "all")
    assert read_servers(home.home / ".claude.json") == {"k8e-sandbox": command_for("claude")}


@pytest.mark.parametrize("flags", [(), ("--uninstall",)])
def test_a_dry_run_writes_nothing(home: Machine, flags: tuple[str, ...]) -> None:
    (home.home / ".claude.json").write_text('{"a": 1}')
    if flags:
        install(home, "all")
    before = list_files(home.home)
    done = install(home, "all", "--dry-run", *flags)
    assert done.json["dry_run"] is True
    told = {file["action"] for agent in done.json["agents"] for file in agent["files"]}
    assert told == ({"updated", "removed"} if flags else {"created", "updated"})
    assert list_files(home.home) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("claude", b'{"mcpServers": {'),
        ("claude", b"\xff\xfe{}"),
        ("gemini", b'{"a": 1,}'),
        ("kiro", b"[]"),
        ("codex", b"x = \n"),
        ("codex", b'mcp_servers = { other = { command = "x" } }\n'),
    ],
)
def test_a_file_that_is_not_understood_is_left_alone(home: Machine, name: str, content: bytes) -> None:
    file = home.home / AGENTS[name][0]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    for flags in ((), ("--dry-run",)):
        done = install(home, name, *flags)
        assert (done.code, done.json["code"], done.json["ok"]) == (1, "file_unparsable", False)
        assert str(file) in done.json["error"]
    assert list_files(home.home) == {AGENTS[name][0]: content}, "not even the skill"


def test_one_that_fails_does_not_keep_the_others(home: Machine) -> None:
    (home.home / ".claude.json").write_text("{")
    done = install(home, "all")
    assert (done.code, done.json["code"]) == (1, "file_unparsable")
    assert {agent["agent"]: agent.get("code") for agent in done.json["agents"]} == {
        "kiro": None,
        "claude": "file_unparsable",
        "gemini": None,
        "codex": None,
        "cursor": None,
        "windsurf": None,
    }
    assert read_servers(home.home / ".gemini" / "settings.json") == {"k8e-sandbox": command_for("gemini")}


def test_a_read_only_file_is_left_alone(home: Machine) -> None:
    file = home.home / ".claude.json"
    file.write_text('{"a": 1}')
    file.chmod(0o444)
    for flags in ((), ("--dry-run",)):
        done = install(home, "claude", *flags)
        assert (done.code, done.json["code"]) == (1, "file_read_only")
    assert list_files(home.home) == {".claude.json": b'{"a": 1}'}


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_what_is_no_file_is_refused(home: Machine, kind: str) -> None:
    path = home.home / ".claude.json"
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    done = install(home, "claude")
    assert (done.code, done.json["code"]) == (1, "file_unreadable")


class TestLinks:
    def test_in_a_home_they_are_followed_and_stay(self, home: Machine) -> None:
        elsewhere = home.home / "dotfiles"
        elsewhere.mkdir()
        (elsewhere / "claude.json").write_text('{"a": 1}')
        link = home.home / ".claude.json"
        link.symlink_to("dotfiles/claude.json")
        (elsewhere / "gemini").mkdir()
        (home.home / ".gemini").symlink_to(elsewhere / "gemini")
        done = install(home, "all")
        assert done.code == 0
        told = {file["path"]: file.get("target") for agent in done.json["agents"] for file in agent["files"]}
        assert told[str(link)] == str(elsewhere / "claude.json")
        assert link.is_symlink()
        assert read_servers(elsewhere / "claude.json") == {"k8e-sandbox": command_for("claude")}
        assert read_servers(elsewhere / "gemini" / "settings.json") == {"k8e-sandbox": command_for("claude")}
        install(home, "claude", "--uninstall")
        assert link.is_symlink()
        assert (elsewhere / "claude.json").read_text() == '{"a": 1}'

    @pytest.mark.parametrize("target", ["nowhere", ".claude.json"])
    def test_one_that_leads_nowhere_is_refused(self, home: Machine, target: str) -> None:
        (home.home / ".claude.json").symlink_to(target)
        done = install(home, "claude")
        assert (done.code, done.json["code"]) == (1, "link_refused")
        assert list_files(home.home) == {}

    @pytest.mark.parametrize("link", [".kiro", ".kiro/settings.json", ".kiro/settings/mcp.json", ".kiro/skills"])
    def test_a_project_does_not_choose_what_is_written_to(self, home: Machine, link: str) -> None:
        project, outside = home.home / "project", home.home / "outside"
        (project / link).parent.mkdir(parents=True)
        outside.mkdir()
        (outside / "settings.json").write_text('{"a": 1}')
        (project / link).symlink_to(outside / "settings.json" if link.endswith("json") else outside)
        before = list_files(outside)
        done = home.shell(f"cd {project} && k8e sandbox-install-skill kiro")
        assert (done.code, done.json["code"]) == (1, "link_refused")
        assert list_files(outside) == before


def test_what_root_installs_for_somebody_is_theirs(home: Machine) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(home.home, 1234, 1235)
    install(home, "claude")
    found = [home.home / ".claude.json", *(home.home / ".claude").rglob("*"), home.home / ".claude"]
    assert {(one.stat().st_uid, one.stat().st_gid) for one in found} == {(1234, 1235)}


class TestCommand:
    """What the entry says is what the AI agent can start."""

    def test_off_the_path_it_is_written_with_its_path(self, home: Machine) -> None:
        home.overrides["PATH"] = "/usr/bin:/bin"
        done = install(home, "kiro")
        entry = read_servers(home.home / ".kiro/settings/mcp.json")["k8e-sandbox"]
        assert entry == done.json["agents"][0]["server"] == {"command": str(K8E), "args": ["sandbox-mcp"]}
        assert "not on the PATH" in done.json["agents"][0]["notes"][0]
        started = subprocess.run([entry["command"], "--help"], env={"HOME": str(home.home)}, capture_output=True)
        assert started.returncode == 0, started

    def test_another_one_on_the_path_is_not_meant(self, home: Machine) -> None:
        other = home.home / "bin" / "k8e"
        other.parent.mkdir()
        other.write_text("#!/bin/sh\nexit 9\n")
        other.chmod(0o755)
        home.overrides["PATH"] = f"{other.parent}:{K8E.parent}:/usr/bin:/bin"
        install(home, "kiro")
        assert read_servers(home.home / ".kiro/settings/mcp.json")["k8e-sandbox"]["command"] == str(K8E)

    def test_variables_that_name_the_daemon_are_in_the_entry(self, home: Machine) -> None:
        """AI agents start servers with few of their own variables. A secret is not written."""
        told = {"K8E_RUN_DIR": "/run/other", "K8E_SANDBOX_PROFILE": "work"}
        done = install(home, "all", env={**told, "K8E_SANDBOX_APIKEY": "s3cret"})
        assert done.code == 0
        for name, (config, _) in AGENTS.items():
            entry = read_servers(home.home / config)["k8e-sandbox"]
            assert entry == {**command_for(name), "env": told}
        assert b"s3cret" not in b"".join(list_files(home.home).values()) + done.stdout
        assert "K8E_SANDBOX_APIKEY" in done.json["agents"][1]["notes"][0]
        install(home, "all", "--uninstall", env=told)
        assert list_files(home.home) == {}

    def test_the_folders_that_variables_name(self, home: Machine) -> None:
        for variable, folder in (("CLAUDE_CONFIG_DIR", "c"), ("CODEX_HOME", "x"), ("GEMINI_CLI_HOME", "g")):
            home.overrides[variable] = str(home.home / folder)
        for name in ("claude", "codex", "gemini"):
            install(home, name)
        configs = {"c/.claude.json", "x/config.toml", "g/.gemini/settings.json"}
        skills = {f"{folder}/skills/k8e-sandbox-skill/SKILL.md" for folder in ("c", "x", "g/.gemini")}
        assert set(list_files(home.home)) == configs | skills


class TestAnswers:
    """The AI agent's own program is asked after an installation. Here it is a script that says what the real ones say,
    as they were seen; tests/clients has the real ones."""

    @pytest.mark.parametrize(
        ("name", "said", "status"),
        [
            ("claude", "k8e-sandbox: /x/k8e sandbox-mcp - ✓ Connected", "connected"),
            ("claude", "k8e-sandbox: /x/error/k8e sandbox-mcp - ⏸ Pending approval", "waiting"),
            ("gemini", "✓ k8e-sandbox: /x - failed/k8e sandbox-mcp (stdio) - Connected", "connected"),
            ("codex", "k8e-sandbox  /x/k8e  sandbox-mcp  -  -  enabled  Unsupported", "listed"),
        ],
    )
    def test_what_it_says_is_reported(self, home: Machine, name: str, said: str, status: str) -> None:
        self.place(home, name, f"cat <<'END'\nMCP servers:\n\nother: x - ✗ Failed to connect\n{said}\nEND")
        done = install(home, name)
        assert (done.code, done.json["ok"]) == (0, True)
        program = str(home.home / "bin" / name)
        hint = f"start {name} in {home.home}, trust the folder and allow the server"
        expected = {"program": program, "status": status, "said": said}
        assert done.json["agents"][0]["client"] == expected | ({"hint": hint} if status == "waiting" else {})
        assert (home.home / "asked").read_text() == f"mcp list, in {home.home}\n"

    @pytest.mark.parametrize(
        ("said", "code"),
        [
            ("k8e-sandbox: /x/k8e sandbox-mcp - ✗ Failed to connect", "server_not_connected"),
            ("k8e-sandboxes: other - ✓ Connected", "server_not_listed"),
            ("other: /x/k8e-sandbox - ✓ Connected", "server_not_listed"),
            ("No MCP servers configured.", "server_not_listed"),
        ],
    )
    def test_what_it_cannot_do_is_an_error(self, home: Machine, said: str, code: str) -> None:
        self.place(home, "claude", f"echo '{said}'")
        done = install(home, "claude")
        assert (done.code, done.json["ok"], done.json["code"]) == (1, False, code)
        (agent,) = done.json["agents"]
        assert {file["action"] for file in agent["files"]} == {"created"}
        assert agent["client"]["said"] == said

    def test_a_server_that_was_too_slow_is_looked_at_again(self, home: Machine) -> None:
        again = "[ -e again ] && echo 'k8e-sandbox: x - Connected' || echo 'k8e-sandbox: x - Disconnected'; touch again"
        self.place(home, "gemini", again)
        done = install(home, "gemini")
        assert (done.code, done.json["agents"][0]["client"]["status"]) == (0, "connected")

    def test_a_program_that_fails_says_nothing(self, home: Machine) -> None:
        self.place(home, "claude", "exit 3")
        done = install(home, "claude")
        assert (done.code, done.json["agents"][0]["client"]["status"]) == (0, "silent")

    @pytest.mark.parametrize("flag", ["--dry-run", "--uninstall"])
    def test_it_is_asked_after_an_installation_only(self, home: Machine, flag: str) -> None:
        self.place(home, "claude", "")
        assert install(home, "claude", flag).code == 0
        assert not (home.home / "asked").exists()

    @staticmethod
    def place(home: Machine, name: str, script: str) -> None:
        program = home.home / "bin" / name
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$*, in $PWD" > {home.home}/asked\n{script}\n')
        program.chmod(0o755)
        home.overrides["PATH"] = f"{program.parent}:{K8E.parent}:/usr/bin:/bin"


def test_at_a_terminal_it_is_text(home: Machine) -> None:
    (home.home / ".codex").mkdir()
    (home.home / ".codex" / "config.toml").write_text("x =")
    code, text = type_at_terminal(home, "sandbox-install-skill", "all", "--dry-run", env={"NO_COLOR": "1"})
    assert code == 1
    assert f"{home.home}/.claude.json: created (dry run)\n" in text
    assert "[file_unparsable]" in text
    code, text = type_at_terminal(home, "sandbox-install-skill", "claude", "--dry-run", "--json")
    assert (code, json.loads(text)["ok"]) == (0, True)


def test_an_unknown_agent(home: Machine) -> None:
    done = install(home, "emacs")
    assert (done.code, done.json["code"]) == (1, "usage")


# The skill itself


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with make_folder() as folder:
        machine = Machine(folder, folder)
        with run_launcher(machine):
            yield machine
            for session in machine.live_sessions():
                machine.k8e("sandbox", "destroy", session)


EXAMPLES = re.findall(r"```bash\n(.*?)```", SKILL_MD.read_text(), re.DOTALL)
PRINTED = ["42", "hello from a file", "from one\nfrom two\n", "allowed_hosts", "production-data"]


@pytest.mark.parametrize(
    ("example", "printed"), list(zip(EXAMPLES, PRINTED, strict=True)), ids=[text.split("\n")[0] for text in PRINTED]
)
def test_every_example_runs_as_it_stands(machine: Machine, example: str, printed: str) -> None:
    done = subprocess.run(
        ["bash", "-e", "-c", example], env=machine.env, cwd=machine.home, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done
    assert printed in done.stdout
    assert '"error"' not in done.stdout


def test_the_head_is_one_that_agents_read() -> None:
    import yaml

    _, head, body = SKILL_MD.read_text().split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["name"] == SKILL_MD.parent.name
    assert len(fields["description"]) <= 1024, "what agents take"
    for trigger in (
        "run this",
        "execute",
        "test it",
        "check if this works",
        "帮我跑一下",
        "运行这个",
        "安装并使用",
        "看看输出",
    ):
        assert trigger in fields["description"]
    assert len(body.splitlines()) < 100, "short"

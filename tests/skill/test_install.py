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

from tests.cli.machine import ROOT, Done, Machine, make_folder, run_launcher

COMMAND = {"command": "k8e", "args": ["sandbox-mcp"]}
SKILL_MD = ROOT / "skills" / "k8e-sandbox-skill" / "SKILL.md"
AGENTS = {
    "kiro": (".kiro/settings.json", ".kiro/skills"),
    "claude": (".claude.json", ".claude/skills"),
    "gemini": (".gemini/settings.json", ".gemini/skills"),
    "codex": (".codex/config.toml", ".codex/skills"),
}


@pytest.fixture
def home(tmp_path: Path) -> Machine:
    """Nothing here needs a daemon."""
    return Machine(tmp_path / "none", tmp_path)


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
        assert read_servers(home.home / config) == {"k8e-sandbox": COMMAND}, name
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
    assert set(list_files(home.home)) == {config, f"{skills}/k8e-sandbox-skill/SKILL.md"}


EXISTING = {
    "claude": '{\n    "n": 17, "big": 1e-400,\n\t"mcpServers": {\n  "other": {"command": "x"}},\r\n "z": "\\u00e9"}',
    "gemini": '// mine\n{\n  "ui": {"theme": "dark"}, /* keep */\n  "mcpServers": {} // none yet\n}\n',
    "codex": '# mine\nmodel = "m"   # why not\n\n[mcp_servers.other]\ncommand = "x"\n\n[profiles.a]\nb = 1_000',
}


@pytest.mark.parametrize("name", EXISTING)
def test_what_is_there_stays_to_the_byte(home: Machine, name: str) -> None:
    file = home.home / AGENTS[name][0]
    file.parent.mkdir(exist_ok=True)
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
            assert read_servers(home.home / config) == {"k8e-sandbox": {**typed, "url": url}}
    install(home, "all")
    assert read_servers(home.home / ".claude.json") == {"k8e-sandbox": COMMAND}


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
    file.parent.mkdir(exist_ok=True)
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
    }
    assert read_servers(home.home / ".gemini" / "settings.json") == {"k8e-sandbox": COMMAND}


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
        assert read_servers(elsewhere / "claude.json") == {"k8e-sandbox": COMMAND}
        assert read_servers(elsewhere / "gemini" / "settings.json") == {"k8e-sandbox": COMMAND}
        install(home, "claude", "--uninstall")
        assert link.is_symlink()
        assert (elsewhere / "claude.json").read_text() == '{"a": 1}'

    @pytest.mark.parametrize("target", ["nowhere", ".claude.json"])
    def test_one_that_leads_nowhere_is_refused(self, home: Machine, target: str) -> None:
        (home.home / ".claude.json").symlink_to(target)
        done = install(home, "claude")
        assert (done.code, done.json["code"]) == (1, "link_refused")
        assert list_files(home.home) == {}

    @pytest.mark.parametrize("link", [".kiro", ".kiro/settings.json", ".kiro/skills"])
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

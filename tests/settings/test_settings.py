"""k8e.toml: strict, and documented key by key."""

from __future__ import annotations

import dataclasses
import json
import re
from ipaddress import IPv4Network, ip_address
from pathlib import Path
from typing import Any

import pytest

from k8e import settings
from k8e.daemon.doctor import run_doctor
from k8e.engine.local.doctor import doctor
from k8e.engine.report import Report
from k8e.policy import HostList
from k8e.settings import Settings, SettingsError
from k8e.settings import file as settings_file
from k8e.settings.values import count, many

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "k8e.toml"


def read(file: Path, text: str) -> Settings:
    file.write_text(text)
    return settings.read_file(file)


def refuse(file: Path, text: str) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        read(file, text)
    error = caught.value
    assert error.file == file
    assert str(file) in error.error
    return error


class TestReading:
    def test_no_file_is_all_defaults(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("K8E_CONFIG", raising=False)
        monkeypatch.setattr(settings_file, "USUAL", tmp_path / "none.toml")
        assert settings.load() == Settings()

    def test_the_usual_file_counts_unless_another_is_named(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        usual = file.with_name("usual.toml")
        usual.write_text("[quotas]\nsessions = 1\n")
        file.write_text("[quotas]\nsessions = 2\n")
        monkeypatch.setattr(settings_file, "USUAL", usual)
        monkeypatch.delenv("K8E_CONFIG", raising=False)
        assert settings.load().quotas.sessions == 1
        monkeypatch.setenv("K8E_CONFIG", str(file))
        assert settings.load().quotas.sessions == 2

    def test_a_file_that_is_named_has_to_be_there(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        monkeypatch.setenv("K8E_CONFIG", str(file))
        with pytest.raises(SettingsError) as caught:
            settings.load()
        assert (caught.value.code, caught.value.file) == ("settings_unreadable", file)

    def test_values(self, file: Path) -> None:
        got = read(
            file,
            """
            [egress]
            pool4 = "172.20.0.0/16"
            nameservers = ["192.0.2.53", "2001:db8::53"]
            allowed_hosts = ["*.Example.com", "git.example.com:22"]
            [limits]
            cpus = 2
            memory = "1g"
            disk = 1048576
            ttl = "15m"
            """,
        )
        assert got.egress.pool4 == IPv4Network("172.20.0.0/16")
        assert got.egress.nameservers == (ip_address("192.0.2.53"), ip_address("2001:db8::53"))
        assert got.egress.allowed_hosts == HostList.parse(["git.example.com:22", "*.example.com"])
        assert (got.limits.cpus, got.limits.memory, got.limits.disk, got.limits.ttl) == (2.0, 1 << 30, 1 << 20, 900.0)
        assert got.quotas == Settings().quotas

    def test_an_empty_list_of_hosts_is_not_the_default(self, file: Path) -> None:
        assert read(file, "[egress]\nallowed_hosts = []\n").egress.allowed_hosts == HostList()
        assert Settings().egress.allowed_hosts is None


class TestStrictness:
    @pytest.mark.parametrize(
        ("text", "code", "key", "hint"),
        [
            ("[egres]\n", "settings_unknown", "egres", "egress, limits"),
            ("[limits]\nmemroy = 1\n", "settings_unknown", "limits.memroy", "cpus, memory"),
            ("limits = 1\n", "settings_invalid", "limits", ""),
            ("[limits]\nmemory = true\n", "settings_invalid", "limits.memory", "16m to 16t"),
            ('[limits]\nmemory = "lots"\n', "settings_invalid", "limits.memory", "16m to 16t"),
            ('[limits]\nmemory = "1k"\n', "settings_invalid", "limits.memory", "16m to 16t"),
            ('[limits]\nttl = "1g"\n', "settings_invalid", "limits.ttl", "1s to 30d"),
            ("[limits]\nttl = 0\n", "settings_invalid", "limits.ttl", "1s to 30d"),
            ("[limits]\ncpus = nan\n", "settings_invalid", "limits.cpus", "0.01 to 1024"),
            ("[limits]\ncpus = false\n", "settings_invalid", "limits.cpus", "0.01 to 1024"),
            ('[limits]\ncpus = "2"\n', "settings_invalid", "limits.cpus", "0.01 to 1024"),
            ("[limits]\npids = 1.5\n", "settings_invalid", "limits.pids", "8 to 4194304"),
            ("[limits]\npids = 7\n", "settings_invalid", "limits.pids", "8 to 4194304"),
            ('[egress]\npool4 = "8.8.0.0/16"\n', "settings_invalid", "egress.pool4", "private block"),
            ('[egress]\npool4 = "127.0.0.0/16"\n', "settings_invalid", "egress.pool4", "private block"),
            ('[egress]\npool4 = "10.0.0.1/16"\n', "settings_invalid", "egress.pool4", "private block"),
            ('[egress]\npool4 = "10.0.0.0/30"\n', "settings_invalid", "egress.pool4", "private block"),
            ('[egress]\npool6 = "2001:db8::/48"\n', "settings_invalid", "egress.pool6", "fc00::/7"),
            ('[egress]\nnameservers = "192.0.2.1"\n', "settings_invalid", "egress.nameservers", "addresses"),
            ('[egress]\nnameservers = ["dns.test"]\n', "settings_invalid", "egress.nameservers", "addresses"),
            ('[egress]\nallowed_hosts = "a.test"\n', "settings_invalid", "egress.allowed_hosts", "hosts"),
            ('[egress]\nallowed_hosts = ["a b"]\n', "settings_invalid", "egress.allowed_hosts", "hosts"),
            ("[egress]\nallowed_hosts = [1]\n", "settings_invalid", "egress.allowed_hosts", "hosts"),
        ],
    )
    def test_what_is_not_understood_is_an_error(self, file: Path, text: str, code: str, key: str, hint: str) -> None:
        error = refuse(file, text)
        assert (error.code, error.key) == (code, key)
        assert hint in error.hint

    @pytest.mark.parametrize("text", ["[limits\n", "[limits]\ncpus = 1\ncpus = 2\n", "a\n"])
    def test_so_is_what_is_not_toml(self, file: Path, text: str) -> None:
        error = refuse(file, text)
        assert error.code == "settings_syntax"
        assert "line" in error.detail

    def test_and_what_is_not_text(self, file: Path) -> None:
        file.write_bytes(b"\xff")
        with pytest.raises(SettingsError, match="settings_syntax"):
            settings.read_file(file)

    def test_a_directory_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="settings_unreadable"):
            settings.read_file(tmp_path)

    @pytest.mark.parametrize("mode", [0o666, 0o620])
    def test_who_can_write_it_decides_so_nobody_else_may(self, file: Path, mode: int) -> None:
        file.touch()
        file.chmod(mode)
        with pytest.raises(SettingsError, match="settings_untrusted"):
            settings.read_file(file)


def read_tables() -> dict[str, dict[str, tuple[str, str]]]:
    """From the page: section, key, default and what is allowed."""
    tables: dict[str, dict[str, tuple[str, str]]] = {}
    section = ""
    for line in (ROOT / "docs" / "settings.md").read_text().splitlines():
        if heading := re.fullmatch(r"## \[([\w.]+)\]", line):
            section = heading[1]
            tables[section] = {}
        elif row := re.match(r"\| `(\w+)` \| (.+?) \| (.+?) \|", line):
            assert row[1] not in tables[section]
            tables[section][row[1]] = (row[2], row[3])
    return tables


def spell(default: Any) -> str:
    return "none" if default is None else f"`{json.dumps(default)}`"


def test_the_page_lists_every_key_with_its_default_and_what_is_allowed() -> None:
    expected = {}
    for section in dataclasses.fields(Settings):
        keys = dataclasses.fields(getattr(Settings(), section.name))
        expected[section.name.replace("_", ".")] = {
            key.name: (spell(key.metadata["default"]), key.metadata["kind"].allowed) for key in keys
        }
    assert read_tables() == expected


def test_a_list_has_an_end_and_each_of_it_is_read() -> None:
    kind = many(count(1, 2), "small numbers", most=2)
    assert kind.read([1, 2]) == (1, 2)
    for nonsense in ([3], [1, 1, 1], 1, [[1]]):
        with pytest.raises(ValueError, match=r"\w"):
            kind.read(nonsense)


def test_the_doctor_says_which_file_there_is(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def examine() -> Report:
        return Report((), 0.0)

    monkeypatch.setattr(doctor, "examine_machine", examine)
    monkeypatch.setattr(settings_file, "USUAL", file)
    monkeypatch.delenv("K8E_CONFIG", raising=False)
    run_doctor(as_json=False)
    assert capsys.readouterr().out.startswith(f"settings: defaults, as there is no {file}\n")
    file.touch()
    run_doctor(as_json=False)
    assert capsys.readouterr().out.startswith(f"settings: {file}\n")
    run_doctor(as_json=True)
    assert json.loads(capsys.readouterr().out)["settings"] == str(file)

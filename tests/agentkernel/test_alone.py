"""Commands that need no daemon: they decide, show and write, and none of them starts one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tomllib
from pathlib import Path

import pytest

from k8e.cli.agentkernel.project.files import read_file
from k8e.cli.process import Failure
from tests.agentkernel.house import House, link


class TestHelp:
    def test_every_command_has_some(self, house: House) -> None:
        text = house.ok("--help")
        words = [line.split()[0] for line in text.partition("commands:\n")[2].splitlines() if line.startswith("  ")]
        assert {"sandbox", "daemon", "mcp", "init", "trust", "plugin", "audit", "doctor"} <= set(words)
        for word in words:
            assert house.ok(word, "--help").startswith("usage: agentkernel " + word), word

    def test_what_is_not_there_is_said_on_stderr_with_a_hint(self, house: House) -> None:
        said = house.refusal("frobnicate")
        assert "[usage]" in said
        assert "hint: `agentkernel --help`" in said

    def test_words_that_are_too_much_are_said_by_the_command_that_got_them(self, house: House) -> None:
        assert "hint: `agentkernel sandbox create --help`" in house.refusal("sandbox", "create", "one", "two")

    def test_versions(self, house: House) -> None:
        line = house.ok("--version")
        assert line.startswith("agentkernel (k8e) ")
        assert house.ok("version") == line
        assert house.object("version") == {"version": line.split()[-1], "daemon": None}


class TestPorts:
    @pytest.mark.parametrize(
        "text", ["", "8000", ":8000", "8000:", "a:b", "80:0", "65536:80", "1:2:3", "::1:80:80", "²:1"]
    )
    def test_what_is_none_is_said_with_the_form(self, house: House, text: str) -> None:
        said = house.refusal("run", f"--publish={text}", "--dry-run", "true")
        assert "[usage]" in said
        assert "hint: HOST:SANDBOX, such as 8000:8000" in said

    def test_are_part_of_what_is_shown(self, house: House) -> None:
        words = ("run", "--image", "host", "-p", "8000:80", "--publish", "[::1]:0:81", "--dry-run")
        assert "port:         127.0.0.1:8000 leads to 80\nport:         [::1]:0 leads to 81\n" in house.ok(
            *words, "true"
        )
        shown = json.loads(house.ok(*words, "--json", "true"))["ports"]
        assert shown[1] == {"address": "::1", "host": 0, "sandbox": 81}

    def test_one_that_is_taken_is_known_before_anything_runs(self, house: House) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            said = house.refusal("run", "-p", f"{taken.getsockname()[1]}:80", "true")
        assert "[port_unavailable]" in said
        assert "-p 0:80" in said
        assert "no such address" in house.refusal("run", "-p", "192.0.2.1:8000:80", "true")


class TestFlags:
    def test_a_terminal_that_is_asked_for_and_not_there(self, house: House) -> None:
        for words in (
            ("run", "-it", "true"),
            ("run", "-t", "true"),
            ("exec", "-ti", "x", "true"),
            ("attach", "-t", "x"),
        ):
            assert "[terminal_needed]" in house.refusal(*words)

    def test_words_of_several_flags_are_flags_only(self, house: House) -> None:
        assert "there is no option '-ix'" in house.refusal("run", "-ix", "true")
        assert "there is no option '-ip'" in house.refusal("run", "-ip", "1:2", "true")
        assert "-t takes no value" in house.refusal("run", "-t=1", "true")


class TestDryRun:
    def test_shows_the_cage_to_people_and_to_programs(self, house: House) -> None:
        house.write("package.json")
        text = house.ok("sandbox", "create", "x", "--compatibility-mode", "claude", "--dry-run")
        assert "node:22-alpine  (package.json is Node.js)" in text
        assert f"{house.project} at /workspace, writable" in text
        shown = house.object("sandbox", "create", "x", "--compatibility-mode", "claude", "--dry-run")
        assert shown["more_hosts"] == ["api.anthropic.com", "cdn.anthropic.com"]
        assert [mount["target"] for mount in shown["mounts"]] == ["/workspace"]

    def test_limits_are_shown_as_people_write_them(self, house: House) -> None:
        text = house.ok(
            "sandbox", "create", "x", "--memory", "1.5g", "--disk", "3221225473", "--pids", "64", "--dry-run"
        )
        assert "memory 1.5g, disk 3221225473, pids 64\n" in text

    def test_an_empty_word_is_no_image_and_no_file(self, house: House) -> None:
        """`--image "$IMAGE"` where there is no IMAGE."""
        for option in ("--image", "--config"):
            assert "[usage]" in house.refusal("sandbox", "create", "x", f"{option}=", "--dry-run")

    def test_a_file_narrows(self, house: House) -> None:
        house.write("agentkernel.toml", '[sandbox]\nname = "mine"\n[security]\nprofile = "restrictive"\n')
        shown = house.object("sandbox", "create", "--dry-run")
        assert (shown["name"], shown["profile"], shown["allowed_hosts"]) == ("mine", "restrictive", [])

    def test_what_the_user_has_decided_holds_in_every_project(self, house: House) -> None:
        folder = house.home / ".config" / "agentkernel"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text('[security]\nprofile = "restrictive"\n')
        assert house.object("sandbox", "create", "x", "--dry-run")["profile"] == "restrictive"
        assert house.object("sandbox", "create", "x", "--profile", "moderate", "--dry-run")["profile"] == "moderate"
        house.write("agentkernel.toml", '[security]\nprofile = "moderate"\n')
        assert "[widening_refused]" in house.refusal("sandbox", "create", "x", "--dry-run")

    def test_a_configuration_that_others_can_write_is_not_the_user_s(self, house: House) -> None:
        folder = house.home / ".config" / "agentkernel"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text('[security]\nprofile = "permissive"\n')
        (folder / "config.toml").chmod(0o666)
        assert "[config_untrusted]" in house.refusal("sandbox", "create", "x", "--dry-run")

    def test_values_of_variables_are_never_shown(self, house: House) -> None:
        env = {"GREETING": "hello-zz", "MY_TOKEN": "secret-zz"}
        shown = house.ok("sandbox", "create", "x", "--profile", "permissive", "--dry-run", "--json", env=env)
        assert "GREETING" in json.loads(shown)["env_keys"]
        assert "MY_TOKEN" in json.loads(shown)["env_withheld"]
        assert "-zz" not in shown

    @pytest.mark.parametrize("name", ["../../x", "-x", "a b", "x" * 64, "a/b", ""])
    def test_names_are_checked_before_anything_is_done(self, house: House, name: str) -> None:
        said = house.refusal("sandbox", "create", "--dry-run", "--", name)
        assert "[invalid_name]" in said or "[usage]" in said

    def test_a_home_is_no_project(self, house: House) -> None:
        words = ("sandbox", "create", "x", "--compatibility-mode", "claude", "--dry-run")
        assert "[project_refused]" in house.refusal(*words, cwd=house.home)

    def test_nothing_that_somebody_else_wrote_acts_on_the_terminal(self, house: House) -> None:
        folder = house.home / "a\x1b]0;owned\x07\nmount: nothing"
        folder.mkdir()
        (folder / "agentkernel.toml").write_text('[[files]]\nsource = "a\\u001b[2J"\ndest = "/workspace/x"\n')
        (folder / "a\x1b[2J").write_text("x")
        words = ("sandbox", "create", "x", "--compatibility-mode", "claude", "--dry-run")
        shown = house.ok(*words, cwd=folder)
        assert "\x1b" not in shown
        assert shown.count("mount:") == 2  # one line, and the folder's name in it
        (folder / "agentkernel.toml").write_text('"\\u001b[2J" = 1\n')
        assert "\x1b" not in house.refusal(*words, cwd=folder)

    def test_what_is_wrong_in_a_file_is_said_with_its_line(self, house: House) -> None:
        house.write("agentkernel.toml", "[sandbox]\n\nnmae = 'x'\n")
        assert "agentkernel.toml:3: there is no key nmae" in house.refusal("sandbox", "create", "x", "--dry-run")


class TestTrust:
    FILE = '[agent]\ncompatibility_mode = "claude"\n'

    def test_is_given_once_and_ends_with_the_content(self, house: House) -> None:
        file = house.write("agentkernel.toml", self.FILE)
        said = house.refusal("sandbox", "create", "x", "--dry-run")
        assert "[widening_refused]" in said
        assert "agentkernel.toml:2: agent.compatibility_mode" in said
        assert "agentkernel trust agentkernel.toml" in said
        assert "--config agentkernel.toml" in said
        opens = house.object("trust")["opens"]
        assert [each["where"] for each in opens] == ["agentkernel.toml:2: agent.compatibility_mode"]
        assert house.object("sandbox", "create", "x", "--dry-run")["mode"] == "claude"
        assert house.object("trust", "--list")["trusted"] == [{"path": str(file), "state": "trusted"}]
        file.write_text(self.FILE + "# changed\n")
        assert "[widening_refused]" in house.refusal("sandbox", "create", "x", "--dry-run")
        assert "changed" in house.object("trust", "--list")["trusted"][0]["state"]

    def test_shows_everything_that_it_opens(self, house: House) -> None:
        """Also what a command without options has anyway, and what is no sandbox's."""
        (house.home / "secret").write_text("s")
        link(house.project / "innocent", "../secret")
        house.write(
            "agentkernel.toml",
            "[security]\nnetwork = true\nread_only = false\n"
            '[[files]]\nsource = "innocent"\ndest = "/workspace/x"\n'
            "[daemon]\nmin_warm = 3\nmax_warm = 5\n[daemon.agents.claude]\nmin_warm = 2\n",
        )
        said = house.refusal("daemon", "start")
        assert "[widening_refused]" in said
        assert "3 for commands without a mode, 2 for claude, 5 in all at most" in said
        opens = {each["where"]: each["what"] for each in house.object("trust")["opens"]}
        assert opens["agentkernel.toml:2: security.network"].startswith("with --profile restrictive: the network")
        assert opens["agentkernel.toml:3: security.read_only"] == "with --profile restrictive: its root can be written"
        assert opens["agentkernel.toml:4: files"] == f"innocent leads to {house.home / 'secret'}"
        assert "sandboxes are kept ready: 3 for" in opens["agentkernel.toml:7: [daemon]"]
        assert house.ok("trust").splitlines() == [f"{where}: {what}" for where, what in opens.items()]

    def test_can_be_taken_back(self, house: House) -> None:
        house.write("agentkernel.toml", self.FILE)
        house.ok("trust")
        house.ok("trust", "--revoke")
        assert "[widening_refused]" in house.refusal("sandbox", "create", "x", "--dry-run")
        assert "[not_trusted]" in house.refusal("trust", "--revoke")

    def test_a_copy_elsewhere_is_not_meant(self, house: House) -> None:
        file = house.write("agentkernel.toml", self.FILE)
        house.ok("trust")
        other = house.home / "other"
        other.mkdir()
        shutil.copy(file, other)
        assert "[widening_refused]" in house.refusal("sandbox", "create", "x", "--dry-run", cwd=other)

    def test_a_file_that_is_named_is_meant(self, house: House) -> None:
        house.write("agentkernel.toml", self.FILE)
        shown = house.object("sandbox", "create", "x", "--config", "agentkernel.toml", "--dry-run")
        assert shown["mode"] == "claude"

    def test_a_link_borrows_no_trust(self, house: House) -> None:
        """A repository whose agentkernel.toml is a link to one that its victim trusts."""
        file = house.write("agentkernel.toml", self.FILE)
        house.ok("trust")
        other = house.home / "evil"
        link(other / "agentkernel.toml", str(file))
        assert "[config_link]" in house.refusal("sandbox", "create", "x", "--dry-run", cwd=other)
        assert "[config_link]" in house.refusal("trust", cwd=other)

    def test_what_is_remembered_is_private(self, house: House) -> None:
        house.write("agentkernel.toml", self.FILE)
        house.ok("trust")
        state = house.home / ".local" / "state" / "agentkernel"
        assert state.stat().st_mode & 0o077 == 0
        assert (state / "trusted.json").stat().st_mode & 0o077 == 0

    def test_a_memory_that_is_broken_trusts_nobody(self, house: House) -> None:
        house.write("agentkernel.toml", self.FILE)
        house.ok("trust")
        (house.home / ".local" / "state" / "agentkernel" / "trusted.json").write_text("{")
        assert "[widening_refused]" in house.refusal("sandbox", "create", "x", "--dry-run")

    @pytest.mark.parametrize("kind", ["fifo", "folder", "huge", "not utf-8"])
    def test_what_is_no_file_does_no_harm(self, house: House, kind: str) -> None:
        path = house.project / "agentkernel.toml"
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.write_bytes(b"#" * (1 << 20) if kind == "huge" else b"\xff\xfe")
        assert "[config_" in house.refusal("sandbox", "create", "x", "--dry-run")


class TestFiles:
    def test_links_out_of_the_project_are_not_followed(self, house: House) -> None:
        (house.home / "secret").write_text("s")
        link(house.project / "innocent", "../secret")
        link(house.project / "folder", "..")
        for source in ("innocent", "folder/secret"):
            house.write("agentkernel.toml", f'[[files]]\nsource = "{source}"\ndest = "/workspace/x"\n')
            assert "[file_refused]" in house.refusal("sandbox", "create", "x", "--dry-run"), source
        house.ok("trust")
        house.ok("sandbox", "create", "x", "--dry-run")

    @pytest.mark.parametrize("name", ["swapped/secret", "a/swapped/secret", "swapped", "a/../../secret"])
    def test_a_link_that_comes_after_the_look_gains_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """A sandbox that has the project can put one there at any moment: as if the look had been just before it."""
        (tmp_path / "secret").write_text("s")
        project = tmp_path / "project"
        for place in (project, project / "a"):
            place.mkdir()
            link(place / "swapped", str(tmp_path / "secret" if name == "swapped" else tmp_path))
        (project / "a" / "plain").write_text("p")
        monkeypatch.setattr(os.path, "realpath", os.path.normpath)
        with pytest.raises(Failure, match="cannot be read"):
            read_file(name, str(project), trusted=False)
        assert read_file("a/plain", str(project), trusted=False) == b"p"

    def test_a_file_that_is_not_there_makes_no_sandbox(self, house: House) -> None:
        house.write("agentkernel.toml", '[[files]]\nsource = "gone"\ndest = "/workspace/x"\n')
        assert "[file_unreadable]" in house.refusal("sandbox", "create", "x", "--dry-run")


class TestInit:
    def test_writes_a_file_for_the_project_that_needs_no_trust(self, house: House) -> None:
        house.write("Cargo.toml")
        assert house.ok("init") == ""
        text = (house.project / "agentkernel.toml").read_text()
        assert tomllib.loads(text)["sandbox"]["name"] == "work"
        assert "Cargo.toml is Rust" in text
        shown = house.object("sandbox", "create", "--dry-run")
        assert (shown["name"], shown["image"]) == ("work", "rust:1.85-alpine")

    def test_never_replaces_one_without_a_word(self, house: House) -> None:
        file = house.write("agentkernel.toml", "# mine\n")
        assert "[file_exists]" in house.refusal("init")
        assert file.read_text() == "# mine\n"
        house.ok("init", "--force", "--compatibility-mode", "claude")
        assert 'compatibility_mode = "claude"' in file.read_text()
        assert "[widening_refused]" in house.refusal("sandbox", "create", "--dry-run")

    def test_does_not_write_through_a_link(self, house: House) -> None:
        victim = house.home / "victim"
        victim.write_text("v")
        link(house.project / "agentkernel.toml", str(victim))
        for words in (("init",), ("init", "--force")):
            assert "[file_exists]" in house.refusal(*words)
        assert victim.read_text() == "v"

    @pytest.mark.parametrize("name", ["Übung 1", "---", "a" * 80, "x.y"])
    def test_folders_of_any_name(self, house: House, name: str) -> None:
        folder = house.home / name
        folder.mkdir()
        house.ok("init", cwd=folder)
        house.ok("sandbox", "create", "--dry-run", cwd=folder)

    def test_every_line_that_is_commented_out_can_be_used(self, house: House) -> None:
        text = house.ok("init", "--dry-run")
        lines = [line.removeprefix("# ") if " = " in line else line for line in text.splitlines()]
        kept = [line for line in lines if not line.startswith(("runtime", "network", "allowed_hosts"))]
        house.write("agentkernel.toml", "\n".join(kept) + "\n")
        shown = house.object("sandbox", "create", "--config", "agentkernel.toml", "--dry-run")
        assert (shown["mode"], shown["read_only"], shown["limits"]["cpus"]) == ("claude", True, 1)


def test_the_audit_log_is_shown_to_whoever_may_read_it(house: House, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "audit.log.1").write_text('{"at": 1, "event": "daemon_started", "pid": 7}\n')
    (state / "audit.log").write_text(
        '{"at": 2, "event": "session_created", "session": "a", "caller": "uid:0"}\nnot json\n'
        '{"at": 4, "event": "session_created", "session": "b", "caller": "uid:0"}\n{"at": 5, "ev'
    )
    (state / "audit-refusals.log").write_text(
        '{"at": 3, "event": "refused", "session": "a", "host": "evil\\u001b[2J.example"}\n'
    )
    env = {"K8E_STATE_DIR": str(state)}
    lines = [json.loads(line) for line in house.ok("audit", "--json", env=env).splitlines()]
    assert [line["at"] for line in lines] == [1, 2, 3, 4]
    of_one = house.ok("audit", "--sandbox", "a", "--json", env=env).splitlines()
    assert [json.loads(line)["at"] for line in of_one] == [2, 3]
    assert len(house.ok("audit", "-n", "1", "--json", env=env).splitlines()) == 1
    assert "0 or more" in house.refusal("audit", "--last=-1", env=env)
    assert house.ok("audit", "--since", "1h", "--json", env=env) == ""
    shown = house.ok("audit", "--event", "refused", env=env)
    assert "\x1b" not in shown
    assert "evil" in shown

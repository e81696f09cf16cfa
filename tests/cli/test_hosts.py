"""Lists of hosts on the command line. The engine here has no network; tests write down what it refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from k8e.engine import Refusal
from tests.cli.machine import Machine, wait_until
from tests.core.bare_engine import DEFAULT_HOSTS, BareEngine

USUAL = sorted(DEFAULT_HOSTS)


def find_sandbox(machine: Machine, session: str) -> str:
    def find() -> set[str]:
        lines = map(json.loads, (machine.folder / "s" / "audit.log").read_text().splitlines())
        return {line["sandbox"] for line in lines if line.get("session") == session}

    wait_until(lambda: bool(find()))  # the audit log comes a moment later
    (sandbox,) = find()
    return sandbox


def engine_of(machine: Machine) -> BareEngine:
    return BareEngine(machine.folder / "s" / "bare")


@pytest.fixture
def session(machine: Machine) -> Iterator[str]:
    session = str(machine.k8e("sandbox", "create").json["session_id"])
    yield session
    machine.k8e("sandbox", "destroy", session)


class TestCreate:
    @pytest.mark.parametrize(
        ("words", "hosts"),
        [
            ([], USUAL),
            (["--allowed-hosts", ""], []),
            (["--allowed-hosts="], []),
            (["--allowed-hosts", "B.test, a.test:22,"], ["a.test:22", "b.test"]),
            (["--allowed-hosts", "a.test", "--allowed-hosts", "*.b.test"], ["*.b.test", "a.test"]),
        ],
    )
    def test_the_list_is_shown(self, machine: Machine, words: list[str], hosts: list[str]) -> None:
        created = machine.k8e("sandbox", "create", *words).json
        session = created["session_id"]
        shown = machine.k8e("sandbox", "get", session).json
        machine.k8e("sandbox", "destroy", session)
        assert sorted(created["policy"]["allowed_hosts"]) == sorted(hosts)
        assert shown["policy"]["allowed_hosts"] == created["policy"]["allowed_hosts"]

    def test_an_entry_that_is_none_says_what_to_write(self, machine: Machine) -> None:
        done = machine.k8e("sandbox", "create", "--allowed-hosts", "https://a.test/x")
        assert (done.code, done.json["code"], done.json["field"]) == (1, "invalid_argument", "allowed_hosts")
        assert done.json["hint"]


class TestAllowHosts:
    def ask(self, machine: Machine, session: str, *words: str) -> list[str]:
        answer = machine.k8e("sandbox", "allow-hosts", session, *words).json
        assert answer["session_id"] == session
        return list(answer["policy"]["allowed_hosts"])

    def test_shows_and_changes_the_list(self, machine: Machine, session: str) -> None:
        assert sorted(self.ask(machine, session)) == USUAL
        assert self.ask(machine, session, "--hosts", "a.test,b.test") == ["a.test", "b.test"]
        assert self.ask(machine, session, "--add", "c.test", "--remove", "a.test") == ["b.test", "c.test"]
        assert self.ask(machine, session) == ["b.test", "c.test"]
        assert engine_of(machine).egress(find_sandbox(machine, session)) == ("b.test", "c.test")
        assert self.ask(machine, session, "--clear") == []
        assert self.ask(machine, session, "--hosts", "d.test") == ["d.test"]
        assert self.ask(machine, session, "--hosts", "") == []

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["--clear", "--add", "a.test"], "usage"),
            (["--hosts", "a.test", "--remove", "b.test"], "usage"),
            (["--list"], "usage"),
            (["--add"], "usage"),
            (["--remove", "never.test"], "invalid_argument"),
            (["--add", "a b"], "invalid_argument"),
        ],
    )
    def test_nonsense_changes_nothing(self, machine: Machine, session: str, words: list[str], code: str) -> None:
        done = machine.k8e("sandbox", "allow-hosts", session, *words)
        assert (done.code, done.json["code"]) == (1, code)
        assert sorted(self.ask(machine, session)) == USUAL

    def test_of_no_session(self, machine: Machine) -> None:
        for words in ([], ["--clear"]):
            done = machine.k8e("sandbox", "allow-hosts", "nope", *words)
            assert (done.code, done.json["code"]) == (1, "session_not_found")


class TestRun:
    def test_makes_a_session_with_the_list_and_goes_on_with_it(self, machine: Machine) -> None:
        for spelling in ("b.test,a.test", "A.test,b.test."):
            assert machine.run("true", "--allowed-hosts", spelling).code == 0
        assert machine.run("true").code == 0
        shown = machine.k8e("sandbox", "allow-hosts", machine.session()).json
        assert shown["policy"]["allowed_hosts"] == ["a.test", "b.test"]

    def test_does_not_run_with_another_list_than_was_asked_for(self, machine: Machine, session: str) -> None:
        machine.run("true", "--allowed-hosts", "a.test")
        for words, named in (([], machine.session()), (["--session-id", session], session)):
            done = machine.run("echo ran > ran", "--allowed-hosts", "", *words)
            assert (done.code, done.json["code"]) == (1, "hosts_differ")
            assert f"allow-hosts {named} --hosts ''" in done.json["hint"]
            assert machine.run("ls", "--session-id", named).json["stdout"] == ""
        assert machine.run("true", "--allowed-hosts", ",".join(DEFAULT_HOSTS), "--session-id", session).code == 0

    def test_replaces_a_session_that_is_gone(self, machine: Machine) -> None:
        machine.run("true", "--allowed-hosts", "a.test")
        old = machine.session()
        machine.k8e("sandbox", "destroy", old)
        assert machine.run("true", "--allowed-hosts", "b.test").code == 0
        assert machine.session() != old

    def test_of_no_session_or_no_host(self, machine: Machine) -> None:
        done = machine.run("true", "--session-id", "nope", "--allowed-hosts", "a.test")
        assert (done.code, done.json["code"]) == (1, "session_not_found")
        done = machine.run("true", "--allowed-hosts", "a b")
        assert (done.code, done.json["field"]) == (1, "allowed_hosts")


class TestDenied:
    """Denials while a command runs."""

    @pytest.fixture
    def refusing(self, machine: Machine, session: str) -> Iterator[str]:
        """A session whose engine refuses two things as soon as a command asks for it."""
        sandbox = find_sandbox(machine, session)
        # The one directory that this engine's sandboxes share with the machine.
        shared = machine.folder / "s" / "bare" / sandbox / "run" / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        shared.parent.chmod(0o711)
        stop = threading.Event()

        def refuse() -> None:
            wait_until(lambda: stop.is_set() or (shared / "go").exists())
            for refusal in (
                Refusal("evil.test", "", 0, "name_not_listed", 1.0),
                Refusal("odd.test", "8.8.8.8", 8443, "port_not_listed", 2.0),
            ):
                engine_of(machine).refuse(sandbox, refusal)
            (shared / "went").touch()

        thread = threading.Thread(target=refuse)
        thread.start()
        yield session
        stop.set()
        thread.join()

    CODE = "cd /run/k8e/shared; touch go; until test -e went; do sleep 0.01; done; echo out; echo err >&2"

    def test_is_in_the_result_and_in_the_session(self, machine: Machine, refusing: str) -> None:
        result = machine.run(self.CODE, "--session-id", refusing).json
        assert (result["exit_code"], result["stdout"]) == (0, "out\n")
        assert [(each["host"], each["address"], each["port"], each["reason"]) for each in result["denied"]] == [
            ("evil.test", "", 0, "name_not_listed"),
            ("odd.test", "8.8.8.8", 8443, "port_not_listed"),
        ]
        assert result["denied"][0]["hint"].endswith(f"k8e sandbox allow-hosts {refusing} --add evil.test")
        assert result["denied"][1]["hint"].endswith("--add odd.test:8443")
        assert machine.run("true", "--session-id", refusing).json["denied"] == []
        assert machine.k8e("sandbox", "get", refusing).json["denied"] == result["denied"]

    def test_is_said_on_stderr_after_raw_output(self, machine: Machine, refusing: str) -> None:
        done = machine.run(self.CODE, "--session-id", refusing, "--raw")
        assert (done.code, done.stdout) == (0, b"out\n")
        ask = f"Ask for it: k8e sandbox allow-hosts {refusing} --add"
        assert done.stderr.decode().splitlines() == [
            "err",
            f"k8e: denied evil.test: name_not_listed; {ask} evil.test",
            f"k8e: denied odd.test (8.8.8.8):8443: port_not_listed; {ask} odd.test:8443",
        ]
        assert machine.run("true", "--session-id", refusing, "--raw").stderr == b""

    def test_is_in_a_background_run_too(self, machine: Machine, refusing: str) -> None:
        run_id = machine.run(self.CODE, "--session-id", refusing, "--background").json["run_id"]
        wait_until(lambda: machine.k8e("sandbox", "poll", run_id).json["status"] == "completed")
        denied = machine.k8e("sandbox", "poll", run_id).json["denied"]
        assert [each["host"] for each in denied] == ["evil.test", "odd.test"]

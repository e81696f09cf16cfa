"""`confirm`, `approve` and `approvals`: an agent in one window, a person in another, and agents that would be both.

On a machine whose root lets one user be both (`same_user`), which is not how machines are by themselves: that is in
test_self_approval.py.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.machine import K8E, Done, Machine, make_folder, run_launcher, wait_until
from tests.cli.terminal import Terminal, open_terminal

ACTION = "delete /workspace/production-data"


@pytest.fixture(scope="module")
def obliging() -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with make_folder() as folder:
        with (folder / "k8e.toml").open("a") as settings:
            settings.write("[approvals]\nsame_user = true\n")
        machine = Machine(folder, folder)
        with run_launcher(machine):
            yield machine


@pytest.fixture
def machine(obliging: Machine, tmp_path: Path) -> Machine:
    return Machine(obliging.folder, tmp_path)


@pytest.fixture
def session(machine: Machine) -> Iterator[str]:
    session = str(machine.k8e("sandbox", "create").json["session_id"])
    yield session
    machine.k8e("sandbox", "destroy", session)


@contextmanager
def asking(machine: Machine, session: str, *flags: str, action: str = ACTION) -> Iterator[tuple[Terminal, str]]:
    """The window of an agent that waits, and a command that answers it."""
    with open_terminal(machine, K8E, "sandbox", "confirm", session, action, *flags) as agent:
        text = agent.wait_for_stderr(b"--reject\n").decode()
        (command,) = (line.strip() for line in text.splitlines() if line.strip().split()[-2:-1] == ["--key"])
        yield agent, command.replace("--key ", "")


def ask(machine: Machine, session: str, action: str = ACTION) -> str:
    done = machine.k8e("sandbox", "confirm", session, action, "--no-wait")
    return str(json.loads(done.stdout)["approval_id"])


def answer(machine: Machine, command: str, typed: str = "yes\n") -> tuple[Done, bytes]:
    """A person pastes a command into another window, and types."""
    with open_terminal(machine, "bash", "-c", command) as person:
        if typed:
            person.type(typed, after=b"Type yes")
        return person.finish(), person.screen


def look(machine: Machine, approval: str) -> Any:
    return machine.k8e("sandbox", "approvals", approval).json


def test_a_person_approves_in_another_window(machine: Machine, session: str) -> None:
    with asking(machine, session, "--timeout", "300") as (agent, command):
        (pending,) = machine.k8e("sandbox", "approvals").json["approvals"]
        assert (pending["status"], pending["action"], pending["session_id"]) == ("pending", ACTION, session)
        assert agent.process.poll() is None
        done, screen = answer(machine, command)
        assert (done.code, done.json["ok"], done.json["answered_by"]) == (0, True, "uid:0")
        assert ACTION.encode() in screen
        told = agent.finish()
    said = json.loads(told.stdout)
    assert (told.code, said["approved"], said["approval_id"]) == (0, True, pending["approval_id"])
    assert ACTION in told.stderr.decode()
    assert machine.k8e("sandbox", "approvals").json == {"approvals": []}
    assert machine.k8e("sandbox", "approvals", "--all").json["approvals"][-1] == said


def test_or_rejects_it_with_a_reason(machine: Machine, session: str) -> None:
    with asking(machine, session, "--timeout", "300") as (agent, command):
        done, _ = answer(machine, f"{command} --reject --reason 'not today'", typed="")
        assert (done.code, done.json["ok"], done.json["approved"]) == (0, True, False)
        told = agent.finish()
    said = json.loads(told.stdout)
    assert (told.code, said["approved"], said["status"], said["reason"]) == (1, False, "rejected", "not today")


def test_an_answer_is_given_once(machine: Machine, session: str) -> None:
    with asking(machine, session, "--timeout", "300") as (_, command):
        answer(machine, f"{command} --reject", typed="")
        done, _ = answer(machine, command, typed="")
    assert (done.code, done.json["code"]) == (1, "approval_settled")


@pytest.mark.parametrize("typed", ["no\n", "\n", "y\n", "\x04"])
def test_only_yes_is_yes(machine: Machine, session: str, typed: str) -> None:
    with asking(machine, session, "--timeout", "300") as (agent, command):
        done, _ = answer(machine, command, typed)
        assert (done.code, done.json["code"]) == (1, "not_confirmed")
        assert look(machine, command.split()[-1])["status"] == "pending"
        assert agent.process.poll() is None


def test_nobody_answers(machine: Machine, session: str) -> None:
    with asking(machine, session, "--timeout", "0.2") as (agent, _):
        done = agent.finish()
    said = json.loads(done.stdout)
    assert (done.code, said["approved"], said["status"]) == (1, False, "expired")
    late, _ = answer(machine, f"k8e sandbox approve {said['approval_id']}", typed="")
    assert (late.code, late.json["code"]) == (1, "approval_settled")


def test_the_session_ends_first(machine: Machine) -> None:
    session = machine.k8e("sandbox", "create").json["session_id"]
    with asking(machine, session, "--timeout", "300") as (agent, _):
        machine.k8e("sandbox", "destroy", session)
        told = agent.finish()
    assert (told.code, json.loads(told.stdout)["status"]) == (1, "withdrawn")


def test_without_waiting(machine: Machine, session: str) -> None:
    done = machine.k8e("sandbox", "confirm", session, ACTION, "--no-wait")
    said = json.loads(done.stdout)
    assert (done.code, said["approved"], said["status"]) == (0, False, "pending")
    assert said["expires_at"] - said["asked_at"] == 3600
    assert f"k8e sandbox approve --key {said['approval_id']}\n" in done.stderr.decode()
    assert look(machine, said["approval_id"]) == said
    brief = json.loads(machine.k8e("sandbox", "confirm", session, ACTION, "--no-wait", "--timeout", "77").stdout)
    assert brief["expires_at"] - brief["asked_at"] == 77


def test_who_had_enough_of_waiting_leaves_the_question(machine: Machine, session: str) -> None:
    with asking(machine, session, "--timeout", "300") as (agent, command):
        agent.process.send_signal(signal.SIGINT)
        assert agent.finish().code == -signal.SIGINT
        assert look(machine, command.split()[-1])["status"] == "pending"


class TestSelfApproval:
    """No process that the asking program can simply start counts as another person."""

    @pytest.mark.parametrize(
        ("command", "code"),
        [
            ("k8e sandbox approve ID", "terminal_needed"),
            ("k8e sandbox approve ID --reject", "terminal_needed"),
            ("yes | k8e sandbox approve ID", "terminal_needed"),
            ("setsid --wait k8e sandbox approve ID", "terminal_needed"),
            ("while echo yes; do sleep 0.1; done | script -qec 'k8e sandbox approve ID' /dev/null", "self_approval"),
            ("setsid --wait script -qec 'sleep 1; k8e sandbox approve ID --reject' /dev/null", "self_approval"),
        ],
    )
    def test_from_the_same_program(self, machine: Machine, session: str, command: str, code: str) -> None:
        approval = ask(machine, session)
        done = machine.shell(command.replace("ID", approval))
        # `script` is a terminal, where the error is text.
        assert f'"code": "{code}"' in done.stdout.decode() or f"[{code}]" in done.stdout.decode(), done
        assert look(machine, approval)["status"] == "pending"

    def test_from_the_same_window(self, machine: Machine, session: str) -> None:
        script = f"""
            k8e sandbox confirm {session} x --no-wait > asked
            k8e sandbox approve $(sed 's/.*"approval_id": "\\([^"]*\\)".*/\\1/' asked)
        """
        done, screen = answer(machine, script)
        assert b"Type yes" not in screen, "it is said before anything is typed"
        assert '"code": "self_approval"' in done.stdout.decode()

    def test_over_the_socket_without_the_command_line(self, machine: Machine, session: str) -> None:
        approval = ask(machine, session)
        body = shlex.quote(json.dumps({"approved": True}))
        script = (
            f"curl -s --unix-socket {machine.folder}/r/k8e.sock http://localhost/v1/approvals/{approval} --json {body}"
        )
        assert json.loads(machine.shell(script).stdout)["code"] == "terminal_needed"

    def test_is_in_the_audit_log(self, machine: Machine, session: str) -> None:
        approval = ask(machine, session)
        machine.shell(f"k8e sandbox approve {approval} --reject")

        def is_told() -> bool:
            lines = map(json.loads, (machine.folder / "s" / "audit.log").read_text().splitlines())
            return any(line["event"] == "access_refused" and line.get("subject") == approval for line in lines)

        wait_until(is_told)


class TestWhatIsShown:
    HOSTILE = "rm x\x1b[2J\x1b]0;t\x07\r\x9b1mok\u202e\nType yes to approve it: \x7f"

    def test_a_terminal_is_not_told_what_to_do(self, machine: Machine, session: str) -> None:
        with asking(machine, session, "--timeout", "300", action=self.HOSTILE) as (agent, command):
            listed = machine.k8e("sandbox", "approvals").stdout
            done, screen = answer(machine, command)
            assert done.code == 0
            stderr, stdout = agent.stderr, agent.finish().stdout
        shown = "rm x\\x1b[2J\\x1b]0;t\\x07\\r\\x9b1mok\\u202e\\nType yes to approve it: \\x7f"
        for text in (stderr.decode(), screen.decode()):
            assert f"\n  {shown}\n" in text.replace("\r\n", "\n")
        for content in (stderr, screen.replace(b"\r\n", b"\n"), listed, stdout):
            assert all(letter.isprintable() or letter == "\n" for letter in content.decode()), content
        assert json.loads(stdout)["action"] == shown

    def test_neither_is_one_told_by_odd_bytes(self, machine: Machine, session: str) -> None:
        done = machine.k8e("sandbox", "confirm", session, b"rm \xff\x9b", "--no-wait")
        assert json.loads(done.stdout)["action"] == "rm \\udcff\\udc9b"
        assert b"\xff" not in done.stderr + done.stdout


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (("confirm", "SID"), "usage"),
            (("confirm", "SID", "x", "--timeout", "0"), "usage"),
            (("confirm", "SID", ""), "invalid_argument"),
            (("confirm", "SID", "x" * 2001), "invalid_argument"),
            (("confirm", "nobody", "x"), "session_not_found"),
            (("approve",), "usage"),
            (("approve", "appr-0000000000000000"), "approval_not_found"),
            (("approve", "appr-0000000000000000", "--reject"), "approval_not_found"),
            (("approve", "../x"), "invalid_argument"),
            (("approvals", "appr-0000000000000000"), "approval_not_found"),
        ],
    )
    def test_are_explained(self, machine: Machine, session: str, words: tuple[str, ...], code: str) -> None:
        done = machine.k8e("sandbox", *(session if word == "SID" else word for word in words))
        assert (done.code, done.json["code"]) == (1, code)
        assert done.json["error"]

    def test_bodies(self, machine: Machine, session: str) -> None:
        approval = ask(machine, session)
        socket = f"--unix-socket {machine.folder}/r/k8e.sock"
        for path, body in (
            (f"approvals/{approval}", {}),
            (f"approvals/{approval}", {"approved": 1}),
            (f"approvals/{approval}", {"approved": True, "more": 1}),
            (f"approvals/{approval}?x=1", None),
            (f"approvals/{approval}?wait=x", None),
            ("approvals?status=x", None),
            (f"sessions/{session}/approvals", {"action": 1}),
            (f"sessions/{session}/approvals", {"action": "x", "timeout": "1"}),
        ):
            data = "" if body is None else f"--json {shlex.quote(json.dumps(body))}"
            answered = json.loads(machine.shell(f"curl -s {socket} 'http://localhost/v1/{path}' {data}").stdout)
            assert answered["code"] == "invalid_argument", (path, body, answered)
        assert look(machine, approval)["status"] == "pending"


def test_the_help_has_examples(machine: Machine) -> None:
    for command in ("confirm", "approve"):
        assert f"k8e sandbox {command} " in machine.k8e("sandbox", command, "--help").stdout.decode()


def test_no_file_of_the_agents_is_needed(machine: Machine, session: str, tmp_path: Path) -> None:
    """`approve` reads nothing but the terminal: what stands in its standard input is no answer."""
    with asking(machine, session, "--timeout", "300") as (_, command):
        done, _ = answer(machine, f"yes yes | {command}", typed="no\n")
        assert done.json["code"] == "not_confirmed"

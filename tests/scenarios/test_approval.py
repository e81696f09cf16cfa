"""Scenario 6 of the skill's document: a person approves what cannot be undone."""

from __future__ import annotations

import json

import pytest

from tests.cli.machine import wait_until
from tests.cli.terminal import Terminal, open_terminal
from tests.scenarios.user import PRELUDE, User

SCENARIO = """
SID=$(k8e sandbox create | get session_id)
k8e sandbox run 'mkdir production-data; date > production-data/x' --session-id $SID > made
k8e sandbox confirm $SID "delete /workspace/production-data" --timeout 120 > answer
if [ "$(get approved < answer)" = True ]; then
    k8e sandbox run 'rm -r production-data' --session-id $SID > removed
fi
k8e sandbox list $SID
"""


def find_command(agent: Terminal) -> str:
    shown = agent.wait_for_stderr(b"--reject\n").decode()
    assert "delete /workspace/production-data" in shown
    return next(line.strip() for line in shown.splitlines() if "sandbox approve --key appr-" in line)


@pytest.fixture
def key(user: User) -> str:
    """Of a person who is root, as the agent is, and has something that the agent has not."""
    name = f"person-{user.home.name}"[:60]
    return str(user.k8e("sandbox-apikey", "create", name, "--scope", "admin").json["key"])


def answer(person: Terminal, key: str, *, approve: bool = True) -> None:
    person.type(f"{key}\n", after=b"API key: ")
    if approve:
        person.type("yes\n", after=b"Type yes")
    done = person.finish()
    assert done.json["ok"] is True


@pytest.mark.parametrize(("flag", "left"), [("", []), (" --reject", ["/workspace/production-data"])])
def test_a_person_decides(user: User, key: str, flag: str, left: list[str]) -> None:
    with open_terminal(user, "bash", "-c", PRELUDE + SCENARIO) as agent:
        command = find_command(agent)
        with open_terminal(user, "bash", "-c", command + flag) as person:
            answer(person, key, approve=not flag)
        done = agent.finish()
    files = [file["path"] for file in json.loads(done.stdout)["files"] if file["type"] == "directory"]
    assert files == left


def test_the_answer_comes_though_the_daemon_was_killed(user: User, key: str) -> None:
    if user.runtime != "gvisor":
        pytest.skip("whoever waits starts the daemon again, and that would be one with gVisor")
    with open_terminal(user, "bash", "-c", PRELUDE + SCENARIO) as agent:
        command = find_command(agent)
        before = user.daemon_pid
        user.kill_the_daemon()
        wait_until(lambda: user.daemon_pid != before and (user.folder / "r" / "k8e.sock").exists())
        with open_terminal(user, "bash", "-c", command) as person:
            answer(person, key)
        done = agent.finish()
    assert b"production-data" not in done.stdout
    assert json.loads((user.home / "answer").read_text())["approved"] is True


def test_nothing_inside_reaches_whoever_could_approve(user: User) -> None:
    """The session's own code has neither the socket nor the gateway."""
    session = user.run("true").json["session_id"]
    user.k8e("sandbox", "confirm", session, "anything", "--no-wait")
    path = user.folder / "r" / "k8e.sock"
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})"
    inside = user.run(code, "--lang", "python").json
    assert inside["exit_code"] != 0
    assert "FileNotFoundError" in inside["stderr"]
    (pending,) = user.k8e("sandbox", "approvals").json["approvals"]
    assert pending["status"] == "pending"

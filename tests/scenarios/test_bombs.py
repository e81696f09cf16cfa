"""Bombs in a session with the limits that everybody gets: the next command is answered within its own timeout, and the
session goes on or says why it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from k8e.engine.local.layout import Layout
from k8e.engine.local.runtime.cgroup import Cgroups
from tests.cli.machine import wait_until
from tests.scenarios.user import User

# What the client needs beside the promise, on a machine where other tests run as well.
CLIENT: Final = 4.0
BOMBS: Final = {
    "fork": ":(){ :|:& };:",
    "thread": "python3 -c 'import threading as t, time\nwhile 1: t.Thread(target=time.sleep, args=(99,)).start()' &",
}


def answer(user: User, session: str, code: str, timeout: float) -> dict[str, Any]:
    """In time, whatever it is."""
    began = time.monotonic()
    done = user.run(code, "--session-id", session, "--timeout", str(timeout))
    assert time.monotonic() - began < timeout + 1 + CLIENT, done
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("bomb", BOMBS)
def test_after_a_bomb_every_command_is_answered_in_time(user: User, bomb: str) -> None:
    session = user.k8e("sandbox", "create", "--tenant", "web").json["session_id"]
    answer(user, session, BOMBS[bomb], 5)
    for _ in range(4):
        told = answer(user, session, "echo well", 3)
        assert told.get("status") in ("completed", "timed_out") or told["code"] in (
            *("too_many_processes", "session_ended", "session_destroying", "session_not_found"),
        ), told
        if told.get("code") == "session_not_found":
            assert "its sandbox" in told["detail"], told
    user.k8e("sandbox", "destroy", session)


def test_memory_costs_the_command_or_says_what_it_cost(user: User) -> None:
    session = user.k8e("sandbox", "create", "--tenant", "web").json["session_id"]
    told = answer(user, session, "python3 -c 'x = bytearray(3 << 30)'", 20)
    assert told["status"] == "oom_killed" or "MemoryError" in told["stderr"], told
    later = answer(user, session, "echo well", 10)
    if user.runtime == "native":
        assert later["stdout"] == "well\n"
    else:
        assert "ran out of memory" in told["reason"], told
        assert "files are gone" in told["reason"], told
        wait_until(lambda: answer(user, session, "true", 10)["code"] == "session_not_found")
        gone = answer(user, session, "true", 10)
        assert "ran out of memory" in gone["detail"], gone
        assert "is gone" in gone["hint"], gone


@contextlib.contextmanager
def processes_stopped(user: User) -> Iterator[None]:
    """All that the machine has of the sandboxes: the agent, or gVisor's own."""
    groups = Cgroups(Layout(user.folder / "s", user.folder / "r").cgroup)
    pids = [pid for sandbox in groups.sandboxes() for pid in groups.processes(sandbox)]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def group_frozen(user: User) -> Iterator[None]:
    name = Layout(user.folder / "s", user.folder / "r").cgroup
    files = [*Path("/sys/fs/cgroup").glob(f"freezer/{name}/*/freezer.state")]
    words = ("FROZEN", "THAWED")
    if not files:
        files, words = [*Path("/sys/fs/cgroup").glob(f"{name}/*/cgroup.freeze")], ("1", "0")
    assert files
    for file in files:
        file.write_text(words[0])
    try:
        yield
    finally:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                file.write_text(words[1])


@pytest.mark.parametrize("how", [processes_stopped, group_frozen], ids=["stopped", "frozen"])
def test_a_sandbox_that_stands_still_is_answered_for_and_goes_on_afterwards(user: User, how: Any) -> None:
    session = user.k8e("sandbox", "create").json["session_id"]
    with how(user):
        told = answer(user, session, "echo well", 1)
        assert (told["status"], told["exit_code"]) == ("timed_out", 124), told
        assert "did not answer in time" in told["reason"]
    assert answer(user, session, "echo well", 20)["stdout"] == "well\n"


@pytest.mark.parametrize("how", [processes_stopped, group_frozen], ids=["stopped", "frozen"])
def test_a_sandbox_that_stands_still_can_be_destroyed(user: User, how: Any) -> None:
    session = user.k8e("sandbox", "create").json["session_id"]
    with how(user):
        answer(user, session, "echo well", 1)
        assert user.k8e("sandbox", "destroy", session).code == 0
    assert json.loads(user.run("true", "--session-id", session).stdout)["code"] == "session_not_found"


def test_the_least_memory_is_stated_for_each_runtime(user: User) -> None:
    least = {"native": "16m", "gvisor": "32m"}[user.runtime]
    session = user.k8e("sandbox", "create", "--memory", least).json["session_id"]
    assert answer(user, session, "echo well", 20)["stdout"] == "well\n"
    refused = json.loads(user.k8e("sandbox", "create", "--memory", "15m").stdout)
    assert (refused["code"], refused["field"]) == ("invalid_argument", "limits.memory"), refused
    if user.runtime == "gvisor":
        refused = json.loads(user.k8e("sandbox", "create", "--memory", "16m").stdout)
        assert (refused["code"], refused["field"]) == ("invalid_argument", "limits.memory"), refused
        assert "at least 32m with the runtime gvisor" in refused["error"], refused

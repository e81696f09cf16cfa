"""`k8e sandbox shell`, whatever comes between the user and the shell. tests/scenarios has it on both runtimes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack

import pytest

from k8e.cli.sandbox.shell import LeavingKeys
from tests.agentkernel.window import Window, open_window
from tests.cli.machine import K8E, Machine, run_launcher, wait_until
from tests.cli.test_silence import clear_up, stopped

CAT = ("--command", "stty -echo; echo ready; exec cat")
LEAVE = b"\x10\x11"


@pytest.fixture
def sid(machine: Machine) -> Iterator[str]:
    sid = str(machine.k8e("sandbox", "create").json["session_id"])
    yield sid
    machine.k8e("sandbox", "destroy", sid)


def open_shell(machine: Machine, sid: str, *words: str) -> AbstractContextManager[Window]:
    return open_window(machine, [K8E, "sandbox", "shell", sid, *words])


@pytest.fixture
def cat(machine: Machine, sid: str) -> Iterator[Window]:
    """A terminal that says what is typed, for the second time."""
    with open_shell(machine, sid, *CAT) as window:
        window.wait_for(b"ready\r\n")
        yield window


def find_run(machine: Machine, sid: str) -> str:
    (run,) = machine.k8e("sandbox", "log", sid).json["runs"]
    assert run["terminal"] is True
    return str(run["run_id"])


def say_and_hear(window: Window, word: bytes) -> None:
    window.type(word + b"\n")
    window.wait_for(word + b"\r\n")


def test_without_a_terminal_it_says_what_to_use_instead(machine: Machine) -> None:
    done = machine.k8e("sandbox", "shell", "box")
    assert (done.code, done.json["code"]) == (1, "terminal_needed")
    assert "run -i" in done.json["hint"]
    with open_window(machine, ["sh", "-c", f"{K8E} sandbox shell box | cat"]) as window:
        window.finish()
        assert b"terminal_needed" in window.screen


def test_what_is_not_there_is_refused_before_the_terminal_is_touched(machine: Machine, sid: str) -> None:
    for name, words, code in (
        ("none", (), b"[session_not_found]"),
        (sid, ("--attach", "run-0123456789abcdef"), b"[terminal_not_found]"),
        (sid, ("--user", "nobody-there"), b"[user_not_found]"),
    ):
        with open_shell(machine, name, *words) as window:
            assert window.finish() == 1
            assert code in window.screen
            assert window.mode == window.mode_before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_client_and_not_the_shell(machine: Machine, sid: str, cat: Window, number: int) -> None:
    assert cat.mode != cat.mode_before
    cat.process.send_signal(number)
    assert cat.finish() == -number
    assert cat.mode == cat.mode_before
    with open_shell(machine, sid, "--attach", find_run(machine, sid)) as window:
        window.wait_for(b"ready\r\n")
        say_and_hear(window, b"again")
        window.type(b"\x04")
        assert window.finish() == 0


def test_continued_after_a_stop_it_has_the_terminal_again(cat: Window) -> None:
    """The user's own shell has set the terminal to its mode meanwhile."""
    cat.process.send_signal(signal.SIGSTOP)
    cat.mode = cat.mode_before
    cat.process.send_signal(signal.SIGCONT)
    wait_until(lambda: cat.mode != cat.mode_before)
    say_and_hear(cat, b"on")
    cat.type(b"\x04")
    assert cat.finish() == 0
    assert cat.mode == cat.mode_before


def test_the_latest_window_has_it_and_the_other_one_is_told(machine: Machine, sid: str, cat: Window) -> None:
    run = find_run(machine, sid)
    with open_shell(machine, sid, "--attach", run) as other:
        assert cat.finish() == 1
        assert b"[terminal_taken]" in cat.screen
        assert b"--attach " + run.encode() in cat.screen
        assert cat.mode == cat.mode_before
        other.wait_for(b"ready\r\n")
        say_and_hear(other, b"mine")
        with open_shell(machine, sid) as third:
            third.wait_for(b"open elsewhere: " + run.encode())


def test_of_several_that_were_left_one_is_chosen(machine: Machine, sid: str, cat: Window) -> None:
    first = find_run(machine, sid)
    cat.type(LEAVE)
    assert cat.finish() == 0
    with open_shell(machine, sid, "--new") as window:
        window.wait_for(b"leaves it running\r\n")
        window.type(LEAVE)
        assert window.finish() == 0
    with open_shell(machine, sid) as window:
        assert window.finish() == 1
        assert b"[several_terminals]" in window.screen
        assert first.encode() in window.screen
    with open_shell(machine, sid, "--attach", first) as window:
        window.wait_for(b"back at " + first.encode())
        window.wait_for(b"ready\r\n")


def test_killed_from_elsewhere_its_exit_code_is_said(machine: Machine, sid: str, cat: Window) -> None:
    run = find_run(machine, sid)
    assert machine.running(sid) == ["sh"]
    assert machine.k8e("sandbox", "kill", run).json == {"ok": True, "had_ended": False}
    assert cat.finish() == 143
    assert cat.mode == cat.mode_before


def test_a_session_that_ends_ends_it(machine: Machine, sid: str, cat: Window) -> None:
    machine.k8e("sandbox", "destroy", sid)
    assert cat.finish() == 1
    assert b"[session_ended]" in cat.screen
    assert cat.mode == cat.mode_before


def test_a_daemon_that_hangs_or_stops_hangs_no_window(lone_machine: Machine) -> None:
    lone_machine.overrides["K8E_PATIENCE"] = "3"
    with ExitStack() as windows:
        with run_launcher(lone_machine) as daemon:
            sid = lone_machine.k8e("sandbox", "create").json["session_id"]
            window = windows.enter_context(open_shell(lone_machine, sid, *CAT))
            window.wait_for(b"ready\r\n")
            with stopped(daemon):
                assert window.finish() == 1
                assert b"[daemon_silent]" in window.screen
                assert b"the shell runs on" in window.screen
                assert window.mode == window.mode_before
            run = find_run(lone_machine, sid)
            window = windows.enter_context(open_shell(lone_machine, sid, "--attach", run))
            window.wait_for(b"ready\r\n")
        assert window.finish() == 1
        assert b"[terminal_detached]" in window.screen
        assert b"the daemon was stopped" in window.screen
        assert window.mode == window.mode_before
    with run_launcher(lone_machine):
        try:
            with open_shell(lone_machine, sid) as window:
                window.wait_for(b"back at " + run.encode())
                window.wait_for(b"ready\r\n")
                window.type(b"\x04")
                assert window.finish() == 0
        finally:
            clear_up(lone_machine)


class TestKeys:
    @pytest.mark.parametrize(
        ("pieces", "sent", "left"),
        [
            ([b"abc"], b"abc", False),
            ([b"ab\x10\x11cd"], b"ab", True),
            ([b"ab\x10", b"\x11"], b"ab", True),
            ([b"\x10", b"\x10", b"\x11"], b"\x10", True),
            ([b"\x10x"], b"\x10x", False),
            ([b"\x10", b"x\x11"], b"\x10x\x11", False),
            ([b"\x11\x10"], b"\x11", False),
        ],
    )
    def test_only_both_in_a_row_leave(self, pieces: list[bytes], sent: bytes, left: bool) -> None:
        keys = LeavingKeys()
        taken = [keys.take(piece) for piece in pieces]
        assert b"".join(typed for typed, _ in taken) == sent
        assert taken[-1][1] is left

    def test_the_first_alone_is_held_back_for_a_moment(self) -> None:
        keys = LeavingKeys()
        assert (keys.take(b"a\x10"), keys.patience) == ((b"a", False), LeavingKeys.MOMENT)
        assert (keys.give_up(), keys.patience) == (b"\x10", None)
        assert keys.take(b"\x11") == (b"\x11", False)

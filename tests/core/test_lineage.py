"""Who belongs to whom, among processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k8e.core.access.lineage import (
    Lineage,
    Process,
    are_related,
    find_circle,
    parse_lineage,
    read_lineage,
    write_lineage,
)

INIT = Process(1, 1, 1, 0, manager=True)
DESKTOP = Process(50, 2, 50, 0, manager=True)  # systemd --user
WINDOW = Process(60, 3, 60, 0, manager=False)  # a terminal program
SHELL_1 = Process(100, 10, 100, 34816, manager=False)
SHELL_2 = Process(200, 11, 200, 34817, manager=False)
AGENT = Process(101, 12, 100, 34816, manager=False)

TOP: Lineage = (WINDOW, DESKTOP, INIT)
PERSON: Lineage = (Process(201, 30, 200, 34817, manager=False), SHELL_2, *TOP)


def below(*parents: Process, pid: int = 900, session: int = 0, terminal: int = 0) -> Lineage:
    return (Process(pid, 40, session or pid, terminal, manager=False), *parents)


ASKERS = {
    "in the agent's terminal": below(AGENT, SHELL_1, *TOP, session=100, terminal=34816),
    "in a session of its own": below(AGENT, SHELL_1, *TOP),
    "deep in sessions of their own": below(below()[0], AGENT, SHELL_1, *TOP, pid=901),
}


@pytest.mark.parametrize("asker", ASKERS.values(), ids=list(ASKERS))
def test_another_terminal_of_the_same_person_is_no_relative(asker: Lineage) -> None:
    assert not are_related(asker, PERSON)
    assert find_circle(asker)[-1] == SHELL_1


ANSWERERS: dict[str, Lineage] = {
    "the agent itself": (AGENT, SHELL_1, *TOP),
    "the shell that it was started in": (SHELL_1, *TOP),
    "another child of the agent": below(AGENT, SHELL_1, *TOP, pid=902, session=100, terminal=34816),
    "one in a session of its own": below(AGENT, SHELL_1, *TOP, pid=902),
    "one in a terminal that the agent made": below(AGENT, SHELL_1, *TOP, pid=902, terminal=34820),
    "one that the agent left to init, in the same session": below(INIT, pid=902, session=100),
}


@pytest.mark.parametrize("answerer", ANSWERERS.values(), ids=list(ANSWERERS))
@pytest.mark.parametrize("asker", ASKERS.values(), ids=list(ASKERS))
def test_what_the_agent_can_start_is(asker: Lineage, answerer: Lineage) -> None:
    assert are_related(asker, answerer)


def test_an_agent_without_a_terminal_is_related_to_all_below_what_started_it() -> None:
    editor = Process(70, 5, 60, 0, manager=False)
    asker = below(editor, DESKTOP, INIT)
    assert are_related(asker, below(editor, DESKTOP, INIT, pid=903, terminal=34830)), "the editor's own terminal"
    assert not are_related(asker, PERSON)


def test_a_service_is_related_to_what_it_starts() -> None:
    service = Process(80, 5, 80, 0, manager=False)
    assert are_related(below(service, INIT), below(service, INIT, pid=903, terminal=34830))
    assert not are_related(below(service, INIT), PERSON)


def test_the_same_pid_later_is_another_process() -> None:
    asker = below(INIT)
    answerer = (Process(902, 60, 902, 34840, manager=False), Process(900, 55, 899, 0, manager=False), INIT)
    assert not are_related(asker, answerer)
    assert are_related(asker, (answerer[0], asker[0], INIT))


def test_a_new_window_may_have_the_number_of_a_closed_one() -> None:
    assert not are_related(ASKERS["in the agent's terminal"], below(WINDOW, DESKTOP, INIT, pid=902, terminal=34816))


def test_a_manager_that_asks_is_related_to_itself() -> None:
    assert are_related((INIT,), (INIT,))


def test_our_own() -> None:
    mine = read_lineage(os.getpid())
    assert mine[0].pid == os.getpid()
    assert mine[0].session == os.getsid(0)
    assert mine[1].pid == os.getppid()
    assert mine[-1].pid == 1
    assert mine[-1].manager
    assert parse_lineage(write_lineage(mine)) == mine
    script = "import os; from k8e.core.access.lineage import *; print(write_lineage(read_lineage(os.getpid())))"
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, start_new_session=True
    )
    theirs = parse_lineage(child.stdout)
    assert theirs[0].session == theirs[0].pid
    assert theirs[1:] == mine


def test_a_process_that_is_gone_is_not_known(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert read_lineage(child.pid) == ()
    assert read_lineage(0) == ()


def make_process(proc: Path, pid: int, parent: int, name: str, group: str) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    fields = ["S", parent, 1, pid, 0, *[0] * 14, pid * 100]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))} 0 0")
    (folder / "cgroup").write_text(f"0::{group}\n")


def test_names_cannot_lie_and_managers_are_known_by_their_group(tmp_path: Path) -> None:
    make_process(tmp_path, 1, 0, "init", "/init.scope")
    make_process(tmp_path, 5, 1, "systemd", "/user.slice/user-1000.slice/user@1000.service/init.scope")
    make_process(tmp_path, 9, 5, "x) S 1 1 1 7 (", "/user.slice/user-1000.slice/user@1000.service/app.slice/init.scope")
    found = read_lineage(9, tmp_path)
    assert [(one.pid, one.started, one.session, one.terminal, one.manager) for one in found] == [
        (9, 900, 9, 0, False),
        (5, 500, 5, 0, True),
        (1, 100, 1, 0, True),
    ]


def test_a_chain_without_an_end_is_not_believed(tmp_path: Path) -> None:
    make_process(tmp_path, 7, 7, "loop", "/")
    assert read_lineage(7, tmp_path) == ()

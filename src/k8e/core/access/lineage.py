"""Whether two processes of this machine belong together: the process that asked for an approval must not answer it.

Another process id proves nothing, since an AI agent can start as many processes as it likes. So the process that asked
has a circle: itself and its ancestors, up to and with the login session that has a terminal (the shell in which the
agent was started); without a terminal up to the process manager. A process that descends from the circle, or shares a
session with it, belongs to it. Two terminals that one person has opened do not: what they have in common is the program
that shows them, above both sessions.

Processes of one user can hide this (docs/approvals.md says how); it is no boundary against a program that tries to.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_DEPTH: Final = 128  # ancestors; a chain that is longer is not believed
_USER_MANAGER: Final = re.compile(r"/user@\d+\.service/init\.scope$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: int  # in the kernel's ticks: a pid alone may be used again
    session: int
    terminal: int  # 0: none
    manager: bool  # the ancestor of all processes, or of all of a user's, which therefore relates none


Lineage = tuple[Process, ...]  # a process, its parent and so on; empty: not known


def read_lineage(pid: int, proc: Path = Path("/proc")) -> Lineage:
    """The lineage of a process now; empty where the kernel does not show all of it."""
    found: list[Process] = []
    while pid:
        try:
            stat = (proc / str(pid) / "stat").read_text(errors="replace")
            groups = (proc / str(pid) / "cgroup").read_text(errors="replace")
        except OSError:
            return ()
        fields = stat.rpartition(")")[2].split()  # what is before it is a name, which can be anything
        parent, session, terminal, started = (int(fields[index]) for index in (1, 3, 4, 19))
        manager = pid == 1 or _USER_MANAGER.search(groups) is not None
        found.append(Process(pid, started, session, terminal, manager))
        if len(found) > _DEPTH:
            return ()
        pid = parent
    return tuple(found)


def find_circle(lineage: Lineage) -> Lineage:
    circle: list[Process] = []
    for process in lineage:
        if process.manager:
            break
        if circle and circle[-1].terminal and process.session != circle[-1].session:
            break
        circle.append(process)
    return tuple(circle)


def are_related(asker: Lineage, answerer: Lineage) -> bool:
    """Both must be known."""
    circle = find_circle(asker) or asker[:1]
    members = {(process.pid, process.started) for process in circle}
    if any((process.pid, process.started) in members for process in answerer):
        return True
    # Those whose parents are gone stay in their session. Terminals are no sign: a closed window's number is used again.
    return answerer[0].session in {process.session for process in circle}


def write_lineage(lineage: Lineage) -> str:
    return json.dumps([[one.pid, one.started, one.session, one.terminal, one.manager] for one in lineage])


def parse_lineage(text: str) -> Lineage:
    return tuple(Process(*values) for values in json.loads(text))

"""Whether two processes of this machine belong together: whoever asked for an approval must not give it.

Another process id proves nothing, since an agent can start as many processes as it likes. What belongs to the one who
asked is its circle: the process itself and its ancestors, up to and with the login session that has a terminal (the
shell in which somebody started the agent); without a terminal up to the process manager. Whoever descends from
the circle, or shares a session with it, belongs to it. Two terminals that one person has opened do not:
what they have in common is the program that shows them, above both sessions.

Processes of one user can hide this (docs/approvals.md says how); it is no boundary against somebody who tries to.
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
    manager: bool  # of all processes, or all of a user's: everybody's ancestor, and nobody's relative


Lineage = tuple[Process, ...]  # a process, its parent and so on; empty: not known


def read_lineage(pid: int, proc: Path = Path("/proc")) -> Lineage:
    """As it is now. What the kernel does not show to the end is not known at all."""
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

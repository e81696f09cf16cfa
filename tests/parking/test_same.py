"""A program cannot tell, and nobody who sees its output can, whether its interpreter was started for it or had waited.

Every program runs both ways in the same sandbox: all of them in a soak, a share of them in a normal run (shares.py).
"""

from __future__ import annotations

import re

import pytest

from k8e.core.sessions.interpreters import BASH, NODE, PYTHON, Kind, suits
from k8e.engine import Runtime
from tests.changes import current_changes
from tests.parking import bash_programs, node_programs, python_programs
from tests.parking.bash_programs import BASH as BASH_PROGRAMS
from tests.parking.conftest import Bed, Ended
from tests.parking.node_programs import NODE as NODE_PROGRAMS
from tests.parking.programs import Program
from tests.parking.python_programs import PYTHON as PYTHON_PROGRAMS
from tests.shares import ROUND, choose

CORPUS: dict[Kind, list[tuple[str, Program]]] = {PYTHON: PYTHON_PROGRAMS, NODE: NODE_PROGRAMS, BASH: BASH_PROGRAMS}
FILES = {PYTHON: python_programs.__file__, NODE: node_programs.__file__, BASH: bash_programs.__file__}
# How many times the share of others: Node is slow, and gVisor is.
TIMES = {(Runtime.NATIVE, PYTHON): 3, (Runtime.NATIVE, BASH): ROUND, (Runtime.NATIVE, NODE): 1}
# What differs between two fresh runs as well.
ADDRESS = re.compile(rb"0x[0-9a-f]{6,}")
PID = re.compile(rb"\(node:\d+\)")
MOMENT = re.compile(rb"Thread 0x[0-9a-f]+|pid=\d+")


def level(ended: Ended) -> tuple[bytes, bytes, int | None, int | None]:
    streams = (
        MOMENT.sub(b"?", PID.sub(b"(node:?)", ADDRESS.sub(b"0x?", text))) for text in (ended.stdout, ended.stderr)
    )
    return (*streams, ended.exit_code, ended.signal)  # type: ignore[return-value]


async def compare(bed: Bed, kind: Kind, program: Program) -> str:
    """What is wrong, or nothing."""
    await bed.park(kind)
    waited, handed_over = await bed.run(kind, program, parked=True)
    fresh, other = await bed.run(kind, program, parked=False)
    if not handed_over or other:
        return "the parked interpreter was not used" if not handed_over else "one was used that should not"
    if program.same and level(waited) != level(fresh):
        return f"\n  parked: {waited}\n  fresh:  {fresh}"
    if (waited.exit_code, waited.signal) != (fresh.exit_code, fresh.signal):
        return f"ended with {waited.exit_code}, {waited.signal}, fresh with {fresh.exit_code}, {fresh.signal}"
    if not program.same and (waited.stdout == fresh.stdout or not waited.stdout):
        return f"the same twice: {waited.stdout!r}"
    return ""


@pytest.mark.parametrize("kind", [PYTHON, NODE, BASH], ids=["python", "node", "bash"])
async def test_programs_do_the_same_both_ways(bed: Bed, kind: Kind) -> None:
    def has_changed(named: tuple[str, Program]) -> bool:
        return current_changes().touch_text(FILES[kind], named[1].code)

    programs = [(name, program) for name, program in CORPUS[kind] if suits_text(kind, program)]
    times, turn = TIMES.get((bed.runtime, kind), 1), 0 if bed.runtime is Runtime.NATIVE else 3
    chosen = choose(programs, times=times, turn=turn, always=has_changed)
    wrong = {name: fault for name, program in chosen if (fault := await compare(bed, kind, program))}
    assert not wrong, "\n".join(f"{name}: {fault}" for name, fault in wrong.items())


def suits_text(kind: Kind, program: Program) -> bool:
    from k8e.link.model import ExecSpec

    return suits(ExecSpec((*kind, program.code.encode("utf-8", "surrogateescape"))))


def test_the_corpus_is_large_and_suits() -> None:
    for kind, least in ((PYTHON, 250), (NODE, 120), (BASH, 100)):
        assert sum(suits_text(kind, program) for _, program in CORPUS[kind]) >= least
        assert len({name for name, _ in CORPUS[kind]}) == len(CORPUS[kind])

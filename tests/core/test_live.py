"""The state of a live session: each part has one writer, and what the small parts know."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import k8e.core
from k8e.core.sessions.live import BackgroundRuns, MemoryKills, Use
from tests.core.rig import ManualClock

CORE = Path(k8e.core.__file__).parent
WRITERS = {
    "step": "sessions/lifecycle.py",
    "ending": "sessions/lifecycle.py",
    "ended_by": "sessions/lifecycle.py",
    "hosts.unsaved": "sessions/hosts.py",
    "stored": "sessions/live.py",
}
LIVES = {"live", "child", "parent", "opened.live", "run.live", "self._live"}


def find_assignments(path: Path) -> Iterator[str]:
    """The attributes of live sessions that a file assigns."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            for live in LIVES:
                if ast.unparse(node).startswith(f"{live}."):
                    yield ast.unparse(node).removeprefix(f"{live}.")


def test_each_state_has_one_writer() -> None:
    for path in CORE.rglob("*.py"):
        for attribute in find_assignments(path):
            assert WRITERS.get(attribute) == str(path.relative_to(CORE)), f"{path}: {attribute}"


def test_a_use_is_written_down_once() -> None:
    clock = ManualClock()
    use = Use(clock, last_used=1.0, used_at=2.0)
    assert use.take_unsaved() is None
    clock.advance(5)
    use.touch()
    clock.advance(3)
    assert (use.idle, use.take_unsaved(), use.take_unsaved()) == (3, (clock.wall_now - 3, clock.now - 3), None)


def test_a_kill_for_want_of_memory_explains_an_end_that_follows_soon() -> None:
    clock = ManualClock()
    kills = MemoryKills(clock)
    kills.see(0)
    assert not kills.recent
    kills.see(2)
    clock.advance(10)
    kills.see(2)
    assert (kills.count, kills.recent) == (2, True)
    clock.advance(1)
    assert not kills.recent


async def test_a_run_without_a_mark_began_before_everything() -> None:
    runs = BackgroundRuns()
    runs.add("run-1")
    assert (len(runs), runs.find_mark("run-1").since, runs.find_mark("unknown").since) == (1, 0, 0)
    runs.discard("run-1")
    runs.discard("run-1")
    assert not runs

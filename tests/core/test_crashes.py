"""kill -9, at every step and at random. Afterwards nothing is orphaned, and no command is lost or doubled.

The daemon that dies is in a process of its own (doomed.py); the one that recovers is here. Every command writes a line
of its own into its session's ledger, so that what ran, and how often, can be read there.

Where it dies is learnt from lives that come through. A run dies at its share of the steps (shares.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from k8e.core.model import Phase, SessionSpec, Status
from k8e.core.store.mirrored import MirroredStore
from k8e.core.store.store import Store
from k8e.link import AgentLink
from k8e.policy import excess
from k8e.settings import PoolSettings
from tests.changes import current_changes
from tests.core.bare_engine import BareEngine, find_processes, has_mark
from tests.core.doomed import HOSTS
from tests.core.rig import ALICE, Rig, open_rig, remove_sandboxes
from tests.sandboxes import needs_root
from tests.shares import choose, seed

pytestmark = needs_root

ROOT = Path(__file__).resolve().parent.parent.parent
KILLS = int(os.environ.get("K8E_KILLS", "8"))
LIVES = 3  # until one reaches the step that it is to die at
LOOKS = {"AgentLink.commands", "BareEngine.observe"}  # how often a daemon looks is not the same each time
CLASSES = {"BareEngine": BareEngine, "Store": Store, "MirroredStore": MirroredStore, "AgentLink": AgentLink}


class Story:
    """What the clients of the dead were told."""

    def __init__(self) -> None:
        self.creating: set[str] = set()
        self.created: set[str] = set()
        self.destroying: set[str] = set()
        self.destroyed: set[str] = set()
        self.begun: dict[str, str] = {}  # line -> session
        self.ran: set[str] = set()
        self.started: dict[str, str] = {}  # line -> run
        self.asked: list[list[str]] = []  # lists of hosts
        self.answered: list[list[str]] = []
        self.end: dict[str, Any] = {}

    def hear(self, said: dict[str, Any]) -> None:
        what = said["what"]
        if what in ("creating", "created", "destroying", "destroyed"):
            getattr(self, what).add(said["session"])
        elif what == "running":
            self.begun[said["line"]] = said["session"]
        elif what == "changing":
            self.asked.append(said["hosts"])
        elif what == "changed":
            self.answered.append(said["hosts"])
        elif what == "ran":
            self.ran.add(said["line"])
        elif what == "started":
            self.started[said["line"]] = said["run"]
        else:
            self.end = said


async def live_and_die(folder: Path, story: Story, orders: dict[str, Any], lines: int | None = None) -> int:
    """Returns how it ended. It is killed from here once it has said so many lines, if told so."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.core.doomed",
        str(folder),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(orders).encode())
    process.stdin.close()
    heard = 0
    while said := await process.stdout.readline():
        if said.endswith(b"\n"):
            story.hear(json.loads(said))
        heard += 1
        if heard == lines:
            process.kill()
    status = await process.wait()
    # A child of its that has not become another program yet would start a sandbox behind our back.
    while find_processes(f"tests.core.doomed\0{folder}"):
        await asyncio.sleep(0.002)
    return status


def make_place(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


async def learn_steps(folder: Path, orders: dict[str, Any]) -> list[str]:
    """Those of every life; of looks, the first two."""
    lives = []
    for number in range(2):
        place, story = make_place(folder, f"learnt-{number}"), Story()
        assert await live_and_die(place, story, orders) == 0, story.end
        lives.append(story.end["steps"])
        await remove_sandboxes(place)
    return [step for step in lives[0] if step in lives[1] and not is_late_look(step)]


def is_late_look(step: str) -> bool:
    name, number, _ = step.split(" ")
    return name in LOOKS and int(number) > 2


def has_changed(step: str) -> bool:
    """Whether what is called there has, or who lives there."""
    kind, _, name = step.partition(" ")[0].partition(".")
    return current_changes().touch_function(getattr(CLASSES[kind], name))


async def die_at_each(
    folder: Path, least: int, orders: dict[str, Any], *, times: int = 1
) -> AsyncIterator[tuple[Path, Story]]:
    """A folder and what is known of it, for each of the steps that are this run's."""
    steps = await learn_steps(folder, orders)
    assert len(steps) > least, steps
    for number, step in enumerate(choose(steps, times=times, always=has_changed)):
        for life in range(LIVES):
            place, story = make_place(folder, f"{number}-{life}"), Story()
            status = await live_and_die(place, story, {**orders, "moment": step})
            assert status in (0, -signal.SIGKILL), (step, story.end)
            try:
                if status:
                    yield place, story
                    break
            finally:
                await remove_sandboxes(place)
        else:
            raise AssertionError(f"{step} was never reached")


async def check_sessions(rig: Rig, story: Story) -> set[str]:
    """Nothing is half done, nothing is there that should not be. Returns the sessions that live."""
    phases = {record.session.phase for record in await rig.store.sessions()}
    assert phases <= {Phase.ACTIVE, Phase.DESTROYED}
    alive = {session.session_id for session in await rig.service.sessions.list(ALICE)}
    assert story.created - story.destroying <= alive, "a session was lost"
    assert alive <= story.creating - story.destroyed, "a session came back"
    sandboxes = {rig.sandbox_of(session) for session in alive}
    assert set(await rig.engine.list()) == sandboxes, "an orphan, or a session without a sandbox"
    # bwrap and the agent of each, and nothing of any other.
    others = [
        pid
        for pid in find_processes(str(rig.folder))
        if not any(rig.engine.owns(sandbox, pid) for sandbox in sandboxes) and has_mark(pid, str(rig.folder))
    ]
    assert others == []
    return alive


async def check_commands(rig: Rig, story: Story, alive: set[str]) -> None:
    background = {line: run for line, run in story.started.items() if story.begun[line] in alive}
    for line, run_id in background.items():
        result = await rig.poll_to_the_end(run_id)
        assert (result.status, result.exit_code, result.stdout) == (Status.COMPLETED, 0, f"{line}\n".encode())
    for session in alive:
        await rig.wait_until_alone(session)  # foreground commands of the dead are gone, background ones have ended
        ledger = await rig.service.files.read(ALICE, session, "ledger")
        count = Counter(ledger.decode().split())
        mine = {line for line, owner in story.begun.items() if owner == session}
        assert set(count) <= mine
        assert set(count.values()) <= {1}, "a command ran twice"
        told = (story.ran | set(background)) & mine
        assert told <= set(count), "a command was reported and did not run"
        log = await rig.service.runs.list(ALICE, session)
        assert all(run.status is not Status.RUNNING for run in log)
        link, _ = await rig.engine.attach(rig.sandbox_of(session))
        assert await link.commands() == [], "the agent was left with a command"


async def check_service(rig: Rig, alive: set[str]) -> None:
    """The next request is served, and everything can be cleared away."""
    session = await rig.create(spec=SessionSpec(session_id="after"))
    for one in (*alive, session):
        assert (await rig.run(one, "echo served")).stdout == b"served\n"
        await rig.service.sessions.destroy(ALICE, one)
    await rig.assert_no_trace()


async def test_killed_at_every_step_it_leaves_nothing_half_done(folder: Path) -> None:
    async for place, story in die_at_each(folder, 60, {}):
        async with open_rig(place) as rig:
            alive = await check_sessions(rig, story)
            if "one" in alive:
                assert (await rig.run("one", "echo $WORD")).stdout == b"kept\n"
            await check_commands(rig, story, alive)
            await check_service(rig, alive)


@pytest.mark.parametrize("how", ["poll", "kill"])
async def test_killed_while_it_brings_output_home_the_next_one_has_all_of_it(folder: Path, how: str) -> None:
    async for place, story in die_at_each(folder, 5, {"collect": how}):
        await check_output(place, story, how)


async def check_output(folder: Path, story: Story, how: str) -> None:
    async with open_rig(folder) as rig:
        run_id = story.started["a"]
        if how == "kill":
            await rig.service.runs.kill(ALICE, run_id)
        for _ in range(2):
            result = await rig.poll_to_the_end(run_id)
            assert result.status is (Status.KILLED if how == "kill" else Status.COMPLETED)
            assert (result.stdout, result.truncated) == (b"x" * 300_000, False)
        link, _ = await rig.engine.attach(rig.sandbox_of("one"))
        assert await link.commands() == []
        await rig.service.sessions.destroy(ALICE, "one")
        await rig.assert_no_trace()


async def test_killed_while_a_list_of_hosts_changes_it_is_the_same_on_record_and_in_force(folder: Path) -> None:
    # Both steps of every change, before and after.
    async for place, story in die_at_each(folder, 4 * len(HOSTS) - 1, {"hosts": True}, times=3):
        async with open_rig(place) as rig:
            (session,) = await rig.service.sessions.list(ALICE)
            hosts = list(session.hosts.texts)
            assert hosts in ([["a.test"], *story.answered][-1], story.asked[-1])
            sandbox = rig.sandbox_of("one")
            record = await rig.store.find_session(sandbox)
            assert record is not None
            assert record.session.hosts == session.hosts
            assert rig.engine.egress(sandbox) == session.hosts.texts
            await rig.service.sessions.destroy(ALICE, "one")


async def test_killed_while_it_stops_or_starts_a_session_its_files_are_there(folder: Path) -> None:
    async for place, story in die_at_each(folder, 20, {"lasting": True}):
        async with open_rig(place) as rig:
            (session,) = await rig.service.sessions.list(ALICE)
            assert session.phase in (Phase.ACTIVE, Phase.STOPPED)
            assert bool(rig.engine.processes(rig.sandbox_of("one"))) == (session.phase is Phase.ACTIVE)
            running = [run for run in await rig.service.runs.list(ALICE, "one") if run.status is Status.RUNNING]
            assert session.phase is Phase.ACTIVE or not running
            await rig.service.sessions.start(ALICE, "one")
            result = await rig.run("one", "cat ledger; echo $WORD")
            assert result.stdout.decode().split() in ([*story.ran, "kept"], [*story.begun, "kept"])
            await rig.service.sessions.destroy(ALICE, "one")
            await rig.assert_no_trace()


@pytest.mark.parametrize("moment", choose(range(1, 14), times=2))
async def test_killed_while_recovering_it_recovers_the_next_time(folder: Path, moment: int) -> None:
    story, chance = Story(), seed("recovering")
    assert await live_and_die(folder, story, {"seed": chance}, lines=30) == -signal.SIGKILL
    assert await live_and_die(folder, story, {"seed": chance + 1, "moment": moment}, lines=60) == -signal.SIGKILL
    async with open_rig(folder) as rig:
        alive = await check_sessions(rig, story)
        await check_commands(rig, story, alive)
        await check_service(rig, alive)


async def test_killed_at_random_under_a_mixed_load_again_and_again(folder: Path) -> None:
    chance = random.Random(seed("killed at random"))
    story = Story()
    for number in range(KILLS):
        status = await live_and_die(folder, story, {"seed": chance.randrange(1 << 32)}, lines=chance.randrange(1, 60))
        assert status == -signal.SIGKILL, story.end
        if number % 20 == 19:
            async with open_rig(folder) as rig:
                await check_commands(rig, story, await check_sessions(rig, story))
    async with open_rig(folder) as rig:
        alive = await check_sessions(rig, story)
        await check_commands(rig, story, alive)
        await check_service(rig, alive)


# With children


async def test_killed_at_every_step_of_a_family_it_leaves_no_orphan(folder: Path) -> None:
    async for place, story in die_at_each(folder, 40, {"family": True}):
        await check_family(place, story)


async def check_family(folder: Path, story: Story) -> None:
    async with open_rig(folder) as rig:
        alive = await check_sessions(rig, story)
        assert not alive or "parent" in alive, "a child outlived its parent"
        shown = {session.session_id: session for session in await rig.service.sessions.list(ALICE)}
        for child in alive - {"parent"}:
            assert shown[child].parent == "parent"
            assert not excess(shown[child].hosts, shown["parent"].hosts)
            assert rig.engine.egress(rig.sandbox_of(child)) == shown[child].hosts.texts
            run = await rig.run(child, "pwd; echo $WORD; echo written > file")
            assert run.stdout == f"/workspace/of-{child}\nkept\n".encode()
            assert await rig.service.files.read(ALICE, "parent", f"of-{child}/file") == b"written\n"
        if alive:
            assert set(shown["parent"].children) == alive - {"parent"}
            assert list(shown["parent"].hosts.texts) in (story.answered or [["a.test", "b.test"], ["a.test"]])
            await rig.service.sessions.destroy(ALICE, "parent")
        await rig.assert_no_trace()


# With sandboxes made ahead


async def test_killed_at_every_step_of_a_pool_it_leaves_nothing_half_made(folder: Path) -> None:
    async for place, story in die_at_each(folder, 40, {"warm": 2}):
        await check_pool(place, story)


async def check_pool(folder: Path, story: Story) -> None:
    async with open_rig(folder, pool=PoolSettings(min=2, max=2)) as rig:
        await rig.service._pool.settle()
        await rig.service._parts.tasks.close(30)
        sessions = {rig.sandbox_of(session.session_id) for session in await rig.service.sessions.list(ALICE)}
        warm = {row.sandbox for row in await rig.store.warm() if row.ready}
        assert set(await rig.engine.list()) == sessions | warm, "an orphan, or a record of nothing"
        assert len(await rig.store.warm()) == len(warm) == rig.service._pool.warm
        assert not sessions & warm, "a session's sandbox would be given to another one"
        for name in warm:
            link, _ = await rig.engine.attach(name)
            assert await link.list_dir(b"/run/k8e-session") == [], "something of a session is in it"
    async with open_rig(folder) as rig:
        alive = await check_sessions(rig, story)
        if "one" in alive:
            assert (await rig.run("one", "echo $WORD")).stdout == b"kept\n"
        await check_service(rig, alive)

"""A daemon without doors that is going to be killed: `python -m tests.core.doomed FOLDER`, with what to do on stdin.

It says on stdout, one JSON line each, what its clients were told and what they were about to do. With a `moment` it
kills itself (-9) there: just before or just after a call to the engine or the store, counted from the first one on or
named as one that came through names them: `Store.insert_run 3 after`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k8e.core.errors import Fault
from k8e.core.model import ChildSpec, HostsChange, ManifestFile, RunSpec, SessionSpec, Status
from k8e.core.service import Service
from k8e.core.store.environments import FileEnvironments
from k8e.core.store.store import Store
from k8e.settings import PoolSettings
from tests.core.bare_engine import BareEngine
from tests.core.mirror import open_store
from tests.core.rig import ALICE


def tell(what: str, **details: object) -> None:
    os.write(1, json.dumps({"what": what, **details}).encode() + b"\n")


class Moments:
    """Counts calls, and ends everything at the one it was told."""

    def __init__(self, last: int | str | None, *, counts: bool = True) -> None:
        self.steps: list[str] = []
        self._calls: Counter[str] = Counter()
        self._counts = counts
        self._last = last

    def begin(self) -> None:
        """Counts from here on."""
        self._counts = True

    def watch(self, target: object, *names: str) -> None:
        for name in names:
            setattr(target, name, self._wrap(f"{type(target).__name__}.{name}", getattr(target, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def begin() -> str:
            if self._counts:
                self._calls[name] += 1
            step = f"{name} {self._calls[name]}"
            self._pass(f"{step} before")
            return step

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            step = begin()
            result = await call(*args, **kwargs)
            self._pass(f"{step} after")
            return result

        def wrapped_at_once(*args: Any, **kwargs: Any) -> Any:
            step = begin()
            result = call(*args, **kwargs)
            self._pass(f"{step} after")
            return result

        return wrapped if inspect.iscoroutinefunction(call) else wrapped_at_once

    def _pass(self, step: str) -> None:
        if self._counts:
            self.steps.append(step)
            if self._last in (step, len(self.steps)):
                os.kill(os.getpid(), signal.SIGKILL)


async def live_once(service: Service) -> None:
    """One of everything, in order."""
    manifest = [ManifestFile("ledger", b"")]
    tell("creating", session="one")
    await service.sessions.create(ALICE, SessionSpec(session_id="one", env={"WORD": "kept"}, manifest=manifest))
    tell("created", session="one")
    await write_line(service, "one", "a")
    await write_line_later(service, "one", "b", poll=True)
    await write_line_later(service, "one", "c", poll=False)
    tell("creating", session="two")
    await service.sessions.create(ALICE, SessionSpec(session_id="two", manifest=manifest))
    tell("created", session="two")
    tell("destroying", session="two")
    await service.sessions.destroy(ALICE, "two")
    tell("destroyed", session="two")
    # In a session that no caller is told of: it must not be there afterwards, wherever this ends.
    await service.runs.run_once(ALICE, SessionSpec(env={"WORD": "gone"}), RunSpec("", "true"))
    await write_line(service, "one", "d")


async def live_ahead(service: Service) -> None:
    """With a pool: made ahead, claimed, and given back."""
    pool = service._pool
    for session in ("one", "two"):
        tell("creating", session=session)
        await service.sessions.create(ALICE, SessionSpec(session_id=session, env={"WORD": "kept"}))
        tell("created", session=session)
        await pool.settle()
    tell("destroying", session="two")
    await service.sessions.destroy(ALICE, "two")
    tell("destroyed", session="two")
    for name in (pool._take(template) for template in list(pool._ready)):
        assert name
        await pool._destroy(name)


async def write_line(service: Service, session: str, line: str) -> None:
    tell("running", session=session, line=line)
    result = await service.runs.run(ALICE, RunSpec(session, f"echo {line} >> ledger"))
    assert result.exit_code == 0, result
    tell("ran", session=session, line=line)


async def write_line_later(service: Service, session: str, line: str, *, poll: bool) -> None:
    tell("running", session=session, line=line)
    spec = RunSpec(session, f"echo {line} >> ledger; echo {line}", background=True)
    run_id = (await service.runs.run(ALICE, spec)).run_id
    tell("started", session=session, line=line, run=run_id)
    while poll and (await service.runs.poll(ALICE, run_id)).status is Status.RUNNING:
        await asyncio.sleep(0.002)


async def collect_and_die(service: Service, engine: BareEngine, moments: Moments, how: str) -> None:
    """One background run with more output than one frame takes; the moments are those of bringing it home."""
    tell("creating", session="one")
    await service.sessions.create(ALICE, SessionSpec(session_id="one", manifest=[ManifestFile("ledger", b"")]))
    tell("created", session="one")
    tell("running", session="one", line="a")
    code = "echo a >> ledger; head -c 300000 /dev/zero | tr '\\0' x; " + ("sleep 1000" if how == "kill" else "")
    run_id = (await service.runs.run(ALICE, RunSpec("one", code, background=True))).run_id
    (sandbox,) = await engine.list()
    link, _ = await engine.attach(sandbox)
    while not any(one.stdout_bytes == 300_000 and one.running == (how == "kill") for one in await link.commands()):
        await asyncio.sleep(0.002)
    tell("started", session="one", line="a", run=run_id)
    moments.watch(link, "attach", "commands", "write_file", "release")
    moments.begin()
    await (service.runs.kill(ALICE, run_id) if how == "kill" else service.runs.poll(ALICE, run_id))


HOSTS: list[list[str]] = [["a.test", "b.test"], ["c.test"], [], ["d.test"]]  # wider, others, none, wider


async def change_hosts(service: Service, engine: BareEngine, store: Store, moments: Moments) -> None:
    """The moments are those of changing a list."""
    await service.sessions.create(ALICE, SessionSpec(session_id="one", allowed_hosts=["a.test"]))
    moments.watch(engine, "set_egress")
    moments.watch(store, "set_hosts")
    moments.begin()
    for hosts in HOSTS:
        tell("changing", hosts=hosts)
        await service.sessions.set_hosts(ALICE, "one", HostsChange(hosts=hosts))
        tell("changed", hosts=hosts)


async def stop_and_start(service: Service, engine: BareEngine, store: Store, moments: Moments) -> None:
    """The moments are those of stopping and starting, with something under way."""
    spec = SessionSpec(session_id="one", persistent=True, env={"WORD": "kept"}, manifest=[ManifestFile("ledger", b"")])
    await service.sessions.create(ALICE, spec)
    tell("created", session="one")
    moments.watch(engine, "stop", "start")
    moments.watch(store, "stop_session", "start_session")
    moments.begin()
    await write_line(service, "one", "a")
    await service.runs.run(ALICE, RunSpec("one", "sleep 1000", background=True))
    await service.sessions.stop(ALICE, "one")
    tell("stopped")
    await service.sessions.start(ALICE, "one")
    tell("started_again")


async def raise_family(service: Service, engine: BareEngine, store: Store, moments: Moments) -> None:
    """The moments are those of having children, taking something from all of them, and ending with them."""
    tell("creating", session="parent")
    await service.sessions.create(ALICE, SessionSpec(session_id="parent", allowed_hosts=["a.test", "b.test"]))
    tell("created", session="parent")
    moments.watch(engine, "set_egress")
    moments.watch(store, "set_hosts")
    moments.begin()
    for child in ("one", "two"):
        tell("creating", session=child)
        spec = ChildSpec(session_id=child, env={"WORD": "kept"}, workspace_path=f"of-{child}")
        await service.sessions.create_child(ALICE, "parent", spec)
        tell("created", session=child)
    await service.runs.run(ALICE, RunSpec("one", "sleep 1000", background=True, timeout=2000))
    tell("changing", hosts=["a.test"])
    await service.sessions.set_hosts(ALICE, "parent", HostsChange(hosts=["a.test"]))
    tell("changed", hosts=["a.test"])
    for session in ("one", "two", "parent"):
        tell("destroying", session=session)
    await service.sessions.destroy(ALICE, "parent")
    for session in ("one", "two", "parent"):
        tell("destroyed", session=session)


async def live_wildly(service: Service, seed: int) -> None:
    """Several clients at once, each with sessions of its own, until the end."""
    chance = random.Random(seed)
    there = [session.session_id for session in await service.sessions.list(ALICE)]
    clients = [be_client(service, there[number::4], random.Random(chance.random())) for number in range(4)]
    await asyncio.gather(*clients)


async def be_client(service: Service, mine: list[str], chance: random.Random) -> None:
    while True:
        line = f"{chance.getrandbits(64):x}"
        action = chance.choice(["create", "run", "run", "run", "later", "later", "slow", "destroy", "write"])
        try:
            if action == "create" or not mine:
                session = f"s-{line}"
                tell("creating", session=session)
                await service.sessions.create(
                    ALICE, SessionSpec(session_id=session, manifest=[ManifestFile("ledger", b"")])
                )
                tell("created", session=session)
                mine.append(session)
            elif action == "run":
                await write_line(service, chance.choice(mine), line)
            elif action == "later":
                await write_line_later(service, chance.choice(mine), line, poll=chance.random() < 0.5)
            elif action == "slow":
                # Still running when the end comes.
                spec = RunSpec(chance.choice(mine), "setsid sleep 1000 & sleep 1000", timeout=0.2 + chance.random())
                await service.runs.run(ALICE, spec)
            elif action == "write":
                await service.files.write(ALICE, chance.choice(mine), "data", os.urandom(100_000), append=False)
            elif len(mine) > 1:
                session = mine.pop(chance.randrange(len(mine)))
                tell("destroying", session=session)
                await service.sessions.destroy(ALICE, session)
                tell("destroyed", session=session)
        except Fault as fault:
            tell("fault", code=fault.code, detail=fault.detail)
            raise


async def main(folder: Path, orders: dict[str, Any]) -> None:
    apart = {"collect", "hosts", "lasting", "family"} & orders.keys()
    moments = Moments(orders.get("moment"), counts=not apart)
    engine = BareEngine(folder / "sandboxes")
    store = await open_store(folder)
    moments.watch(engine, "create", "attach", "destroy", "observe")
    moments.watch(store, "insert_session", "set_phase", "end_session", "forget_session")
    moments.watch(store, "insert_warm", "set_ready", "forget_warm", "claim_warm")
    moments.watch(store, "insert_run", "set_command", "finish_run")
    warm = orders.get("warm")
    pool = PoolSettings(min=warm, max=warm) if warm else None
    service = Service(engine, store, pool=pool, environments=FileEnvironments(folder / "environments"))
    await service.recover()
    if "collect" in orders:
        await collect_and_die(service, engine, moments, orders["collect"])
    if "hosts" in orders:
        await change_hosts(service, engine, store, moments)
    if "lasting" in orders:
        await stop_and_start(service, engine, store, moments)
    if "family" in orders:
        await raise_family(service, engine, store, moments)
    if apart:
        tell("through", steps=moments.steps)
        os._exit(0)
    service.keep_up(0.05)
    if "seed" in orders:
        await live_wildly(service, orders["seed"])
    elif warm:
        await live_ahead(service)
    else:
        await live_once(service)
    tell("through", steps=moments.steps)
    await service.close()
    await engine.close()
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.stdin.read())))

"""A mixed load on one gateway: sessions that are created, used and destroyed, with commands, commands in the background
and files. It keeps a record of what the gateway has confirmed, and checks it.

A call may fail while parts are killed, with an error that says so; what was confirmed may not be lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from sandbox_client import AsyncSandboxClient, Conflict, InternalError, NotFound, SandboxError

T = TypeVar("T")

RUNTIMES: Final = ("native", "gvisor")
STEPS: Final = 4
COUNT: Final = f"for i in $(seq {STEPS}); do echo $i; sleep 1; done; echo end"
COUNTED: Final = [*map(str, range(1, STEPS + 1)), "end"]
PATIENCE: Final = 150.0  # seconds in which a call has to succeed again
PAUSE: Final = 0.2
KEPT: Final = 2  # sessions of each worker that live to the end


class Lost(AssertionError):
    """Something that the gateway had confirmed is not there any more."""


@dataclass(slots=True)
class Kept:
    """A session that was created, and what has to be in it."""

    session: str
    note: str
    runs: list[str] = field(default_factory=list)  # in the background


@dataclass(slots=True)
class Load:
    client: AsyncSandboxClient
    name: str
    calls: int = 0  # that have succeeded
    refused: dict[str, int] = field(default_factory=dict)  # errors, by code
    kept: list[Kept] = field(default_factory=list)
    unconfirmed: set[str] = field(default_factory=set)  # sessions whose creation or end was not answered
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def work(self, number: int) -> None:
        """Until `ended`; then it stops at the end of its round."""
        rounds, kept = 0, list[Kept]()
        while not self.ended.is_set():
            one = await self.make(RUNTIMES[(number + rounds) % len(RUNTIMES)])
            await self.use(one)
            if rounds % 2 == 0 and len(kept) < KEPT:
                kept.append(one)
                self.kept.append(one)
            else:
                await self.check(one)
                await self.destroy(one.session)
            for each in kept:
                await self.read(each)
            rounds += 1

    async def make(self, runtime: str) -> Kept:
        """A session has a name from us, so that one whose creation was not answered is known."""

        async def create() -> str:
            name = f"{self.name}-{secrets.token_hex(4)}"
            self.unconfirmed.add(name)
            await self.client.create_session(runtime, session_id=name)
            self.unconfirmed.discard(name)
            return name

        return Kept(await self.insist(create), secrets.token_hex(8))

    async def use(self, one: Kept) -> None:
        result = await self.insist(lambda: self.client.exec(one.session, "echo $((6 * 7))"), one.session)
        assert (result.exit_code, result.stdout) == (0, "42\n"), result
        await self.insist(lambda: self.client.write_file(one.session, "note", one.note), one.session)
        run = await self.insist(lambda: self.client.start(one.session, COUNT), one.session)
        one.runs.append(run.run_id)
        await self.read(one)

    async def read(self, one: Kept) -> None:
        found = await self.insist(lambda: self.client.read_file(one.session, "note"), one.session)
        if found != one.note:
            raise Lost(f"the file of {one.session}: {found!r}")

    async def check(self, one: Kept) -> None:
        """Its file and all output of its commands in the background are there."""
        await self.read(one)
        for run in one.runs:
            while (result := await self.insist(lambda run=run: self.client.poll(run), one.session)).status == "running":  # type: ignore[misc]
                await asyncio.sleep(PAUSE)
            if (result.status, result.exit_code, result.stdout.split()) != ("completed", 0, COUNTED):
                raise Lost(f"a command in the background of {one.session}: {result}")

    async def destroy(self, session: str) -> None:
        async def end() -> None:
            try:
                await self.client.destroy_session(session)
            except (NotFound, Conflict):  # an earlier attempt has done it, or is doing it
                if session not in self.unconfirmed:
                    raise
            except SandboxError:
                self.unconfirmed.add(session)
                raise

        await self.insist(end)
        self.unconfirmed.discard(session)

    async def insist(self, call: Callable[[], Awaitable[T]], session: str = "") -> T:
        """Calls again what has failed: all of it may be done twice. `session`: one that must be there."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    answer = await call()
                except SandboxError as error:
                    self.judge(error, session)
                    await asyncio.sleep(PAUSE)
                else:
                    self.calls += 1
                    return answer

    def judge(self, error: SandboxError, session: str = "") -> None:
        self.refused[error.code] = self.refused.get(error.code, 0) + 1
        if isinstance(error, InternalError) or not error.code or not error.hint:
            raise AssertionError(f"an error that explains nothing: {error!r} {error.detail}") from error
        if session and error.code in ("session_not_found", "session_destroying", "run_not_found"):
            raise Lost(f"{session}: {error} {error.detail}") from error


async def wait_for_calls(loads: list[Load], number: int) -> None:
    """Until each load has succeeded so many times more: it is under way, and nothing is stuck."""
    goals = [(load, load.calls + number) for load in loads]
    async with asyncio.timeout(PATIENCE):
        while any(load.calls < goal for load, goal in goals):
            await asyncio.sleep(0.05)

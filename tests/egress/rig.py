"""Sandboxes behind the small internet, and what tests ask of them."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Unpack

from k8e.engine import EngineError, Refusal, Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.engine.local.vm.runtime import USUAL_VMS, VmOptions
from k8e.link import AgentLink
from k8e.link.model import ExecOptions
from k8e.policy import HostList
from tests.egress.internet import NAME_SERVER, Internet
from tests.engine.rig import LIMITS, Room
from tests.runtimes import do_without

INSIDE = (Path(__file__).parent / "inside.py").read_text()
ENGINE_NAMESERVERS = (ip_address(NAME_SERVER),)

Attempt = Sequence[object]


@dataclass(frozen=True, slots=True)
class Cell:
    """A sandbox and its list."""

    site: Site
    room: Room

    async def attempt(self, *attempts: Attempt, **options: Unpack[ExecOptions]) -> list[Any]:
        """The result of each: what it got, or the name of the error as `!NAME`."""
        done = await self.room.python(INSIDE, json.dumps(attempts), **options)
        assert done.outcome.exit_code == 0, done
        return ["!" + each["error"] if "error" in each else each["ok"] for each in json.loads(done.stdout)]

    async def reached(self, *attempts: Attempt, **options: Unpack[ExecOptions]) -> list[Any]:
        """The same, with only the address of a page."""
        results = await self.attempt(*attempts, **options)
        return [each["address"] if isinstance(each, dict) and "address" in each else each for each in results]

    async def set_hosts(self, *hosts: str) -> None:
        await self.site.engine.set_egress(self.room.name, HostList.parse(hosts))

    async def refusals(self) -> Sequence[Refusal]:
        return list((await self.site.engine.observe(self.room.name)).refusals)

    async def refused_names(self) -> dict[str, str]:
        """Why, by name."""
        return {each.host: each.reason for each in await self.refusals() if not each.port}

    async def refused_addresses(self) -> dict[tuple[str, int], str]:
        return {(each.address, each.port): each.reason for each in await self.refusals() if each.port}


@dataclass(slots=True)
class Site:
    """An engine on a machine whose uplink is the small internet."""

    internet: Internet
    engine: LocalEngine
    runtime: Runtime
    virtual: VmOptions

    @contextlib.asynccontextmanager
    async def cell(self, *hosts: str, image: str = "host") -> AsyncIterator[Cell]:
        name = f"e{secrets.token_hex(4)}"
        try:
            await self.engine.create(name, SandboxSpec(self.runtime, image, LIMITS, egress=HostList.parse(hosts)))
        except EngineError as error:
            if error.control == f"runtime {self.runtime.value}":
                do_without(self.runtime.value, error.cause)
            raise
        try:
            yield await self.enter(name)
        finally:
            await self.engine.destroy(name)

    async def enter(self, name: str) -> Cell:
        link, place = await self.engine.attach(name)
        assert isinstance(link, AgentLink)
        return Cell(self, Room(name, link, place, self.engine.layout.sandbox(name)))

    def make_engine(self) -> LocalEngine:
        """Another one for the same sandboxes, as a daemon that starts again."""
        return make_engine(self.engine.layout.state, self.engine.layout.run, self.virtual)


def make_engine(state: Path, run: Path, virtual: VmOptions = USUAL_VMS) -> LocalEngine:
    return LocalEngine(state, run, nameservers=ENGINE_NAMESERVERS, virtual=virtual)


@contextlib.asynccontextmanager
async def open_site(
    internet: Internet, runtime: Runtime, place: tuple[Path, Path], virtual: VmOptions = USUAL_VMS
) -> AsyncIterator[Site]:
    """In a state and a run directory, which may have been another site's before."""
    site = Site(internet, make_engine(*place, virtual), runtime, virtual)
    try:
        yield site
    finally:
        for name in await site.engine.list():
            await site.engine.destroy(name)
        await site.engine.close()

"""Takes the lease, renews it, and ends this process when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from lightkube.resources.coordination_v1 import Lease

from k8e.engine.kubernetes.api import Api, ApiError, ApiRefused, VersionGone
from k8e.replicas.lease import LIFE, PATIENCE, RENEWAL, Candidate, Sight, lease_name, make_lease

log = logging.getLogger("k8e.replicas")

LOST: Final = 75  # exit status of a leader that has lost the lease: the container is started again, as a candidate
_PAUSE: Final = 0.5
_REQUEST: Final = 1.5  # seconds for one renewal: several fit in before the holder gives up


class LeaseLost(ApiError):
    """This replica does not lead any more, so it changes nothing."""


class LeaseWatch:
    """The lease as all replicas see it: one watch, of one object."""

    def __init__(self, api: Api, gateway: str) -> None:
        self._api = api
        self._fields = f"metadata.name={lease_name(gateway)}"
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.sight: Sight | None = None
        self.known = False  # whether `sight` says anything

    def open(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def wait(self, seconds: float) -> None:
        """Returns when there is news, or after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def leader(self) -> str:
        """The address of a leader that serves, as soon as there is one."""
        while self.sight is None or not self.sight.address:
            await self._news.wait()
        return self.sight.address

    async def mcp_leader(self) -> str:
        """The same for MCP over HTTP."""
        while self.sight is None or not self.sight.mcp_address:
            await self._news.wait()
        return self.sight.mcp_address

    def put(self, sight: Sight | None) -> None:
        self.sight, self.known = sight, True
        self._news.set()
        self._news = asyncio.Event()

    async def _run(self) -> None:
        version = ""
        while True:
            try:
                if not version:
                    items, version = await self._api.list(Lease, fields=self._fields)
                    self.put(Sight.read(items[0]) if items else None)
                async with contextlib.aclosing(self._api.watch(Lease, version, fields=self._fields)) as events:
                    async for event, lease in events:
                        if lease.metadata is not None and lease.metadata.resourceVersion:
                            version = lease.metadata.resourceVersion
                        if event in ("ADDED", "MODIFIED"):
                            self.put(Sight.read(lease))
                        elif event == "DELETED":
                            self.put(None)
            except VersionGone:
                version = ""
            except ApiError as error:
                log.warning("lease_watch_lost cause=%s", error)
                await asyncio.sleep(_PAUSE)


def end_process() -> None:
    """At once: what it would still write is another leader's by now."""
    os._exit(LOST)


class Leadership:
    """One replica's part in the election. `api` is one without a guard, for the lease alone."""

    def __init__(
        self, api: Api, gateway: str, identity: str, watch: LeaseWatch, lose: Callable[[], None] = end_process
    ) -> None:
        self._api = api
        self._gateway = gateway
        self._identity = identity
        self._watch = watch
        self._lose = lose
        self._candidate = Candidate(identity)
        self._sight: Sight | None = None  # what this replica wrote last
        self._address = self._mcp_address = ""
        self._until = 0.0  # monotonic
        self._writing = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        self._ended = threading.Event()
        self.term = 0

    def guard(self) -> None:
        """Raises LeaseLost when this replica does not lead."""
        if time.monotonic() >= self._until:
            cause = "this gateway does not hold the lease"
            raise LeaseLost("lease", cause, "call again: another gateway takes over")

    async def acquire(self) -> int:
        """Waits until this replica leads, and returns its term. From now on it is renewed."""
        while not self._until:
            if not self._watch.known:
                await self._watch.wait(LIFE)
                continue
            sight = self._watch.sight
            seconds = self._candidate.wait(sight, time.monotonic())
            if seconds:
                await self._watch.wait(seconds)
                continue
            try:
                async with asyncio.timeout(_REQUEST):
                    await self._write(sight, term=(sight.term if sight else 0) + 1)
            except (ApiError, TimeoutError) as error:
                if not (isinstance(error, ApiRefused) and error.code in (404, 409)):  # else another one was faster
                    log.warning("lease_not_taken cause=%s", error)
                await self._watch.wait(_PAUSE)
        threading.Thread(target=self._guard_time, name="k8e-lease", daemon=True).start()
        self._renewing = asyncio.create_task(self._renew())
        log.info("leading term=%d identity=%s", self.term, self._identity)
        return self.term

    async def publish(self, address: str, mcp_address: str = "") -> None:
        """Tells the other replicas where this one serves. ApiError."""
        self._address, self._mcp_address = address, mcp_address
        await self._write(self._sight, term=self.term)

    async def release(self) -> None:
        """Gives the lease away, after the last change. The next leader need not wait."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        self._ended.set()
        if self._sight is None:
            return
        self._address = self._mcp_address = ""
        try:
            async with asyncio.timeout(_REQUEST):
                await self._write(self._sight, term=self.term, free=True)
        except (ApiError, TimeoutError) as error:
            log.warning("lease_not_released cause=%s", error)
        self._until = 0.0

    async def _write(self, before: Sight | None, *, term: int, free: bool = False) -> None:
        async with self._writing:
            began = time.monotonic()
            if self._sight is not None:
                before = self._sight  # of a write that was under way
            holder = "" if free else self._identity
            lease = make_lease(
                *(self._gateway, holder, before),
                term=term,
                address=self._address,
                mcp_address=self._mcp_address,
                now=time.time(),
            )
            written = await (self._api.create(lease) if before is None else self._api.replace(lease))
            self._sight, self.term = Sight.read(written), term
            self._until = began + PATIENCE
            self._watch.put(self._sight)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL if time.monotonic() < self._until - PATIENCE + RENEWAL else _PAUSE)
            try:
                async with asyncio.timeout(_REQUEST):
                    await self._write(self._sight, term=self.term)
            except ApiRefused as refused:
                if refused.code in (404, 409) and not await self._is_mine():
                    log.error("lease_lost cause=%s", refused)
                    self._lose()
                    return
            except (ApiError, TimeoutError) as error:
                log.warning("lease_not_renewed cause=%s", error)

    async def _is_mine(self) -> bool:
        """Looks at the lease after a conflict: a renewal whose answer was lost, or a person, may have changed it."""
        try:
            found = await self._api.get(Lease, lease_name(self._gateway))
        except ApiError:
            return True  # not known: the time decides
        if found is None:
            return False
        sight = Sight.read(found)
        if sight.holder != self._identity or sight.term != self.term:
            return False
        self._sight = sight
        return True

    def _guard_time(self) -> None:
        """In a thread of its own, because the loop may be what does not go on."""
        while not self._ended.wait(max(0.01, self._until - time.monotonic())):
            if time.monotonic() >= self._until:
                self._lose()
                return

"""The engine's knowledge of its objects: one watch for all of a kind, from which callers that wait for one are told.

`ObjectTable` is pure: objects by name, and rules for what is news. `ObjectWatch` feeds it: a list, then a watch from
the list's version on, again from the last version seen when the connection ends, and a new list when that version is
too old. Nothing is asked for periodically.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes.agent_sandbox import SandboxClaim
from k8e.engine.kubernetes.api import Api, ApiError, VersionGone

log = logging.getLogger("k8e.engine.kubernetes")


R = TypeVar("R")
T = TypeVar("T", Pod, SandboxClaim)

_LATE: Final = 1000  # objects that are gone, of which a late word may still come
_PAUSES: Final = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between attempts to reach a server that is away


def version_of(one: Pod | SandboxClaim) -> int:
    """Versions can be compared since Kubernetes 1.35; before, they were numbers of etcd all the same."""
    text = one.metadata.resourceVersion if one.metadata is not None else None
    return int(text) if text and text.isdecimal() else 0


class ObjectTable(Generic[T]):
    """The newest state of each object. Callers hear of what is news only: an answer to a request may be newer than what
    the watch tells next."""

    def __init__(self) -> None:
        self._objects: dict[str, T] = {}
        self._removed: dict[str, str] = {}  # name to uid: a late word about it is no news

    @property
    def objects(self) -> Mapping[str, T]:
        return self._objects

    def put(self, one: T) -> bool:
        meta = one.metadata
        assert meta is not None
        assert meta.name is not None
        known = self._objects.get(meta.name)
        if self._removed.get(meta.name) == meta.uid:
            return False
        if known is not None and version_of(known) >= version_of(one):
            return False
        meta.managedFields = None  # more than half of an object's memory, and of no use here
        self._objects[meta.name] = one
        self._removed.pop(meta.name, None)
        return True

    def remove(self, name: str, uid: str) -> bool:
        """Forgets that one. Another of its name stays."""
        known = self._objects.get(name)
        if known is None or known.metadata is None or known.metadata.uid != uid:
            return False
        del self._objects[name]
        self._removed[name] = uid
        if len(self._removed) > _LATE:
            del self._removed[next(iter(self._removed))]  # the oldest: a gateway that runs for long forgets it
        return True

    def apply(self, event: str, one: T) -> str:
        """Takes an event of a watch; returns the name of the object that it is news about, or nothing."""
        assert one.metadata is not None
        name, uid = one.metadata.name or "", one.metadata.uid or ""
        if event == "DELETED":
            return name if self.remove(name, uid) else ""
        if event in ("ADDED", "MODIFIED"):
            return name if self.put(one) else ""
        return ""

    def replace(self, objects: Iterable[T], version: int = 0) -> set[str]:
        """Takes a whole list, of that version; returns the names that it is news about. An object that was put since is
        not missing."""
        listed = {one.metadata.name: one for one in objects if one.metadata is not None and one.metadata.name}
        missing = [
            (name, one.metadata.uid or "")
            for name, one in self._objects.items()
            if name not in listed and one.metadata is not None and (not version or version_of(one) <= version)
        ]
        changed = {name for name, uid in missing if self.remove(name, uid)}
        self._removed.clear()
        return changed | {name for name, one in listed.items() if self.put(one)}


class ObjectWatch(Generic[T]):
    def __init__(self, api: Api, kind: type[T], selector: str, fields: str = "") -> None:
        self._api = api
        self._kind: type[T] = kind
        self._selector = selector
        self._fields = fields
        self._table: ObjectTable[T] = ObjectTable()
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._synced = asyncio.Event()
        self._failure: ApiError | None = None
        self._attempted = asyncio.Event()

    async def ready(self) -> None:
        """Returns when all objects are known. ApiError when the server cannot be asked now."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        if self._synced.is_set():
            return
        await self._attempted.wait()
        if not self._synced.is_set():
            assert self._failure is not None
            raise self._failure

    @property
    def objects(self) -> Mapping[str, T]:
        return self._table.objects

    def find(self, name: str) -> T | None:
        return self._table.objects.get(name)

    def put(self, one: T) -> None:
        """Takes in what a request was answered."""
        assert one.metadata is not None
        if self._table.put(one):
            self._tell({one.metadata.name or ""})

    def forget(self, name: str, uid: str) -> None:
        """Takes in that it is gone."""
        if self._table.remove(name, uid):
            self._tell({name})

    async def wait(self, name: str, look: Callable[[T | None], R | None]) -> R:
        """Returns what `look` makes of the object as soon as that is something."""
        while True:
            found = look(self.find(name))
            if found is not None:
                return found
            async with self._news_of(name) as news:
                await news

    @contextlib.asynccontextmanager
    async def _news_of(self, name: str) -> AsyncIterator[asyncio.Future[None]]:
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, set()).add(news)
        try:
            yield news
        finally:
            waiting = self._waiting.get(name, set())
            waiting.discard(news)
            if not waiting:
                self._waiting.pop(name, None)

    def _tell(self, names: Iterable[str]) -> None:
        for name in names:
            for news in self._waiting.get(name, ()):
                if not news.done():
                    news.set_result(None)

    async def _run(self) -> None:
        version, failures = "", 0
        while True:
            try:
                if not version:
                    objects, version = await self._api.list(self._kind, self._selector, self._fields)
                    self._tell(self._table.replace(objects, int(version) if version.isdecimal() else 0))
                    self._synced.set()
                    self._attempted.set()
                watch = self._api.watch(self._kind, version, self._selector, self._fields)
                async with contextlib.aclosing(watch) as events:
                    async for event, one in events:
                        failures = 0
                        if one.metadata is not None and one.metadata.resourceVersion:
                            version = one.metadata.resourceVersion
                        if name := self._table.apply(event, one):
                            self._tell({name})
            except VersionGone:
                version = ""
            except ApiError as error:
                self._failure = error
                self._attempted.set()
                pause = _PAUSES[min(failures, len(_PAUSES) - 1)]
                failures += 1
                if failures == 1:
                    log.warning("watch_lost cause=%s", error)
                await asyncio.sleep(pause)
                if not self._synced.is_set():
                    self._attempted.clear()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._synced.clear()
        self._attempted.clear()

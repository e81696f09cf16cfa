"""The images of this machine's engine: puts the store, archives, registries and the builder together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import platform
import threading
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from k8e.damage import Damages
from k8e.engine import EngineError
from k8e.engine.images import Credentials, Image, Progress, Report
from k8e.engine.local.images.layers import refused
from k8e.engine.local.images.limits import USUAL, ImageLimits
from k8e.engine.local.images.puller import Puller, in_thread
from k8e.engine.local.images.store import Store
from k8e.engine.local.layout import Layout
from k8e.engine.reference import InvalidReference, parse_reference

T = TypeVar("T")

_DEADLINE = 7200.0  # for one pull, however slowly it comes


async def trust_system() -> str:
    """No certificates besides those that OpenSSL finds by itself."""
    return ""


class LocalImages:
    """Implements `engine.images.Images`."""

    def __init__(
        self,
        layout: Layout,
        *,
        trust: Callable[[], Awaitable[str]] = trust_system,
        limits: ImageLimits = USUAL,
        store: Store | None = None,
        damages: Damages | None = None,
    ) -> None:
        """`trust` gives more certificates that the machine trusts, in PEM."""
        self.store = store or Store(layout, damages=damages)
        self._layout = layout
        self._trust = trust
        self._limits = limits
        self._machine = platform.machine()
        self._puller = Puller(self.store, limits)
        self.store.restore()  # before the image of a sandbox is looked for
        self._cleaned: asyncio.Task[None] | None = None

    def refer(self, reference: str) -> str:
        return ""

    async def pull(self, reference: str, credentials: Credentials | None, report: Report) -> Image:
        from k8e.engine.local.images.registry import Registry, make_context

        try:
            wanted = parse_reference(reference)
        except InvalidReference as error:
            raise EngineError("image", str(error), reason="invalid") from error
        await self._clean()
        context = await asyncio.to_thread(make_context, await self._trust())
        with _writing():
            try:
                async with asyncio.timeout(_DEADLINE), Registry(wanted, credentials, context, self._limits) as registry:
                    return await self._puller.pull(registry, wanted, report)
            except TimeoutError as error:
                raise EngineError("image", f"it took more than {_DEADLINE:g} s", reason="unreachable") from error

    async def build_base(self, report: Report, packages: Sequence[str] = ()) -> Image:
        from k8e.engine.local.images import base

        await self._clean()
        with _writing():
            return await base.build_base(self.store, self._limits, report, packages or base.PACKAGES)

    async def add(self, archive: Path, report: Report) -> Image:
        from k8e.engine.local.images.archive import import_archive

        await self._clean()
        tell = self._teller("importing", report)
        return await self._work(
            lambda stop: import_archive(archive, self.store, self._machine, self._limits, stop, tell)
        )

    async def take(self, pieces: AsyncIterable[bytes], report: Report) -> Image:
        await self._clean()
        folder = contextlib.ExitStack()
        try:
            with _writing():
                path = folder.enter_context(self.store.scratch()) / "archive"
                with path.open("wb") as file:
                    size = 0
                    async for piece in pieces:
                        size += len(piece)
                        if size > self._limits.bytes:
                            raise refused(f"the archive has more than {self._limits.bytes} bytes")
                        await asyncio.to_thread(file.write, piece)
            return await self.add(path, report)
        finally:
            await asyncio.to_thread(folder.close)

    async def find(self, digest: str) -> Image | None:
        with _writing():
            return await asyncio.to_thread(self.store.find, digest)

    async def list(self) -> Sequence[Image]:
        with _writing():
            return await asyncio.to_thread(self.store.list)

    async def retain(self, digests: Collection[str]) -> int:
        await self._clean()
        try:
            return await asyncio.to_thread(self.store.retain, digests)
        except OSError as error:
            raise EngineError("image", f"cannot be removed: {error}") from error

    async def _clean(self) -> None:
        """Once, before anything is under way."""
        if self._cleaned is None:
            self._cleaned = asyncio.create_task(asyncio.to_thread(self.store.clean))
        try:
            await asyncio.shield(self._cleaned)
        except OSError as error:
            self._cleaned = None
            raise EngineError("image", f"the store cannot be used: {error}") from error

    async def _work(self, work: Callable[[threading.Event], T]) -> T:
        """In a thread, which is told to stop when the caller is cancelled, and waited for."""
        stop = threading.Event()
        with _writing():
            return await in_thread(lambda: work(stop), stop)

    def _teller(self, step: str, report: Report) -> Callable[[int, int], None]:
        """From a thread."""
        loop = asyncio.get_running_loop()

        def tell(done: int, total: int) -> None:
            loop.call_soon_threadsafe(report, Progress(step, done, total))

        return tell


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Explains what goes wrong with the files of the store."""
    try:
        yield
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Make room: `k8e image prune` removes what is not used." if full else ""
        raise EngineError(
            "image", f"the store cannot be written: {cause}", hint, "disk_full" if full else ""
        ) from error

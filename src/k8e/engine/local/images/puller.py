"""An image from a registry: its manifest for this machine, its configuration, and what is not here of its layers.

Layers are downloaded and unpacked side by side. A pull that wants a layer which another one is fetching waits for it,
and goes on where the other stops if it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from k8e.engine import EngineError
from k8e.engine.images import Image, Progress, Report
from k8e.engine.local.images import manifest as manifests
from k8e.engine.local.images.download import downloaded
from k8e.engine.local.images.layers import Cancelled, refused, unpack_file
from k8e.engine.local.images.limits import ImageLimits
from k8e.engine.local.images.manifest import Configuration, Descriptor, Manifest
from k8e.engine.local.images.registry import Registry
from k8e.engine.local.images.store import Store
from k8e.engine.reference import Reference
from k8e.engine.tasks import finish_in_thread

T = TypeVar("T")

_DOWNLOADS: Final = 4
_UNPACKERS: Final = 2
_PAUSE: Final = 0.1  # seconds between two reports
_DEPTH: Final = 4


class Tally:
    """The progress of all layers together."""

    def __init__(self, step: str, report: Report, total: int) -> None:
        self._step = step
        self._report = report
        self._total = total
        self._done: dict[str, int] = {}
        self._told = 0.0

    def tell(self, part: str, done: int) -> None:
        self._done[part] = done
        now = time.monotonic()
        if now - self._told >= _PAUSE or sum(self._done.values()) >= self._total:
            self._told = now
            self._report(Progress(self._step, sum(self._done.values()), self._total))


class Puller:
    """All pulls of one engine."""

    def __init__(self, store: Store, limits: ImageLimits) -> None:
        self._store = store
        self._limits = limits
        self._machine = platform.machine()
        self._unpacking = asyncio.Semaphore(_UNPACKERS)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def pull(self, registry: Registry, reference: Reference, report: Report) -> Image:
        report(Progress("resolving", 0, 0))
        manifest = await self._find_manifest(registry, reference)
        known = await asyncio.to_thread(self._store.claim, manifest.digest)
        if known is not None:
            return known
        content = await registry.small_blob(manifest.config)
        configuration = manifests.read_configuration(content, self._machine, self._limits)
        if len(configuration.diff_ids) != len(manifest.layers):
            raise refused("the manifest and the configuration do not agree about the layers")
        async with self._wanting(configuration.diff_ids):
            await self._get_layers(registry, manifest, configuration, report)
            report(Progress("finishing", 0, 0))
            return await asyncio.to_thread(self._store.keep_image, manifest.digest, configuration)

    async def _find_manifest(self, registry: Registry, reference: Reference) -> Manifest:
        wanted = reference.digest or reference.tag
        for _ in range(_DEPTH):
            digest, announced, content = await registry.manifest(wanted)
            value = manifests.parse_object(content, "manifest", self._limits)
            if manifests.find_type(value, announced) in manifests.MANIFEST_TYPES:
                return manifests.read_manifest(digest, value, self._limits)
            wanted = manifests.choose_platform(value, self._machine).digest
        raise refused("the image is an index in an index in an index")

    async def _get_layers(
        self, registry: Registry, manifest: Manifest, configuration: Configuration, report: Report
    ) -> None:
        wanted: dict[str, Descriptor] = dict(zip(configuration.diff_ids, manifest.layers, strict=True))
        missing = {diff_id: blob for diff_id, blob in wanted.items() if not self._store.has_layer(diff_id)}
        if sum(blob.size for blob in missing.values()) > self._limits.bytes:
            raise refused(f"the layers have more than {self._limits.bytes} bytes together")
        tally = Tally("downloading", report, sum(blob.size for blob in missing.values()))
        slots = asyncio.Semaphore(_DOWNLOADS)

        async def get(diff_id: str, blob: Descriptor) -> None:
            # Within one registry: no pull waits for another registry, which may be slow on purpose.
            layer, packed = f"{registry.host} {diff_id}", f"{registry.host} {blob.digest}"
            async with slots, self._alone(layer), self._alone(packed):
                if not self._store.has_layer(diff_id):
                    await self._get_layer(registry, diff_id, blob, lambda done: tally.tell(diff_id, done))
                tally.tell(diff_id, blob.size)

        try:
            async with asyncio.TaskGroup() as group:
                for diff_id, blob in missing.items():
                    group.create_task(get(diff_id, blob))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _get_layer(self, registry: Registry, diff_id: str, blob: Descriptor, tell: Callable[[int], None]) -> None:
        async with downloaded(registry, blob, self._store.partial, tell) as file, self._unpacking:
            stop = threading.Event()

            def work() -> None:
                with self._store.new_layer() as target:
                    made = unpack_file(file, blob.size, target, self._limits, stop, lambda _: None)
                    if made.diff_id != diff_id:
                        raise refused(f"the layer {blob.digest} is not the one that the configuration names")
                    self._store.keep_layer(target, made)

            await in_thread(work, stop)

    @contextlib.asynccontextmanager
    async def _wanting(self, diff_ids: Collection[str]) -> AsyncIterator[None]:
        """In a thread: the store may be busy removing."""
        stack = contextlib.ExitStack()
        try:
            await finish_in_thread(stack.enter_context, self._store.wanting(diff_ids))
            yield
        finally:
            await finish_in_thread(stack.close)

    @contextlib.asynccontextmanager
    async def _alone(self, what: str) -> AsyncIterator[None]:
        lock = self._locks.get(what)
        if lock is None:
            lock = self._locks[what] = asyncio.Lock()
        async with lock:
            yield


async def in_thread(work: Callable[[], T], stop: threading.Event) -> T:
    """Sets `stop` when the caller is cancelled, and waits for the thread's end."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise
    except Cancelled as error:
        raise EngineError("image", "it was cancelled") from error

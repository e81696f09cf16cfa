"""Images over HTTP, for `k8e image`. Long requests answer in frames: progress, and then the result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from k8e.core.contract import ImageService
from k8e.core.model import NamedImage
from k8e.doors.http import requests
from k8e.doors.http.answers import pick, show_image
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.frames import FrameKind
from k8e.doors.http.routes import BYTES, JSON, Route
from k8e.engine.images import Progress, Report
from k8e.profiles.text import to_json


class ImageHandlers:
    def __init__(self, images: ImageService) -> None:
        self._images = images

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", ("v1", "images"), self.list),
            Route("DELETE", ("v1", "images"), self.remove),
            Route("POST", ("v1", "images", "pull"), self.pull, (JSON,)),
            Route("POST", ("v1", "images", "import"), self.add, (BYTES,)),
            Route("POST", ("v1", "images", "base"), self.build_base, (JSON,)),
            Route("POST", ("v1", "images", "prune"), self.prune, (JSON,)),
        )

    async def list(self, exchange: Exchange, request: Request) -> None:
        (name,) = request.read_query(name="")
        images = await self._images.list(exchange.caller, name)
        await exchange.send_json(200, {"images": [show_image(image) for image in images]})

    async def pull(self, exchange: Exchange, request: Request) -> None:
        fields = await exchange.read_fields(request)
        name, tenant = fields.take_text("image"), fields.take_text("tenant_id")
        credentials = requests.read_credentials(fields.take_fields("credentials")) if "credentials" in fields else None
        fields.finish()
        await _follow(exchange, lambda report: self._images.pull(exchange.caller, name, credentials, report, tenant))

    async def add(self, exchange: Exchange, request: Request) -> None:
        name, tenant = request.read_query(name="", tenant_id="")
        pieces = exchange.read_pieces()
        await _follow(exchange, lambda report: self._images.add(exchange.caller, pieces, name, report, tenant))

    async def build_base(self, exchange: Exchange, request: Request) -> None:
        (await exchange.read_fields(request)).finish()
        await _follow(exchange, lambda report: self._images.build_base(exchange.caller, report))

    async def remove(self, exchange: Exchange, request: Request) -> None:
        name, tenant = request.read_query(name="", tenant_id="")
        freed = await self._images.remove(exchange.caller, name, tenant)
        await exchange.send_json(200, {"ok": True, "image": name, "freed": freed})

    async def prune(self, exchange: Exchange, request: Request) -> None:
        fields = await exchange.read_fields(request)
        unused_for, tenant = fields.take_number("unused_for", 0), fields.take_text("tenant_id")
        fields.finish()
        names, freed = await self._images.prune(exchange.caller, unused_for, tenant)
        await exchange.send_json(200, {"ok": True, "removed": list(names), "freed": freed})


async def _follow(exchange: Exchange, work: Callable[[Report], Awaitable[NamedImage]]) -> None:
    """Sends the latest progress only, as fast as the client reads, so that a slow client does not delay the work.
    Frames begin with the first progress: what is refused before has a status of its own."""
    latest: list[Progress] = []
    reported = asyncio.Event()

    def report(progress: Progress) -> None:
        latest[:] = [progress]
        reported.set()

    async def send(kind: FrameKind, data: bytes) -> None:
        if not exchange.status:
            await exchange.start_frames()
        await exchange.send_frame(kind, data)

    task = asyncio.ensure_future(work(report))
    task.add_done_callback(lambda _: reported.set())
    try:
        while not task.done():
            await reported.wait()
            reported.clear()
            if latest and not task.done():
                await send(FrameKind.PROGRESS, to_json(pick(latest.pop(), "step", "done", "total")))
    finally:
        task.cancel()
        await asyncio.wait({task})
    await send(FrameKind.RESULT, to_json(show_image(task.result())))
    await exchange.end_frames()

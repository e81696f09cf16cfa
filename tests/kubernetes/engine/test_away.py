"""The API server is away for a while: what runs goes on, what is asked for is refused with the reason, and afterwards
the engine knows what happened meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from k8e.engine import EngineError, Runtime
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine
from k8e.engine.kubernetes.names import object_name
from tests.kubernetes.engine.rig import Site, new_name, spec_of

SPEC = spec_of(Runtime.NATIVE)


class Detour:
    """A way to the API server that can be cut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._open |= {writer, far_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, far_writer))
                group.create_task(_copy(far_reader, writer))
        finally:
            self._open -= {writer, far_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


@contextlib.asynccontextmanager
async def open_detour(site: Site, folder: Path) -> AsyncIterator[tuple[Detour, KubernetesEngine]]:
    config = yaml.safe_load(site.kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    address = urlsplit(cluster["server"])
    detour = Detour(address.hostname or "", address.port or 443)
    await detour.open()
    del cluster["certificate-authority-data"]
    cluster |= {"server": f"https://127.0.0.1:{detour.port}", "insecure-skip-tls-verify": True}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    engine = KubernetesEngine(site.options, site.state / "gateway.pem", path)
    try:
        yield detour, engine
    finally:
        for name in await engine.list():
            await engine.destroy(name)
        await engine.close()
        await detour.cut()


async def says_well(engine: KubernetesEngine, name: str) -> bool:
    sandbox, place = await engine.attach(name)
    return await run_script(sandbox, place, "echo well") == (0, b"well\n", b"")


async def test_sandboxes_go_on_without_the_api_server(site: Site, tmp_path: Path) -> None:
    async with open_detour(site, tmp_path) as (detour, engine):
        one, other = new_name(), new_name()
        await engine.create(one, SPEC)
        await engine.create(other, SPEC)
        await detour.cut()
        assert await says_well(engine, one)
        assert (await engine.observe(one)).alive
        for call in (engine.create(new_name(), SPEC), engine.destroy(one), engine.list()):
            with pytest.raises(EngineError, match="Kubernetes API") as caught:
                await call
            assert caught.value.hint
        assert await says_well(engine, one)  # it was not half destroyed
        await asyncio.to_thread(site.kubectl, "delete", f"sandboxclaim/{object_name(other)}", "--cascade=foreground")
        await detour.open()
        async with asyncio.timeout(60):
            while (await engine.observe(other)).alive:
                await asyncio.sleep(0.05)
        assert await says_well(engine, one)
        name = new_name()
        await engine.create(name, SPEC)
        assert await says_well(engine, name)
        await engine.destroy(one)
        assert await engine.list() == [name]

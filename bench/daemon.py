"""A daemon of the bench's own, and a client that keeps its connections, as a program that calls all day would.

It runs as for any user: the real engine, its defaults, a network for each session, the Python that `k8e doctor --fix`
installs it with. What differs is where it keeps its state, and the settings that a measurement asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from bench.programs import daemon_path, find_daemon_python
from k8e.engine.local import LocalEngine

ROOT = Path(__file__).resolve().parent.parent
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refused(Exception):
    """The daemon answered with an error: the measurement means nothing."""


class Daemon:
    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.process = process
        self._idle: list[Connection] = []

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "k8e.sock"

    @property
    def environment(self) -> dict[str, str]:
        return environment_of(self.folder)

    async def call(self, method: str, target: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One exchange on a connection of its own."""
        reader, writer = self._idle.pop() if self._idle else await self.connect()
        writer.write(encode(method, target, body))
        head = await reader.readuntil(b"\r\n\r\n")
        status, size = int(head.split(b" ", 2)[1]), find_length(head)
        answer: dict[str, Any] = json.loads(await reader.readexactly(size))
        self._idle.append((reader, writer))
        if status >= 400:
            raise Refused(f"{method} {target}: {answer}")
        return answer

    async def connect(self) -> Connection:
        return await asyncio.open_unix_connection(os.fspath(self.socket), limit=8 << 20)

    async def create(self, runtime: str, **spec: Any) -> str:
        return str((await self.call("POST", "/v1/sessions", {"runtime": runtime, **spec}))["session_id"])

    async def run(self, session: str, code: str, language: str = "bash", **spec: Any) -> dict[str, Any]:
        body = {"code": code, "language": language, **spec}
        result = await self.call("POST", f"/v1/sessions/{session}/runs", body)
        if result["exit_code"] != 0:
            raise Refused(f"{code!r} ended with {result}")
        return result

    async def destroy(self, session: str) -> None:
        await self.call("DELETE", f"/v1/sessions/{session}")

    async def runtimes(self) -> list[str]:
        status = await self.call("GET", "/v1/status")
        return [report["runtime"] for report in status["runtimes"] if report["available"]]

    async def wait_warm(self, count: int) -> None:
        """Waits until the pool has as many warm sandboxes as it is set to have."""
        while int((await self.call("GET", "/v1/status"))["warm"]) < count:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.05)

    async def settle(self) -> None:
        """Waits until the daemon has next to nothing to do: what earlier requests have begun is done."""
        while True:
            before = read_cpu(self.process.pid)
            await asyncio.sleep(0.5)
            if read_cpu(self.process.pid) - before < 25:
                return

    async def wait_ended(self) -> None:
        """Waits until every session is destroyed."""
        while any(each["phase"] != "destroyed" for each in await self.sessions()):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.002)

    async def sessions(self) -> list[dict[str, Any]]:
        return list((await self.call("GET", "/v1/sessions?phase=all"))["sessions"])

    async def stop(self) -> None:
        with contextlib.suppress(Refused):
            for session in await self.sessions():
                if session["phase"] == "active":
                    await self.destroy(session["session_id"])
        for _, writer in self._idle:
            writer.close()
        self.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.process.wait)


def read_cpu(pid: int) -> float:
    """Milliseconds so far, of all its threads: by the clock that clock_getcpuclockid(3) gives, to the microsecond."""
    return time.clock_gettime((~pid << 3) | 2) * 1000


def encode(method: str, target: str, body: Mapping[str, Any] | None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    fields = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode() + content


def find_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise Refused(f"no length in {head!r}")


def environment_of(folder: Path) -> dict[str, str]:
    return os.environ | {
        "HOME": str(folder / "home"),
        "K8E_STATE_DIR": str(folder / "state"),
        "K8E_RUN_DIR": str(folder / "run"),
        "K8E_CONFIG": str(folder / "k8e.toml"),
    }


def start_daemon(folder: Path, settings: str) -> subprocess.Popen[bytes]:
    """Returns when it listens."""
    folder.mkdir(mode=0o711)
    (folder / "home").mkdir()
    (folder / "k8e.toml").write_text(settings)
    read, write = os.pipe()
    process = subprocess.Popen(
        [find_daemon_python(), "-P", "-m", "k8e.daemon", "--ready-fd", str(write)],
        env=environment_of(folder) | {"PYTHONPATH": daemon_path()},
        pass_fds=(write,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(write)
    with open(read, "rb") as ready:
        said = ready.read()
    if said != b"ready\n":
        process.kill()
        process.wait()
        raise Refused(f"the daemon did not start: {said!r}")
    return process


@contextlib.asynccontextmanager
async def serving(folder: Path, settings: str = "") -> AsyncIterator[Daemon]:
    """A daemon, until the end of the block; nothing of it stays."""
    daemon = Daemon(folder, await asyncio.to_thread(start_daemon, folder, settings))
    try:
        yield daemon
    finally:
        try:
            await daemon.stop()
        finally:
            if daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()
            await sweep(folder)


async def sweep(folder: Path) -> None:
    """Removes what a next daemon would take over: there is none."""
    engine = LocalEngine(folder / "state", folder / "run")
    for sandbox in await engine.list():
        await engine.destroy(sandbox)
    await engine.close()

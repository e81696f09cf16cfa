"""Runs the daemon: puts engine, store, core and doors together, serves, and shuts them down in order."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.handlers
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from k8e.daemon.paths import Paths, StartRefused, take_lock
from k8e.daemon.watchdog import Watchdog, tell_systemd
from k8e.damage import Damaged, Damages, check_own
from k8e.errors import ExplainedError

if TYPE_CHECKING:
    from k8e.engine import Engine
    from k8e.settings import Settings

GRACE = 10.0  # seconds for requests that are under way when the daemon stops
SUCCESSION = 20.0  # seconds to wait for a daemon that is still stopping

STDERR = 2
LOG_SIZE = 16 << 20  # of each of two files

log = logging.getLogger("k8e.daemon")

MakeEngine = Callable[[Paths, "Settings"], "Engine"]


def require_root() -> None:
    if os.geteuid() != 0:
        raise StartRefused(
            "needs_root",
            "the daemon needs root to make sandboxes",
            hint="`sudo k8e server`, or use the daemon that runs",
        )


def load_settings() -> Settings:
    from k8e.settings import load

    return load()


def make_local_engine(paths: Paths, settings: Settings) -> Engine:
    from k8e.engine import EngineError
    from k8e.engine.local import LocalEngine
    from k8e.engine.local.images.limits import ImageLimits
    from k8e.engine.local.network.addresses import Pool

    egress = settings.egress
    try:
        pool = Pool(egress.pool4, egress.pool6)
        most = settings.images
        limits = ImageLimits(bytes=most.layer_bytes, entries=most.layer_entries, ratio=most.ratio)
        return LocalEngine(
            paths.state_dir, paths.run_dir, pool=pool, nameservers=egress.nameservers, image_limits=limits
        )
    except EngineError as error:
        raise StartRefused(
            "engine_unusable", str(error), hint=error.hint or "`k8e doctor` says what does not work on this machine"
        ) from error


def run_daemon(
    make_engine: MakeEngine,
    *,
    announce: Callable[[], None],
    detached: bool = False,
) -> None:
    """Runs until a signal stops it. Raises StartRefused when it cannot start; calls `announce` when it listens."""
    require_root()
    paths = Paths.from_environment()
    settings = load_settings()
    os.umask(0o022)  # not that of the process that started the daemon: some files are for other users too
    raise_descriptor_limit()
    forbid_core_dumps()
    engine = make_engine(paths, settings)
    paths.prepare()
    # A directory, a link or another user's file in their place is damage: the daemon needs nothing in it.
    damages = Damages(paths.state_dir)
    for path in (paths.lock, paths.log):
        set_aside_strange(path, damages)
    # A client that found no socket may have started this daemon while another one was still stopping.
    lock = take_lock(paths.lock, SUCCESSION if detached else 0)
    handler = LogFile(paths.log, maxBytes=LOG_SIZE, backupCount=1) if detached else logging.StreamHandler()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", handlers=[handler])
    watchdog = Watchdog(handler.descriptor if isinstance(handler, LogFile) else STDERR)
    try:
        asyncio.run(serve(engine, paths, settings, announce, watchdog, detached=detached, damages=damages))
    finally:
        os.close(lock)


def set_aside_strange(path: Path, damages: Damages) -> None:
    try:
        check_own(path.lstat())
    except FileNotFoundError:
        pass
    except Damaged as error:
        damages.set_aside(path, error)


class LogFile(logging.handlers.RotatingFileHandler):
    """A log file that only the daemon's user can read. `descriptor` stays open and always refers to the newest file."""

    descriptor: int = -1  # until the first is open

    def _open(self) -> io.TextIOWrapper:
        def open_private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        stream = open(self.baseFilename, "a", encoding="utf-8", opener=open_private)  # noqa: SIM115 - the handler closes it
        if self.descriptor < 0:
            self.descriptor = os.dup(stream.fileno())
        else:
            os.dup2(stream.fileno(), self.descriptor, inheritable=False)
        return stream


async def serve(
    engine: Engine,
    paths: Paths,
    settings: Settings,
    announce: Callable[[], None],
    watchdog: Watchdog,
    *,
    detached: bool,
    damages: Damages,
) -> None:
    from k8e.core.access.keys import Keys
    from k8e.core.service import Service
    from k8e.core.store.store import Store
    from k8e.doors.connection_limits import ConnectionLimits
    from k8e.doors.grpc.gateway import Gateway
    from k8e.doors.http.handlers import list_handlers
    from k8e.doors.http.server import HttpServer, bind_socket
    from k8e.doors.mcp.endpoint import McpEndpoint
    from k8e.doors.request_memory import RequestMemory

    with watchdog:
        stop = watch_signals()
        store = await Store.open(paths.database)
        service = Service(
            *(engine, store),
            settings=settings,
            pool=settings.pool,
            audit_file=paths.audit,
            environments=paths.environments,
        )
        await service.recover()
        service.audit.note_damages(damages.take())
        service.keep_up()
        keys = Keys(paths.identity, audit=service.audit)
        connection_limits, memory = ConnectionLimits(), RequestMemory(settings.quotas.request_bytes)
        agents = McpEndpoint(service, keys, settings.gateway.names, connection_limits, memory)
        gateway = Gateway(service, keys, settings.gateway, agents, paths.run_dir, connection_limits, memory)
        handlers = list_handlers(service, service.warm, service.metrics.render, keys, gateway)
        door = HttpServer(service, (*handlers, agents), memory=memory)
        await door.open(bind_socket(paths.socket))
        log.info("ready socket=%s pid=%d", paths.socket, os.getpid())
        announce()
        # The gateway is opened at once under `k8e server`, or when there are API keys; else when a client asks for it.
        opening = asyncio.create_task(gateway.attempt()) if not detached or keys.in_use else None
        preparing = asyncio.create_task(agents.prepare())
        await stop.wait()
        log.info("stopping")
        service.begin_close()
        preparing.cancel()
        await agents.close(GRACE)
        if opening is not None:
            await opening
        # Its calls have longer than those of the socket: their runs end only in `service.close`, below.
        closing_gateway = asyncio.create_task(gateway.close(3 * GRACE))
        paths.socket.unlink(missing_ok=True)
        unfinished = await door.close(GRACE)
        # Ends the runs whose callers still wait, so that each caller gets an answer.
        await service.close()
        if unfinished:
            await door.close(GRACE)
        await closing_gateway
        await engine.close()
        await store.close()
        log.info("stopped")


def watch_signals() -> asyncio.Event:
    """Returns an event that the first signal sets. A second signal ends the process at once, which is always safe."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def receive(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, receive, number)
    return stop


def forbid_core_dumps() -> None:
    """Forbids core dumps of the daemon and its children: secrets of sessions are in its memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def raise_descriptor_limit() -> None:
    """Raises the limit of open files: each client and each sandbox needs one or two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def announce_to_systemd() -> None:
    tell_systemd(b"READY=1")


def run_in_foreground() -> None:
    run_daemon(make_local_engine, announce=announce_to_systemd)


def run_detached(ready: int, make_engine: MakeEngine = make_local_engine) -> int:
    """Runs the daemon; writes to the descriptor `ready` once whether it started. The starting process waits there."""
    os.set_inheritable(ready, False)
    started = False

    def announce() -> None:
        nonlocal started
        started = True
        os.write(ready, b"ready\n")
        os.close(ready)

    try:
        run_daemon(make_engine, announce=announce, detached=True)
    except ExplainedError as refused:
        if started:
            raise
        os.write(ready, json.dumps(refused.body).encode())
        return 1
    return 0

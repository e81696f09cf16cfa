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
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from k8e.daemon.collector import Collector
from k8e.daemon.paths import Paths, StartRefused, take_lock
from k8e.daemon.watchdog import Watchdog, tell_systemd
from k8e.damage import Damaged, Damages, check_own
from k8e.errors import ExplainedError

if TYPE_CHECKING:
    from k8e.core.access.accounts import Accounts
    from k8e.daemon.replica import Replica
    from k8e.doors.mcp.endpoint import McpEndpoint
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
            "the daemon needs root to make sandboxes of this machine",
            hint="`sudo k8e server`, or use the daemon that runs; `--engine kubernetes` needs no root",
        )


def load_settings() -> Settings:
    from k8e.settings import load

    return load()


def make_local_engine(paths: Paths, settings: Settings) -> Engine:
    from k8e.engine import EngineError
    from k8e.engine.local import LocalEngine
    from k8e.engine.local.images.limits import ImageLimits
    from k8e.engine.local.network.addresses import Pool
    from k8e.engine.local.vm.runtime import VmOptions

    if paths.gateway_key.exists():
        # Its sessions would be lost here: no sandbox of theirs is on this machine.
        raise StartRefused(
            "engine_unusable",
            f"the sessions of {paths.state_dir} are on Kubernetes",
            hint="`k8e server --engine kubernetes`, or let K8E_STATE_DIR name another directory. Of several gateways "
            "one leads, and only its socket answers; on servers of a cluster `k8e cluster status` names it",
        )
    egress = settings.egress
    try:
        pool = Pool(egress.pool4, egress.pool6)
        most = settings.images
        limits = ImageLimits(bytes=most.layer_bytes, entries=most.layer_entries, ratio=most.ratio)
        return LocalEngine(
            paths.state_dir,
            paths.run_dir,
            pool=pool,
            nameservers=egress.nameservers,
            image_limits=limits,
            virtual=VmOptions(emulation=settings.runtimes_kata.emulation),
        )
    except EngineError as error:
        raise StartRefused(
            "engine_unusable", str(error), hint=error.hint or "`k8e doctor` says what does not work on this machine"
        ) from error


def make_kubernetes_engine(paths: Paths, settings: Settings) -> Engine:
    from k8e.daemon.kubernetes import make_engine

    return make_engine(paths, settings.kubernetes)


def make_accounts(settings: Settings) -> Accounts:
    from k8e.daemon.kubernetes import make_accounts

    return make_accounts(settings.kubernetes)


ENGINES: dict[str, MakeEngine] = {"local": make_local_engine, "kubernetes": make_kubernetes_engine}


def run_daemon(
    make_engine: MakeEngine,
    *,
    announce: Callable[[], None],
    detached: bool = False,
    tenant_namespaces: bool = False,
) -> None:
    """Runs until a signal stops it. Raises StartRefused when it cannot start; calls `announce` when it listens."""
    if make_engine is make_local_engine:
        require_root()  # first: settings may be root's to read, too
    paths = Paths.from_environment()
    settings = load_settings()
    if tenant_namespaces:
        settings = replace(settings, kubernetes=replace(settings.kubernetes, tenant_namespaces=True))
    os.umask(0o022)  # not that of the process that started the daemon: some files are for other users too
    raise_descriptor_limit()
    forbid_core_dumps()
    Collector().begin()
    engine = make_engine(paths, settings)
    several = make_engine is make_kubernetes_engine and bool(settings.kubernetes.peers)
    accounts = make_accounts(settings) if make_engine is make_kubernetes_engine else None
    paths.prepare()
    # A directory, a link or another user's file in their place is damage: the daemon needs nothing in it.
    damages = Damages(paths.state_dir)
    for path in (paths.lock, paths.log):
        set_aside_strange(path, damages)
    # A client that found no socket may have started this daemon while another one was still stopping.
    lock = take_lock(paths.lock, SUCCESSION if detached else 0)
    handler = LogFile(paths.log, maxBytes=LOG_SIZE, backupCount=1) if detached else logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # Of each record only what the format shows: every command logs two.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # noqa: SLF001 - as the documentation of logging says
    watchdog = Watchdog(handler.descriptor if isinstance(handler, LogFile) else STDERR)
    try:
        parts = (engine, paths, settings, announce, watchdog)
        asyncio.run(serve(*parts, detached=detached, damages=damages, several=several, accounts=accounts))
    finally:
        os.close(lock)


def set_aside_strange(path: Path, damages: Damages) -> None:
    try:
        check_own(path.lstat())
    except FileNotFoundError:
        pass
    except Damaged as error:
        damages.set_aside(path, error)


class LineFormatter(logging.Formatter):
    """Formats a time's date and seconds once, for all records of that second."""

    _second = -1
    _text = ""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.stack_info:
            return super().format(record)
        return f"{self.formatTime(record)} {record.levelname} {record.name} {record.getMessage()}"

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._text = time.strftime(self.default_time_format, self.converter(record.created))
        return f"{self._text},{int(record.msecs):03d}"


class LogFile(logging.handlers.RotatingFileHandler):
    """A log file that only the daemon's user can read. `descriptor` stays open and always refers to the newest file."""

    descriptor: int = -1  # until the first is open
    _size = 0

    def _open(self) -> io.TextIOWrapper:
        def open_private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        stream = open(self.baseFilename, "a", encoding="utf-8", opener=open_private)  # noqa: SIM115 - the handler closes it
        if self.descriptor < 0:
            self.descriptor = os.dup(stream.fileno())
        else:
            os.dup2(stream.fileno(), self.descriptor, inheritable=False)
        self._size = os.fstat(self.descriptor).st_size
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line, with one system call: every command waits for it."""
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
            if self._size + len(line) > self.maxBytes:
                self.doRollover()
            self._size += os.write(self.descriptor, line)
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)


async def serve(
    engine: Engine,
    paths: Paths,
    settings: Settings,
    announce: Callable[[], None],
    watchdog: Watchdog,
    *,
    detached: bool,
    damages: Damages,
    several: bool = False,
    accounts: Accounts | None = None,
) -> None:
    """`several`: this daemon is one of several gateways of a cluster, and does the rest when it leads. `accounts`: of
    the cluster, whose tokens are taken."""
    from k8e.core.access.keys import Keys
    from k8e.core.service import Service
    from k8e.core.store.environments import FileEnvironments
    from k8e.core.store.store import Store
    from k8e.doors.connection_limits import ConnectionLimits
    from k8e.doors.grpc.gateway import Gateway
    from k8e.doors.http.handlers import list_handlers
    from k8e.doors.http.metrics import MetricsServer
    from k8e.doors.http.server import HttpServer, bind_socket
    from k8e.doors.mcp.endpoint import McpEndpoint
    from k8e.doors.request_memory import RequestMemory

    with watchdog:
        stop = watch_signals()
        replica = await open_replica(engine, paths, settings) if several else None
        if replica is not None:
            announce()
            if not await replica.lead(stop):
                await replica.close()
                await engine.close()
                return
        store = await (replica.load() if replica is not None else Store.open(paths.database))
        service = Service(
            *(engine, store),
            settings=settings,
            pool=settings.pool,
            audit_file=paths.audit,
            environments=FileEnvironments(paths.environments) if replica is None else replica.environments,
        )
        await service.recover()
        service.audit.note_damages(damages.take())
        service.keep_up()
        keep = replica.keep_keys if replica is not None else None
        keys = Keys(paths.identity, audit=service.audit, keep=keep, accounts=accounts)
        connection_limits, memory = ConnectionLimits(), RequestMemory(settings.quotas.request_bytes)
        agents = McpEndpoint(service, keys, settings.gateway.names, connection_limits, memory, succeeded=several)
        gateway_settings = settings.gateway if replica is None else replica.gateway_settings
        gateway = Gateway(service, keys, gateway_settings, agents, paths.run_dir, connection_limits, memory)
        handlers = list_handlers(service, service.warm, service.metrics.render, keys, gateway)
        door = HttpServer(service, (*handlers, agents), memory=memory)
        await door.open(bind_socket(paths.socket))
        metrics = MetricsServer(service.metrics.render)
        if settings.gateway.metrics:
            metrics.open(settings.gateway.metrics)
        log.info("ready socket=%s pid=%d", paths.socket, os.getpid())
        mcp = settings.gateway.mcp if replica is None else replica.mcp_peers
        mcp_port = await open_mcp(agents, mcp) if mcp else 0
        if replica is None:
            announce()
        else:
            await replica.serve(await gateway.endpoint(), mcp_port)
        # The gateway is opened at once under `k8e server`, or when there are API keys; else when a client asks for it.
        opening = asyncio.create_task(gateway.attempt()) if not detached or keys.in_use else None
        preparing = asyncio.create_task(agents.prepare())
        await stop.wait()
        log.info("stopping")
        service.begin_close()
        preparing.cancel()
        await metrics.close()
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
        if accounts is not None:
            await accounts.close()
        await engine.close()
        await store.close()
        if replica is not None:
            await replica.close()
        log.info("stopped")


async def open_replica(engine: Engine, paths: Paths, settings: Settings) -> Replica:
    from k8e.daemon.replica import Replica
    from k8e.engine.kubernetes import KubernetesEngine

    assert isinstance(engine, KubernetesEngine)
    replica = Replica(engine, paths, settings)
    replica.open()
    return replica


async def open_mcp(agents: McpEndpoint, address: str) -> int:
    try:
        return await agents.open(address)
    except OSError as error:
        hint = "Is the port taken? [gateway] mcp in k8e.toml names it; of several gateways [kubernetes] mcp_peers."
        error_text = f"the gateway cannot listen on {address}"
        raise StartRefused("gateway_closed", error_text, detail=str(error), hint=hint) from error


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


def run_in_foreground(engine: str = "local", *, tenant_namespaces: bool = False) -> None:
    if tenant_namespaces and engine != "kubernetes":
        error = "--tenant-namespaces is for sandboxes on Kubernetes"
        raise StartRefused("engine_unusable", error, hint="k8e server --engine kubernetes --tenant-namespaces")
    run_daemon(ENGINES[engine], announce=announce_to_systemd, tenant_namespaces=tenant_namespaces)


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

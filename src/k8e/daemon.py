"""The daemon: the one process that owns a machine's sandboxes, and the only place where all rooms meet.

`k8e server` runs it in the foreground; `python -m k8e.daemon --ready-fd N` is how the command line starts it on demand.
It can be killed at any moment: sandboxes live on, and the next daemon goes on with them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import io
import json
import logging
import logging.handlers
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from k8e.engine import Engine
    from k8e.engine.local import treatment
    from k8e.settings import Settings

GRACE = 10.0  # for requests that are under way when we are told to stop
SUCCESSION = 20.0  # for a daemon that is stopping to be gone

LOG_SIZE = 16 << 20  # of each of two files

log = logging.getLogger("k8e.daemon")

MakeEngine = Callable[["Paths", "Settings"], "Engine"]


class Refused(Exception):
    """The daemon does not start; the body says why, as every error of ours does."""

    def __init__(self, code: str, error: str, *, detail: str = "", hint: str = "") -> None:
        self.body = {"error": error, "detail": detail, "code": code, "hint": hint}
        super().__init__(f"{code}: {error}")


@dataclass(frozen=True, slots=True)
class Paths:
    state_dir: Path
    run_dir: Path

    @classmethod
    def from_environment(cls) -> Self:
        return cls(
            Path(os.environ.get("K8E_STATE_DIR") or "/var/lib/k8e").absolute(),
            Path(os.environ.get("K8E_RUN_DIR") or "/run/k8e").absolute(),
        )

    @property
    def socket(self) -> Path:
        return self.run_dir / "k8e.sock"

    @property
    def lock(self) -> Path:
        return self.run_dir / "k8e.lock"

    @property
    def log(self) -> Path:
        return self.state_dir / "daemon.log"

    @property
    def audit(self) -> Path:
        return self.state_dir / "audit.log"

    @property
    def environments(self) -> Path:
        return self.state_dir / "environments"

    @property
    def database(self) -> Path:
        return self.state_dir / "k8e.db"

    @property
    def identity(self) -> Path:
        return self.state_dir / "identity"

    def prepare(self) -> None:
        """Others may walk through and see nothing: to the socket, which has its own mode, and, as the users that native
        sandboxes have, to those sandboxes' disks."""
        make_directory(self.state_dir, 0o711)
        make_directory(self.run_dir, 0o711)


def make_directory(path: Path, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode, exist_ok=True)
        found = path.lstat()
        trustworthy = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if trustworthy:
            path.chmod(mode)  # whatever the umask was
    except OSError as error:
        raise Refused("directory_unusable", f"{path} cannot be made or used", detail=str(error)) from error
    if not trustworthy:
        raise Refused(
            "directory_untrusted",
            f"{path} could be changed by somebody else",
            detail="it is no directory, or not ours, or writable for others",
            hint=f"remove it, or make it a directory of uid {os.geteuid()} that nobody else can write",
        )


def take_lock(path: Path, patience: float) -> int:
    """The descriptor that holds it: one daemon per directory, however it was started. The kernel lets go for us."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def give_up(number: int, frame: object) -> None:
        raise BlockingIOError

    previous = signal.signal(signal.SIGALRM, give_up)
    try:
        if patience:
            signal.setitimer(signal.ITIMER_REAL, patience)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if patience else fcntl.LOCK_NB))
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise Refused(
            "already_running",
            "another k8e daemon is running here",
            detail=f"pid {holder or 'unknown'} holds {path}",
            hint="use that one, or stop it first; K8E_RUN_DIR and K8E_STATE_DIR make room for a second one",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    return descriptor


def require_root() -> None:
    if os.geteuid() != 0:
        raise Refused(
            "needs_root",
            "the daemon needs root to make sandboxes",
            hint="`sudo k8e server`, or use the daemon that runs",
        )


def load_settings() -> Settings:
    from k8e.settings import SettingsError, load

    try:
        return load()
    except SettingsError as error:
        raise Refused(error.code, error.error, detail=error.detail, hint=error.hint) from error


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
        raise Refused("engine_unusable", str(error), hint=error.hint) from error


def run_daemon(
    make_engine: MakeEngine,
    *,
    announce: Callable[[], None],
    detached: bool = False,
) -> None:
    """Until it is told to stop. Raises Refused when it cannot begin; `announce` is called when it listens."""
    require_root()
    paths = Paths.from_environment()
    settings = load_settings()
    os.umask(0o022)  # whoever started us may have another, and what we make is made for other users too
    raise_descriptor_limit()
    engine = make_engine(paths, settings)
    paths.prepare()
    # Whoever starts us because there is no socket may have come upon a daemon that is just leaving.
    lock = take_lock(paths.lock, SUCCESSION if detached else 0)
    handler = LogFile(paths.log, maxBytes=LOG_SIZE, backupCount=1) if detached else logging.StreamHandler()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", handlers=[handler])
    try:
        asyncio.run(serve(engine, paths, settings, announce, detached=detached))
    finally:
        os.close(lock)


class LogFile(logging.handlers.RotatingFileHandler):
    """Which only we can read."""

    def _open(self) -> io.TextIOWrapper:
        def open_private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, "a", encoding="utf-8", opener=open_private)


async def serve(
    engine: Engine, paths: Paths, settings: Settings, announce: Callable[[], None], *, detached: bool
) -> None:
    from k8e.core.errors import Fault
    from k8e.core.keys import Keys
    from k8e.core.service import Service
    from k8e.core.store import Store
    from k8e.doors.approvals import Approvals
    from k8e.doors.grpc.opening import Opening
    from k8e.doors.http import HttpDoor
    from k8e.doors.identities import Identities
    from k8e.doors.images import Images
    from k8e.doors.listener import bind_socket
    from k8e.doors.mcp.opening import Opening as Agents
    from k8e.doors.routes import Routes
    from k8e.doors.warm import Warm

    stop = heed_signals()
    try:
        store = await Store.open(paths.database)
        service = Service(
            *(engine, store),
            settings=settings,
            pool=settings.pool,
            audit_file=paths.audit,
            environments=paths.environments,
        )
        await service.recover()
    except Fault as fault:
        raise Refused(fault.code, fault.error, detail=fault.detail, hint=fault.hint) from fault
    service.keep_up()
    keys = Keys(paths.identity, audit=service.audit)
    agents = Agents(service, keys, settings.gateway.names)
    gateway = Opening(service, keys, settings.gateway, agents)
    others = (Identities(keys, gateway), agents, Approvals(service), Images(service), Warm(service, service))
    door = HttpDoor(Routes(service, service.metrics.render, *others, gateway=gateway))
    await door.open(bind_socket(paths.socket))
    log.info("ready socket=%s pid=%d", paths.socket, os.getpid())
    announce()
    # Whoever started us by hand wants it, and so does whoever has a key; anybody else asks for it when they need it.
    opening = asyncio.create_task(gateway.attempt()) if not detached or keys.in_use else None
    preparing = asyncio.create_task(agents.prepare())
    await stop.wait()
    log.info("stopping")
    preparing.cancel()
    await agents.close(GRACE)
    if opening is not None:
        await opening
    closing_gateway = asyncio.create_task(gateway.close(GRACE))
    paths.socket.unlink(missing_ok=True)
    unfinished = await door.close(GRACE)
    # Ends what is still waited for, so that whoever waits is told.
    await service.close()
    if unfinished:
        await door.close(GRACE)
    await closing_gateway
    await engine.close()
    await store.close()
    log.info("stopped")


def heed_signals() -> asyncio.Event:
    """Set when we are told to stop. Told a second time, we go at once: that is always safe."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heed(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, heed, number)
    return stop


def raise_descriptor_limit() -> None:
    """A descriptor or two for each client and sandbox: the usual 1024 are soon used up."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def notify_systemd() -> None:
    """That we are ready, when it is systemd that started us."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)) as notifier:
            notifier.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)


def run_in_foreground() -> None:
    run_daemon(make_local_engine, announce=notify_systemd)


def run_detached(ready: int, make_engine: MakeEngine = make_local_engine) -> int:
    """Says on that descriptor how it went, once; whoever started us waits there."""
    os.set_inheritable(ready, False)

    def announce() -> None:
        os.write(ready, b"ready\n")
        os.close(ready)

    try:
        run_daemon(make_engine, announce=announce, detached=True)
    except Refused as refused:
        os.write(ready, json.dumps(refused.body).encode())
        return 1
    return 0


def run_doctor(*, as_json: bool, fix: bool = False) -> int:
    """1 when the default would not be safe. Works beside a daemon, and without one."""
    from k8e.engine import EngineError
    from k8e.engine.local import doctor, treatment
    from k8e.settings.file import USUAL, find_file

    file = find_file()
    load_settings()  # a daemon would not start with a broken file, and so there is nothing to examine
    steps: list[treatment.Step] = []
    try:
        if fix:
            steps = asyncio.run(put_right())
            if not as_json:
                sys.stdout.write(treatment.render(steps))
                sys.stdout.flush()
        report = asyncio.run(doctor.examine_machine())
    except EngineError as error:
        raise Refused("doctor_failed", str(error), hint=error.hint) from error
    if as_json:
        put = {"fixed": [dataclasses.asdict(step) for step in steps]} if fix else {}
        sys.stdout.write(json.dumps({"settings": file and str(file), **put, **report.as_dict()}) + "\n")
    else:
        sys.stdout.write(f"settings: {file or f'defaults, as there is no {USUAL}'}\n\n")
        sys.stdout.write(doctor.render(report))
    sys.stdout.flush()
    return 0 if report.safe else 1


async def put_right() -> list[treatment.Step]:
    """A state directory with a database is one in which a daemon will be started again."""
    from k8e.engine.local.treatment import treat

    return [step async for step in treat(lambda state: Paths(state, state).database.exists())]


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "--ready-fd":
        sys.stderr.write("k8e.daemon is started by k8e; `k8e server` is for people\n")
        return 1
    return run_detached(int(arguments[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`Service`: what every door calls. It puts the parts together and decides nothing itself."""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from k8e.core import checks
from k8e.core.access.quotas import Quotas, measure_share
from k8e.core.approvals.approvals import Approvals
from k8e.core.checks import check_caller
from k8e.core.clock import Clock, SystemClock
from k8e.core.contract import LiveRun
from k8e.core.egress.egress import Egress
from k8e.core.egress.witness import Witness
from k8e.core.errors import Fault, Kind
from k8e.core.files import Files
from k8e.core.images import Images
from k8e.core.log.audit import Audit
from k8e.core.log.journal import LOGGER, warn
from k8e.core.log.metrics import Metrics
from k8e.core.log.refusal_log import RefusalLog
from k8e.core.model import (
    Approval,
    Caller,
    ChildSpec,
    HostsChange,
    NamedImage,
    Phase,
    PoolStatus,
    RunResult,
    RunSpec,
    ServiceStatus,
    Session,
    SessionSpec,
)
from k8e.core.parts import Parts
from k8e.core.pool.memory import Memory, SystemMemory
from k8e.core.pool.pool import Pool
from k8e.core.runs.background import Background
from k8e.core.runs.once import Once
from k8e.core.runs.parking import Parking
from k8e.core.runs.runs import Runs
from k8e.core.sessions.children import Children
from k8e.core.sessions.creation import Creation
from k8e.core.sessions.environments import Environments
from k8e.core.sessions.live import Live, Registry
from k8e.core.sessions.persistence import Persistence
from k8e.core.sessions.recovery import Recovery
from k8e.core.sessions.sessions import Sessions
from k8e.core.store.store import Store
from k8e.core.tasks import Tasks
from k8e.engine import Engine, Limits
from k8e.engine.images import Credentials, Report
from k8e.link.model import CommandInfo, Entry
from k8e.settings import PoolSettings, Settings

UPKEEP_SECONDS: Final = 2.0
PIP_SECONDS: Final = 300.0
_PATIENCE: Final = 15.0  # at the end, for what is under way

_STRANGE: Final = ("session_not_found", "run_not_found", "approval_not_found")  # it may be somebody else's

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["Service", P], Coroutine[Any, Any, T]]


def counted(method: Method[P, T]) -> Method[P, T]:
    """Counts what is refused or fails, by its code."""

    @functools.wraps(method)
    async def count(self: Service, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(self, *args, **kwargs)
        except Fault as fault:
            self.metrics.failures.add(fault.code)
            if fault.kind in (Kind.DENIED, Kind.STRANGER) or fault.code in _STRANGE:
                self.log_denial(method.__name__, fault, args)
            raise

    return count


class Service:
    """Implements `contract`. Call `recover` before anything else, then `keep_up`, in the end `close`."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        *,
        clock: Clock | None = None,
        settings: Settings | None = None,
        pool: PoolSettings | None = None,  # None: nothing is made ahead
        memory: Memory | None = None,
        audit_file: Path | None = None,
        environments: Path | None = None,  # where sessions that last keep theirs
    ) -> None:
        clock, metrics, settings = clock or SystemClock(), Metrics(), settings or Settings()
        self._state = audit_file.parent if audit_file else None
        self._parts = parts = Parts(
            engine=engine,
            store=store,
            clock=clock,
            tasks=Tasks(),
            settings=settings,
            metrics=metrics,
            audit=Audit(audit_file, settings.audit, metrics, clock),
            refusals=RefusalLog(audit_file, settings.audit, metrics, clock),
        )
        self._registry = registry = Registry()
        self._witness = witness = Witness(parts)
        self._environments = kept = Environments(environments)
        self._parking = parking = Parking(parts)
        self._quotas = quotas = Quotas(settings.quotas, clock)
        self._pool = made_ahead = Pool(parts, pool or PoolSettings(enabled=False), memory or SystemMemory())
        self._images = images = Images(parts, registry, made_ahead)
        self._sessions = sessions = Sessions(parts, registry, witness, kept)
        self._creation = creation = Creation(
            *(parts, sessions, registry),
            images=images,
            pool=made_ahead,
            quotas=quotas,
            parking=parking,
            witness=witness,
            environments=kept,
        )
        self._children = Children(parts, sessions, creation, made_ahead, quotas)
        self._egress = Egress(parts, sessions, registry)
        self._runs = runs = Runs(parts, sessions, registry, quotas=quotas, parking=parking)
        self._background = Background(parts, sessions, registry, runs, witness)
        self._once = Once(sessions, registry, creation, runs)
        self._files = Files(sessions)
        self._approvals = Approvals(parts, sessions, registry)
        self._persistence = Persistence(
            *(parts, sessions, registry),
            creation=creation,
            runs=runs,
            approvals=self._approvals,
            quotas=quotas,
            parking=parking,
            environments=kept,
        )
        self._upkeep: asyncio.Task[None] | None = None

    @property
    def metrics(self) -> Metrics:
        return self._parts.metrics

    @property
    def settings(self) -> Settings:
        return self._parts.settings

    @property
    def audit(self) -> Audit:
        return self._parts.audit

    # The service's own life

    async def recover(self) -> None:
        await self.audit.record("daemon_started", pid=os.getpid(), version=importlib.metadata.version("k8e"))
        self._tell_damages()  # of a database that was set aside, whatever becomes of the rest
        await Recovery(
            *(self._parts, self._sessions, self._registry),
            runs=self._runs,
            background=self._background,
            egress=self._egress,
            pool=self._pool,
            environments=self._environments,
        ).recover()
        await self._approvals.recover()
        self._tell_damages()

    def _tell_damages(self) -> None:
        """Of files of the state directory, in whichever room they were found."""
        of_engine, of_store = self._parts.engine.damages(), self._parts.store.damages.take()
        self.audit.note_damages((*of_engine, *of_store, *self._environments.damages.take()))

    def keep_up(self, seconds: float = UPKEEP_SECONDS) -> None:
        """Begins to look after things in the background."""
        self._creation.prewarm()
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up(seconds))

    async def close(self) -> None:
        """Ends what somebody waits for; sandboxes and background runs live on. The store is its owner's to close."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait({self._upkeep})
        await self._pool.close()
        await self._images.close()
        self._approvals.close()
        self._parking.close()
        for run in list(self._runs.running.values()):
            run.leave()
        self._once.close()
        await self._parts.tasks.close(_PATIENCE)
        try:
            await self._sessions.save_uses()
        except Fault as fault:
            warn("uses_not_saved", detail=fault.detail)
        self.audit.note("daemon_stopped", pid=os.getpid())
        await self.audit.close()
        await self._parts.refusals.close()

    def log_denial(self, call: str, fault: Fault, arguments: tuple[object, ...]) -> None:
        """What somebody asked for and may not have, or what is not there: who tries doors sees no difference, who
        reads the log sees every try."""
        caller, *rest = arguments
        named = rest[0] if rest else ""
        subject = named if isinstance(named, str) else getattr(named, "session_id", "")
        label = caller.label if isinstance(caller, Caller) else ""
        self.audit.note("access_refused", caller=label, call=call, subject=subject[:100], code=fault.code)

    def expose(self) -> None:
        self._quotas.expose(measure_share(self._state))

    def turn_away(self, who: str, call: str, code: str, source: str = "") -> None:
        about = {"caller": who[:100], **({"source": source[:100]} if source else {})}
        origin = source or who
        self._parts.refusals.note("access_refused", origin, about, stranger=bool(source), call=call[:100], code=code)

    async def _keep_up(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.look_after()
            except Fault as fault:
                warn("upkeep_failed", code=fault.code, detail=fault.detail)
            except Exception:  # noqa: BLE001 - whatever it was, it must not be the last round
                LOGGER.exception("upkeep_failed")

    async def look_after(self) -> None:
        """One round of upkeep."""
        active = [live for live in self._registry if live.phase is Phase.ACTIVE]
        await asyncio.gather(*(self._sessions.examine(live) for live in active if live.busy))
        await self.expire()
        self._sessions.resume_ends()
        await self._witness.look_around(active)
        await self.audit.sync()
        self._parts.refusals.review()
        await self._parts.refusals.sync()
        await self._egress.save()
        self._tell_damages()
        await self._approvals.review()
        await self._sessions.save_uses()
        await self._pool.review()

    async def expire(self) -> Sequence[str]:
        """Ends what nobody has used for longer than its ttl. A command that runs is a use."""
        active = [live for live in self._registry if live.phase is Phase.ACTIVE and live.background]
        holders = [live for live in active if not live.collecting.locked()]  # whose agent does not answer may hold it
        await asyncio.gather(*(self._collect(live) for live in holders))
        return await self._sessions.expire()

    async def _collect(self, live: Live) -> None:
        try:
            await self._background.collect(live)
        except Fault as fault:
            warn("not_collected", session=live.session_id, code=fault.code, detail=fault.detail)

    # What doors ask for

    @counted
    async def create(self, caller: Caller, spec: SessionSpec) -> Session:
        return await self._creation.create(caller, spec)

    @counted
    async def subagent(self, caller: Caller, parent_session_id: str, spec: ChildSpec) -> Session:
        return await self._children.create(caller, parent_session_id, spec)

    @counted
    async def get(self, caller: Caller, session_id: str) -> Session:
        return await self._sessions.get(caller, session_id)

    @counted
    async def sessions(self, caller: Caller, *, all_phases: bool = False) -> Sequence[Session]:
        return await self._sessions.list(caller, all_phases=all_phases)

    @counted
    async def destroy(self, caller: Caller, session_id: str) -> None:
        await self._sessions.destroy(caller, session_id)

    @counted
    async def stop_session(self, caller: Caller, session_id: str) -> Session:
        return await self._persistence.stop(caller, session_id)

    @counted
    async def start_session(
        self,
        caller: Caller,
        session_id: str,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Session:
        return await self._persistence.start(caller, session_id, env or {}, secrets or {})

    @counted
    async def set_hosts(self, caller: Caller, session_id: str, change: HostsChange) -> Session:
        return await self._egress.change(caller, session_id, change)

    @counted
    async def run(self, caller: Caller, spec: RunSpec) -> RunResult:
        return await (self._background.start(caller, spec) if spec.background else self._runs.run(caller, spec))

    @counted
    async def start(self, caller: Caller, spec: RunSpec) -> LiveRun:
        return await self._runs.start(caller, spec)

    @counted
    async def start_once(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool = False) -> LiveRun:
        return await self._once.start(caller, session, run, keep=keep)

    @counted
    async def run_once(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool = False) -> RunResult:
        return await self._once.run(caller, session, run, keep=keep)

    @counted
    async def signal(self, caller: Caller, run_id: str, number: int) -> None:
        if run := await self._background.find_foreground(caller, run_id):
            await run.signal(number)

    @counted
    async def resize(self, caller: Caller, run_id: str, rows: int, columns: int) -> None:
        if run := await self._background.find_foreground(caller, run_id):
            await run.resize(rows, columns)

    @counted
    async def poll(self, caller: Caller, run_id: str) -> RunResult:
        return await self._background.poll(caller, run_id)

    @counted
    async def kill(self, caller: Caller, run_id: str) -> None:
        await self._background.kill(caller, run_id)

    @counted
    async def ps(self, caller: Caller, session_id: str) -> Sequence[CommandInfo]:
        opened = await self._sessions.open(caller, session_id)
        with self._sessions.using(opened.live, "listing commands"):
            return [command for command in await opened.sandbox.commands() if command.running]

    @counted
    async def log(self, caller: Caller, session_id: str) -> Sequence[RunResult]:
        live = self._sessions.find(caller, session_id)
        return [record.show(live.session_id) for record in await self._parts.store.runs(live.sandbox)]

    @counted
    async def write_file(self, caller: Caller, session_id: str, path: str, content: bytes, *, append: bool) -> int:
        return await self._files.write(caller, session_id, path, content, append=append)

    @counted
    async def read_file(self, caller: Caller, session_id: str, path: str) -> bytes:
        return await self._files.read(caller, session_id, path)

    @counted
    async def upload(
        self,
        caller: Caller,
        session_id: str,
        path: str,
        pieces: AsyncIterable[bytes],
        *,
        append: bool,
        permissions: int | None = None,
    ) -> int:
        return await self._files.upload(caller, session_id, path, pieces, append=append, permissions=permissions)

    @counted
    async def tree(self, caller: Caller, session_id: str, path: str) -> tuple[Entry, Sequence[Entry]]:
        return await self._files.tree(caller, session_id, path)

    @counted
    async def make_folder(self, caller: Caller, session_id: str, path: str) -> None:
        await self._files.make_folder(caller, session_id, path)

    @counted
    async def download(
        self, caller: Caller, session_id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        return await self._files.download(caller, session_id, path, offset, length)

    @counted
    async def pip_install(
        self, caller: Caller, session_id: str, packages: Sequence[str], *, seconds: float | None = None
    ) -> RunResult:
        argv = checks.check_packages(packages)
        spec = RunSpec(session_id, argv=argv, timeout=PIP_SECONDS if seconds is None else seconds)
        return await self._runs.run(caller, spec)

    @counted
    async def list_files(self, caller: Caller, session_id: str, path: str = "", *, since: float = 0) -> Sequence[Entry]:
        return await self._files.list(caller, session_id, path, since=since)

    @property
    def hears_dialogues(self) -> bool:
        return self._approvals.hears_dialogues

    @counted
    async def ask(self, caller: Caller, session_id: str, action: str, *, seconds: float | None = None) -> Approval:
        return await self._approvals.ask(caller, session_id, action, seconds)

    @counted
    async def await_answer(self, caller: Caller, approval_id: str, seconds: float) -> Approval:
        return await self._approvals.wait(caller, approval_id, seconds)

    @counted
    async def approval(self, caller: Caller, approval_id: str) -> Approval:
        return await self._approvals.get(caller, approval_id)

    @counted
    async def approvals(self, caller: Caller, *, all_states: bool = False) -> Sequence[Approval]:
        return await self._approvals.list(caller, all_states=all_states)

    @counted
    async def answer(self, caller: Caller, approval_id: str, *, approved: bool, reason: str = "") -> Approval:
        return await self._approvals.answer(caller, approval_id, approved, reason)

    @counted
    async def pull_image(
        self, caller: Caller, name: str, credentials: Credentials | None, report: Report, tenant: str = ""
    ) -> NamedImage:
        return await self._images.pull(caller, name, credentials, report, tenant)

    @counted
    async def import_image(
        self, caller: Caller, pieces: AsyncIterable[bytes], name: str, report: Report, tenant: str = ""
    ) -> NamedImage:
        return await self._images.add(caller, pieces, name, report, tenant)

    @counted
    async def build_base(self, caller: Caller, report: Report) -> NamedImage:
        return await self._images.build_base(caller, report)

    @counted
    async def images(self, caller: Caller, name: str = "") -> Sequence[NamedImage]:
        return await self._images.list(caller, name)

    @counted
    async def remove_image(self, caller: Caller, name: str, tenant: str = "") -> int:
        return await self._images.remove(caller, name, tenant)

    @counted
    async def prune_images(self, caller: Caller, unused_for: float = 0, tenant: str = "") -> tuple[Sequence[str], int]:
        return await self._images.prune(caller, unused_for, tenant)

    @counted
    async def reserve(self, caller: Caller, name: str, spec: SessionSpec, number: int) -> PoolStatus:
        await self._creation.reserve(caller, name, spec, number)
        return await self.pool(caller)

    @counted
    async def pool(self, caller: Caller) -> PoolStatus:
        check_caller(caller)
        settings = self._pool.settings
        return PoolStatus(settings.enabled, settings.max, self._pool.warm, self._creation.reservations(caller))

    @property
    def default_limits(self) -> Limits:
        return self._creation.default_limits

    @counted
    async def status(self, caller: Caller) -> ServiceStatus:
        check_caller(caller)
        reports = await self._sessions.probe()
        default = next((report.runtime for report in reports if report.available), None)
        return ServiceStatus(
            available=default is not None,
            version=importlib.metadata.version("k8e"),
            runtime=default,
            runtimes=reports,
            sessions=len(self._registry.visible(caller)),
            warm=self._pool.warm,
        )

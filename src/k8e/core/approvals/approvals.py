"""Approvals: asked for a session, answered by another caller than the one who asked, settled exactly once.

Another caller is another user of the machine who may see the session (that is root), or another API key that may answer
for people: what a program of the asking user cannot make. A process, a session, a terminal it can make, so they count
only where the settings say so (`same_user`), and then only if they have nothing to do with the process that asked
(lineage.py). A program inside a sandbox reaches no door at all.

An approval is on record before its caller hears of it: a new daemon goes on with it, and a caller who waited can ask
again. Deadlines count on the clock that never jumps. Nothing is approved by time passing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from k8e.core import checks
from k8e.core.access.access import may_see, require_scope
from k8e.core.access.lineage import Lineage, are_related, read_lineage
from k8e.core.errors import Fault, Kind
from k8e.core.log.audit import call
from k8e.core.log.daemon_log import warn
from k8e.core.model import REMOTE, Approval, ApprovalStatus, Caller, Scope
from k8e.core.parts import Parts
from k8e.core.sessions.ends import describe_unusable
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Registry, Sessions
from k8e.core.store.records import ApprovalRecord
from k8e.core.tasks import wait_first

MAX_PENDING: Final = 64  # of one session
KEPT: Final = 256  # settled ones, of one session
_WITH_KEY: Final = (
    "No user is above root: answer with an admin's key that a person keeps (k8e sandbox approve --key), or let agents "
    "be another user than root (docs/approvals.md)."
)
_AS_ROOT: Final = "Answer as root (sudo k8e sandbox approve), or with an admin's key (--key)."
_ELSEWHERE: Final = (
    "Open another terminal and answer there; or answer as root (sudo), or with an operator's key (docs/approvals.md)."
)


def check_answerer(asked: ApprovalRecord, caller: Caller, lineage: Lineage, *, same_user: bool) -> None:
    """Raises unless this caller, who may see the approval, may answer it. Pure."""
    if caller.label == asked.asker:
        if caller.uid == REMOTE:
            hint = "Answer with another key, of scope operator."
            raise _deny("self_approval", "the key that asked cannot answer", hint)
        if not same_user:
            error = "this user asked, and a user's own programs do not answer: they could be the one that asked"
            raise _deny("same_user", error, _WITH_KEY if caller.uid == 0 else _AS_ROOT)
        if caller.dialogue:
            return
        if not asked.lineage or not lineage:
            error = "it cannot be told whether the process that asked and this one are strangers"
            raise _deny("process_unknown", error, "Answer as root (sudo), or with an operator's key.")
        if not lineage[0].terminal:
            raise _deny("terminal_needed", "only a person at a terminal can answer this", _ELSEWHERE)
    if asked.lineage and lineage and are_related(asked.lineage, lineage):
        raise _deny("self_approval", "this process belongs together with the one that asked", _ELSEWHERE)


def _deny(code: str, error: str, hint: str) -> Fault:
    return Fault(Kind.DENIED, code, error, hint=hint)


class Approvals:
    """Implements `contract.ApprovalService`."""

    def __init__(self, parts: Parts, sessions: Sessions, registry: Registry) -> None:
        self._parts = parts
        self._sessions = sessions
        self._registry = registry
        self._store = parts.store
        self._clock = parts.clock
        self._settings = parts.settings.approvals
        self._pending: dict[str, str] = {}  # ids and their sandboxes
        self._answering = asyncio.Lock()
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._closing = False

    @property
    def hears_dialogues(self) -> bool:
        return self._settings.same_user

    async def recover(self) -> None:
        self._pending = {record.approval_id: record.sandbox for record in await self._store.approvals(pending=True)}
        await self.review()

    def close(self) -> None:
        """Callers who wait hear how their approvals stand; the next daemon knows the rest."""
        self._closing = True
        for events in self._watchers.values():
            for event in events:
                event.set()

    # Asking

    @call("ask")
    async def ask(self, caller: Caller, session_id: str, action: str, *, seconds: float | None = None) -> Approval:
        action = checks.check_words("action", action, empty=False)
        life = checks.check_timeout(self._settings.life if seconds is None else seconds)
        live = self._sessions.find(caller, session_id)
        if not live.usable:
            raise describe_unusable(live)
        if sum(sandbox == live.sandbox for sandbox in self._pending.values()) >= MAX_PENDING:
            hint = "Wait until some of them are answered."
            raise Fault(Kind.EXHAUSTED, "too_many_approvals", f"{MAX_PENDING} questions are open", hint=hint)
        live.touch()
        approval_id = f"appr-{secrets.token_hex(8)}"
        self._pending[approval_id] = live.sandbox
        return await self._parts.tasks.finish(self._ask(caller, live, approval_id, action, life))

    async def _ask(self, caller: Caller, live: Live, approval_id: str, action: str, life: float) -> Approval:
        try:
            now = self._clock.wall()
            record = ApprovalRecord(
                approval_id=approval_id,
                sandbox=live.sandbox,
                session_id=live.session_id,
                tenant=live.session.tenant,
                owner=live.session.owner,
                action=action,
                asker=caller.label,
                lineage=await _find_lineage(caller),
                asked=now,
                expires=now + life,
                boot=self._clock.boot,
                deadline=self._clock.monotonic() + life,
            )
            await self._parts.audit.record("approval_asked", **_describe(record), caller=caller.label)
            await self._store.insert_approval(record, KEPT)
        except BaseException:
            self._pending.pop(approval_id, None)
            raise
        return record.show()

    @call("approval")
    async def get(self, caller: Caller, approval_id: str) -> Approval:
        return (await self._find(caller, approval_id)).show()

    @call("approvals")
    async def list(self, caller: Caller, *, all_states: bool = False) -> Sequence[Approval]:
        checks.check_caller(caller)
        records = await self._store.approvals(pending=not all_states)
        mine = [(await self._review(one)).show() for one in records if may_see(caller, one.owner, one.tenant)]
        return [one for one in mine if all_states or one.status is ApprovalStatus.PENDING]

    @call("await_answer")
    async def wait(self, caller: Caller, approval_id: str, seconds: float) -> Approval:
        end = self._clock.monotonic() + checks.check_number("wait", seconds, 0, checks.MAX_TIMEOUT)
        with self._watch(approval_id) as settled:
            while True:
                record = await self._find(caller, approval_id)
                live = self._registry.get(record.sandbox)
                rest = min(end, record.deadline) - self._clock.monotonic()
                if record.status is not ApprovalStatus.PENDING or rest <= 0 or self._closing or live is None:
                    return (await self._review(record)).show()
                with live.in_use():
                    await self._pause(settled, live, rest)

    async def _pause(self, settled: asyncio.Event, live: Live, seconds: float) -> None:
        waiting = asyncio.ensure_future(settled.wait())
        try:
            await wait_first(waiting, live.gone, timeout=seconds)
        finally:
            waiting.cancel()

    @contextmanager
    def _watch(self, approval_id: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        watchers = self._watchers.setdefault(approval_id, set())
        watchers.add(event)
        try:
            yield event
        finally:
            watchers.discard(event)
            if not watchers:
                self._watchers.pop(approval_id, None)

    # Answering

    @call("check_answer")
    async def check_answer(self, caller: Caller, approval_id: str) -> None:
        await self._check_answer(caller, approval_id)

    async def _check_answer(self, caller: Caller, approval_id: str) -> None:
        if caller.uid == REMOTE:
            require_scope(caller, Scope.OPERATOR)
        record = await self._find(caller, approval_id)
        check_answerer(record, caller, await _find_lineage(caller), same_user=self._settings.same_user)

    @call("answer")
    async def answer(self, caller: Caller, approval_id: str, *, approved: bool, reason: str = "") -> Approval:
        reason = checks.check_words("reason", reason, empty=True)
        await self._check_answer(caller, approval_id)
        return await self._parts.tasks.finish(self._answer(caller, approval_id, approved, reason))

    async def _answer(self, caller: Caller, approval_id: str, approved: bool, reason: str) -> Approval:
        async with self._answering:
            record = _check_pending(await self._find(caller, approval_id))
            verdict = ApprovalStatus.APPROVED if approved else ApprovalStatus.REJECTED
            settled = replace(record, status=verdict, answerer=caller.label, answered=self._clock.wall(), reason=reason)
            facts = {
                **_describe(record),
                "caller": caller.label,
                "verdict": verdict.value,
                "reason": reason,
                "dialogue": caller.dialogue,
            }
            await self._parts.audit.record("approval_answering", **facts)
            _check_pending(self._judge(record))  # the log may have taken its time
            if not await self._store.settle_approval(settled):
                raise _too_late(await self._find(caller, approval_id))
            self._tell(settled)
            self._parts.audit.note("approval_answered", **facts)
            return settled.show()

    # Upkeep

    async def review(self) -> None:
        """Writes down what time or the end of a session has settled."""
        if not self._pending:
            return
        for record in await self._store.approvals(pending=True):
            await self._review(record)
        living = {live.sandbox for live in self._registry}
        # Records of a session that never came to be, or of one long gone, are forgotten with it.
        self._pending = {one: sandbox for one, sandbox in self._pending.items() if sandbox in living}

    async def _review(self, record: ApprovalRecord) -> ApprovalRecord:
        """Puts on record what time or the end of a session has settled: what one caller was told stays true."""
        judged = self._judge(record)
        if judged.status is record.status:
            return record
        try:
            if await self._store.settle_approval(judged):
                self._parts.audit.note("approval_lapsed", **_describe(judged), verdict=judged.status.value)
            else:  # it was answered a moment before
                judged = await self._store.find_approval(record.approval_id) or judged
        except Fault as fault:
            warn("approval_not_settled", approval=record.approval_id, detail=fault.detail)
        self._tell(judged)
        return judged

    def _tell(self, settled: ApprovalRecord) -> None:
        self._pending.pop(settled.approval_id, None)
        for event in self._watchers.get(settled.approval_id, ()):
            event.set()

    async def _find(self, caller: Caller, approval_id: str) -> ApprovalRecord:
        """The approval as it stands. One that the caller may not see is answered as if it were not there."""
        checks.check_caller(caller)
        record = await self._store.find_approval(checks.check_approval_id(approval_id))
        if record is None or not may_see(caller, record.owner, record.tenant):
            hint = "k8e sandbox approvals lists those that can be answered."
            raise Fault(Kind.NOT_FOUND, "approval_not_found", f"there is no approval {approval_id}", hint=hint)
        return await self._review(record)

    def _judge(self, record: ApprovalRecord) -> ApprovalRecord:
        """As it is by now."""
        if record.status is not ApprovalStatus.PENDING:
            return record
        if record.boot != self._clock.boot or self._clock.monotonic() >= record.deadline:
            return replace(record, status=ApprovalStatus.EXPIRED)
        live = self._registry.get(record.sandbox)
        if live is None or not live.usable:
            return replace(record, status=ApprovalStatus.WITHDRAWN)
        return record


def _describe(record: ApprovalRecord) -> dict[str, object]:
    return {
        "approval": record.approval_id,
        "session": record.session_id,
        "sandbox": record.sandbox,
        "owner": record.owner,
        "tenant": record.tenant,
        "action": record.action,
        "asker": record.asker,
    }


async def _find_lineage(caller: Caller) -> Lineage:
    return await asyncio.to_thread(read_lineage, caller.pid) if caller.pid else ()


def _check_pending(record: ApprovalRecord) -> ApprovalRecord:
    if record.status is not ApprovalStatus.PENDING:
        raise _too_late(record)
    return record


def _too_late(record: ApprovalRecord) -> Fault:
    error = f"approval {record.approval_id} is {record.status.value} already"
    who = f"by {record.answerer}" if record.answerer else ""
    return Fault(Kind.CONFLICT, "approval_settled", error, detail=who, hint="An answer cannot be changed; ask again.")

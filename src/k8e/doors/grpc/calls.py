"""One call, whatever its method: who calls, what has arrived, until when, and how it ends.

Messages arrive as bytes and are parsed here: what is no message is the caller's mistake, which gRPC's own way would
call ours. They are taken from the connection one payer's turn after the other's, so that many large ones at once do not
fill the memory.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from k8e.core.access import Payer, find_payer
from k8e.core.contract import SandboxService
from k8e.core.errors import Fault, Kind
from k8e.core.journal import format_event
from k8e.core.keys import Admission, Keys
from k8e.core.model import Caller
from k8e.doors.crowd import KNOWN_EACH, Strangers
from k8e.doors.grpc.front import Front
from k8e.doors.grpc.inbox import LARGE, PATIENCE, Arrival, Inbox
from k8e.doors.grpc.methods import ERROR_KEY, OWNER_KEY, TENANT_KEY
from k8e.doors.grpc.problems import Refusal, describe, internal_error, malformed, stalled, too_slow
from k8e.doors.specs import make_meant

MARGIN: Final = 30.0  # for a call beyond what it waits for
CALLS_PER_PAYER: Final = 1000
STRANGERS_PATIENCE: Final = 10.0
STRANGERS_MESSAGE: Final = 64 << 10
STRANGERS_CALLS, STRANGERS_CALLS_EACH = 64, 32  # of all of them, of one source
_NOBODY: Final = -2  # strangers, told apart by where they are
_TURNED_AWAY: Final = ("scope_missing", "too_many_calls")  # by us, where the service hears nothing of it

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger("k8e.doors.grpc")


@dataclass(frozen=True, slots=True)
class Handler:
    answer: Callable[[Call], Awaitable[None]]
    seconds: float = 60.0  # for a caller who names no deadline, and nobody gets more without a reason
    strangers: bool = False  # may call it
    single: bool = False  # its one answer leaves together with the status: a turn of gRPC's wheels less


class Call:
    def __init__(
        self,
        context: Context,
        admitted: Admission | Fault,
        inbox: Inbox,
        clock: asyncio.Timeout,
        *,
        single: bool,
        source: str = "",
    ) -> None:
        self.source = source  # of a stranger
        self.admission = admitted if isinstance(admitted, Admission) else None
        self.refusal = admitted if isinstance(admitted, Fault) else None
        self.withdrawn = False  # who called was somebody, and is not any more
        self.given_up: Fault | Refusal | None = None  # why it ends before its time
        self.answer = b""  # of a handler that gives a single one
        self._single = single
        self._opened = False
        self._context = context
        self._inbox = inbox
        self._clock = clock
        self._held = AsyncExitStack()
        self._load = inbox.freight.load(self.payer)
        self._task = asyncio.current_task()

    @property
    def caller(self) -> Caller:
        assert self.admission is not None
        return self.admission.caller

    @property
    def payer(self) -> Payer:
        if self.admission is None:
            return Payer(_NOBODY, self.source)
        return find_payer(self.caller.uid, self.caller.tenant)

    @property
    def expired(self) -> bool:
        return self.admission is not None and time.time() >= self.admission.expires

    def allow(self, seconds: float) -> None:
        """From now on; at most as long as whoever calls is somebody."""
        if self.admission is not None:
            seconds = min(seconds, self.admission.expires - time.time())
        self._clock.reschedule(asyncio.get_running_loop().time() + seconds)

    def withdraw(self) -> None:
        self.withdrawn = True
        if self._task is not None:
            self._task.cancel()

    def give_up(self, problem: Fault | Refusal) -> None:
        self.given_up = problem
        self._clock.reschedule(asyncio.get_running_loop().time())

    async def read(self, kind: type[M], patience: float = PATIENCE) -> M | None:
        """The next message, None after the last. The one before is forgotten."""
        await self._forget()
        if self.admission is None:
            return await self._read_stranger(kind)
        arrival = Arrival(self._inbox, self.payer, self.give_up)
        async with arrival.expect(patience):
            content = await self._context.read()
            arrival.note()
            if content is grpc.aio.EOF:
                return None
            assert isinstance(content, bytes)
            if len(content) > LARGE:
                await self._held.enter_async_context(self._inbox.large.take(self.payer))
            await self._load.add(len(content))
        return self._parse(kind, content)

    async def _read_stranger(self, kind: type[M]) -> M | None:
        """Strangers take no turns of those who are known: they have places of their own, and little to say."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(STRANGERS_PATIENCE, self.give_up, stalled(STRANGERS_PATIENCE))
        try:
            content = await self._context.read()
        finally:
            timer.cancel()
        if content is grpc.aio.EOF:
            return None
        if len(content) > STRANGERS_MESSAGE:
            raise malformed(f"a caller who is not logged in sends at most {STRANGERS_MESSAGE} bytes")
        return self._parse(kind, content)

    def _parse(self, kind: type[M], content: object) -> M:
        assert isinstance(content, bytes)
        try:
            return kind.FromString(content)
        except (DecodeError, ValueError, RecursionError) as error:
            raise malformed(f"this is no {kind.__name__}") from error

    def idle(self) -> AbstractContextManager[None]:
        """In which `read_idly` may be called."""
        return self._inbox.idle(self.payer)

    async def read_idly(self, kind: type[M]) -> M | None:
        """The same for a caller who may say nothing for hours: nobody else waits for them. Their messages are meant to
        be small, which whoever reads them checks."""
        await self._forget()
        content = await self._context.read()
        if content is grpc.aio.EOF:
            return None
        await self._load.add(len(content))
        return self._parse(kind, content)

    async def _forget(self) -> None:
        """The message before."""
        self._load.free()
        await self._held.aclose()

    async def read_one(self, kind: type[M]) -> M:
        message = await self.read(kind)
        if message is None:
            raise malformed("there is no message")
        return message

    async def write(self, message: Message) -> None:
        if self._single:
            self.answer = message.SerializeToString()
        else:
            await self._open()
            await self._context.write(message.SerializeToString())

    async def _open(self) -> None:
        """The metadata that go before the first message, sent before it and to the end. gRPC would send them with it,
        and note that they were only after it has left: whoever is cut off while their first message waits for a slow
        reader could not be told why, because gRPC would send them again and refuses to."""
        if self._opened:
            return
        self._opened = True
        opening = asyncio.ensure_future(self._context.send_initial_metadata(()))
        opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # also when nobody waits any more
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})
            raise

    async def close(self) -> None:
        await self._forget()


class Calls:
    def __init__(
        self, service: SandboxService, keys: Keys, inbox: Inbox | None = None, front: Front | None = None
    ) -> None:
        """Without a front nothing is known of connections."""
        self._front = front
        self._strangers = Strangers(STRANGERS_CALLS, STRANGERS_CALLS_EACH)
        self._service = service
        self._keys = keys
        self._inbox = inbox or Inbox()
        self._by_identity: dict[str, set[Call]] = {}
        self._counts: collections.Counter[Payer] = collections.Counter()
        keys.watch(self._withdraw)

    def _withdraw(self, identity: str) -> None:
        for call in list(self._by_identity.get(identity, ())):
            call.withdraw()

    async def serve(self, name: str, handler: Handler, context: Context) -> bytes:
        """What is left to send."""
        began = time.monotonic()
        who, source, problem, answer = "", "", None, b""
        try:
            admitted = self._admit(context)
            who = admitted.caller.label if isinstance(admitted, Admission) else "nobody"
            source = self._examine(context, admitted)
            if isinstance(admitted, Fault) and not handler.strangers:
                raise admitted
            if isinstance(admitted, Admission):
                admitted = _aim(admitted, context)
            answer = await self._answer(handler, context, admitted, source)
        except (Fault, Refusal) as error:
            problem = error
        except grpc.aio.AbortError:
            raise
        except grpc.aio.UsageError as error:  # the client is gone, and gRPC does not want to hear more of it
            log.debug("%s", format_event("call_ended", {"cause": repr(error)}))
        except Exception:
            log.exception("%s", format_event("call_failed", {"method": name, "caller": who}))
            problem = internal_error()
        finally:
            self._note(name, who, problem, time.monotonic() - began)
        if problem is not None:
            if problem.code in _TURNED_AWAY or (isinstance(problem, Fault) and problem.kind is Kind.STRANGER):
                self._service.turn_away(who, name, problem.code, source)
            status, detail = describe(problem)
            await context.abort(status, detail.error, ((ERROR_KEY, detail.SerializeToString()),))
        return answer

    def _admit(self, context: Context) -> Admission | Fault:
        """Who calls, or why they are nobody."""
        certificate = next(iter(context.auth_context().get("x509_pem_cert") or ()), b"")
        try:
            return self._keys.admit(certificate)
        except Fault as fault:
            return fault

    def _examine(self, context: Context, admitted: Admission | Fault) -> str:
        """Tells the connection whose it is. Answers where a stranger comes from."""
        peer = context.peer()
        connection = self._front.find(peer) if self._front is not None else None
        if connection is None:
            return "" if isinstance(admitted, Admission) else peer
        if isinstance(admitted, Fault):
            connection.greet()
            connection.distrust()
            return connection.source
        if not connection.admit(find_payer(admitted.caller.uid, admitted.caller.tenant)):
            error = f"{KNOWN_EACH} connections at once is the most"
            hint = "Use fewer connections: one carries many calls."
            raise Fault(Kind.EXHAUSTED, "too_many_connections", error, hint=hint, retry_after=10.0)
        return ""

    async def _answer(self, handler: Handler, context: Context, admitted: Admission | Fault, source: str) -> bytes:
        call: Call | None = None
        try:
            async with asyncio.timeout(None) as clock:
                call = Call(context, admitted, self._inbox, clock, single=handler.single, source=source)
                call.allow(handler.seconds)
                async with self._registered(call):
                    await handler.answer(call)
                return call.answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call is None or not call.withdrawn or task is None:
                raise
            task.uncancel()
            raise Fault(Kind.STRANGER, "key_revoked", "the key was revoked", hint="Log in with another key.") from None
        except TimeoutError:
            if call is not None and call.given_up is not None:
                raise call.given_up from None
            if call is not None and call.expired:
                error = "the certificate has expired"
                raise Fault(Kind.STRANGER, "certificate_expired", error, hint="Log in again, and call again.") from None
            raise too_slow() from None

    @asynccontextmanager
    async def _registered(self, call: Call) -> AsyncIterator[None]:
        payer, identity = call.payer, call.admission.identity if call.admission else ""
        if call.admission is None:
            async with self._estranged(call):
                yield
            return
        if self._counts[payer] >= CALLS_PER_PAYER:
            error = f"{CALLS_PER_PAYER} calls at once is the most"
            raise Fault(Kind.EXHAUSTED, "too_many_calls", error, hint="Try again soon.", retry_after=1.0)
        self._counts[payer] += 1
        self._by_identity.setdefault(identity, set()).add(call)
        try:
            yield
        finally:
            self._counts[payer] -= 1
            if not self._counts[payer]:
                del self._counts[payer]
            calls = self._by_identity[identity]
            calls.discard(call)
            if not calls:
                del self._by_identity[identity]
            await call.close()

    @asynccontextmanager
    async def _estranged(self, call: Call) -> AsyncIterator[None]:
        """Strangers have a few calls among them. A new one is let in, in the place of the oldest."""
        error = f"{STRANGERS_CALLS} calls of callers who are not logged in, at once, is the most"
        crowded = Fault(Kind.EXHAUSTED, "too_many_calls", error, hint="Try again soon.", retry_after=1.0)
        place = self._strangers.enter(call.source, lambda: call.give_up(crowded))
        try:
            yield
        finally:
            self._strangers.leave(place)
            await call.close()

    def _note(self, name: str, who: str, problem: Fault | Refusal | None, seconds: float) -> None:
        # A stranger's refusal is in the log of refusals, which bounds them; here they would push out all others.
        if log.isEnabledFor(logging.INFO) and not (problem is not None and who == "nobody"):
            fields = {"method": name, "caller": who, "code": problem.code if problem else "ok", "seconds": seconds}
            log.info("%s", format_event("call", fields))


def _aim(admitted: Admission, context: Context) -> Admission:
    """Whose sessions the call means, where it says so."""
    said = {name: value for name, value in context.invocation_metadata() or () if name in (TENANT_KEY, OWNER_KEY)}
    if not said:
        return admitted
    meant = make_meant(str(said.get(TENANT_KEY, "")), str(said.get(OWNER_KEY, "")))
    return replace(admitted, caller=replace(admitted.caller, meant=meant))

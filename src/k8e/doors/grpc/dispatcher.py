"""All calls that are under way, whatever their methods: who calls, how many there may be, and how they end."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Final

import grpc
import grpc.aio

from k8e.core.access.access import Payer, find_payer
from k8e.core.access.keys import Admission, Keys
from k8e.core.contract import SandboxService
from k8e.core.errors import Fault, Kind
from k8e.core.log.journal import format_event
from k8e.doors.connection_limits import AUTHENTICATED_EACH, UnauthenticatedLimit
from k8e.doors.grpc.buffered_bytes import estimate_head
from k8e.doors.grpc.call import Call, Context, Handler
from k8e.doors.grpc.errors import GrpcRefusal, describe, internal_error, too_slow
from k8e.doors.grpc.message_limits import MessageLimits
from k8e.doors.grpc.methods import ERROR_KEY, OWNER_KEY, TENANT_KEY
from k8e.doors.grpc.proxy import Connection, Proxy
from k8e.doors.http.requests import make_meant

CALLS_PER_PAYER: Final = 1000
STRANGERS_CALLS, STRANGERS_CALLS_EACH = 64, 32  # of all of them, of one source
_TURNED_AWAY: Final = ("scope_missing", "too_many_calls")  # by us, where the service hears nothing of it

log = logging.getLogger("k8e.doors.grpc")


class Dispatcher:
    def __init__(
        self, service: SandboxService, keys: Keys, messages: MessageLimits | None = None, proxy: Proxy | None = None
    ) -> None:
        """Without a proxy nothing is known of connections."""
        self._proxy = proxy
        self._unauthenticated = UnauthenticatedLimit(STRANGERS_CALLS, STRANGERS_CALLS_EACH)
        self._service = service
        self._keys = keys
        self._messages = messages or MessageLimits()
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
            connection = self._proxy.find(context.peer()) if self._proxy is not None else None
            source = self._examine(context, connection, admitted)
            if isinstance(admitted, Fault) and not handler.strangers:
                raise admitted
            if isinstance(admitted, Admission):
                admitted = _aim(admitted, context)
            answer = await self._answer(handler, context, admitted, source, connection)
        except (Fault, GrpcRefusal) as error:
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

    def _examine(self, context: Context, connection: Connection | None, admitted: Admission | Fault) -> str:
        """Tells the connection whose it is. Answers where a stranger comes from."""
        if connection is None:
            return "" if isinstance(admitted, Admission) else context.peer()
        if isinstance(admitted, Fault):
            connection.greet()
            connection.distrust()
            return connection.source
        if not connection.admit(find_payer(admitted.caller.uid, admitted.caller.tenant)):
            error = "this user or tenant has too many connections"
            detail = f"{AUTHENTICATED_EACH} at once is the most, and a sixteenth of the daemon's descriptors"
            hint = "Use fewer connections: one carries many calls."
            raise Fault(Kind.EXHAUSTED, "too_many_connections", error, detail=detail, hint=hint, retry_after=10.0)
        return ""

    async def _answer(
        self,
        handler: Handler,
        context: Context,
        admitted: Admission | Fault,
        source: str,
        connection: Connection | None,
    ) -> bytes:
        call: Call | None = None
        try:
            async with asyncio.timeout(None) as clock:
                where = (source, connection)
                call = Call(context, admitted, self._messages, clock, *where, single=handler.single)
                call.allow(handler.seconds)
                async with self._registered(call):
                    head = estimate_head(context.invocation_metadata() or ())
                    with connection.carry(call, head) if connection is not None else nullcontext():
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
        peer = self._unauthenticated.add(call.source, lambda: call.give_up(crowded))
        try:
            yield
        finally:
            self._unauthenticated.remove(peer)
            await call.close()

    def _note(self, name: str, who: str, problem: Fault | GrpcRefusal | None, seconds: float) -> None:
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

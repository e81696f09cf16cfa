"""Dispatches calls of all methods to their handlers: authenticates and counts them, and tells how they end."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from k8e.core.access.access import Payer, find_payer
from k8e.core.access.keys import Admission, Keys
from k8e.core.contract import SandboxService
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import format_event
from k8e.doors.connection_limits import AUTHENTICATED_EACH, UnauthenticatedLimit
from k8e.doors.grpc.buffered_bytes import estimate_head
from k8e.doors.grpc.call import Call, Context, Handler, authenticate, set_meant
from k8e.doors.grpc.connection import Connection
from k8e.doors.grpc.errors import GrpcRefusal, describe, internal_error, too_slow
from k8e.doors.grpc.message_limits import MessageLimits
from k8e.doors.grpc.methods import ERROR_KEY
from k8e.doors.grpc.proxy import Proxy
from k8e.doors.grpc.tokens import admit_token, find_token

CALLS_PER_PAYER: Final = 1000
UNAUTHENTICATED_CALLS, UNAUTHENTICATED_CALLS_EACH = 64, 32  # of all, of one source
_TURNED_AWAY: Final = ("scope_missing", "too_many_calls")  # by the door, where core does not log the refusal

log = logging.getLogger("k8e.doors.grpc")


class Dispatcher:
    def __init__(
        self, service: SandboxService, keys: Keys, limits: MessageLimits | None = None, proxy: Proxy | None = None
    ) -> None:
        """Without a proxy, connections are not counted."""
        self._proxy = proxy
        self._unauthenticated = UnauthenticatedLimit(UNAUTHENTICATED_CALLS, UNAUTHENTICATED_CALLS_EACH)
        self._service = service
        self._keys = keys
        self._message_limits = limits or MessageLimits()
        self._by_identity: dict[str, set[Call]] = {}
        self._counts: collections.Counter[Payer] = collections.Counter()
        keys.watch(self._withdraw)

    def _withdraw(self, identity: str) -> None:
        for call in list(self._by_identity.get(identity, ())):
            call.withdraw()

    async def serve(self, name: str, handler: Handler, context: Context) -> bytes:
        """Returns the answer of a `single` handler, which gRPC sends."""
        began = time.monotonic()
        who, source, problem, answer = "", "", None, b""
        try:
            connection = self._proxy.find(context.peer()) if self._proxy is not None else None
            admitted = authenticate(self._keys, context)
            if (token := find_token(context)) is not None:
                admitted = await admit_token(self._keys, token, admitted, connection.peer.source if connection else "")
            who = admitted.caller.label if isinstance(admitted, Admission) else "nobody"
            source = _note_caller(context, connection, admitted)
            if isinstance(admitted, Fault) and not handler.unauthenticated:
                raise admitted
            if isinstance(admitted, Admission):
                admitted = set_meant(admitted, context)
            answer = await self._answer(handler, context, admitted, source, connection)
        except (Fault, GrpcRefusal) as error:
            problem = error
        except grpc.aio.AbortError:
            raise
        except grpc.aio.UsageError as error:  # the client has left, and gRPC takes no more
            log.debug("%s", format_event("call_ended", {"cause": repr(error)}))
        except Exception:
            log.exception("%s", format_event("call_failed", {"method": name, "caller": who}))
            problem = internal_error()
        finally:
            self._log(name, who, problem, time.monotonic() - began)
        if problem is not None:
            if problem.code in _TURNED_AWAY or (isinstance(problem, Fault) and problem.kind is Kind.UNAUTHENTICATED):
                self._service.turn_away(who, name, problem.code, source)
            status, detail = describe(problem)
            await context.abort(status, detail.error, ((ERROR_KEY, detail.SerializeToString()),))
        return answer

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
                call = Call(context, admitted, self._message_limits, clock, *where, single=handler.single)
                call.allow(handler.seconds)
                remove = self._count(call)
                try:
                    if connection is None:
                        await handler.answer(call)
                    else:
                        connection.open_call(call, estimate_head(context.invocation_metadata() or ()))
                        try:
                            await handler.answer(call)
                        finally:
                            connection.close_call(call)
                finally:
                    remove()
                    call.free()
                return call.answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call is None or not call.withdrawn or task is None:
                raise
            task.uncancel()
            raise Fault(
                Kind.UNAUTHENTICATED, "key_revoked", "the key was revoked", hint="Log in with another key."
            ) from None
        except TimeoutError:
            if call is not None and call.given_up is not None:
                raise call.given_up from None
            if call is not None and call.expired:
                assert call.admission is not None
                raise call.admission.ended from None
            raise too_slow() from None

    def _count(self, call: Call) -> Callable[[], None]:
        """Until the returned function is called."""
        if call.admission is None:
            return self._count_unauthenticated(call)
        payer, identity = call.payer, call.admission.identity
        if self._counts[payer] >= CALLS_PER_PAYER:
            error = f"{CALLS_PER_PAYER} calls at once is the most"
            raise Fault(Kind.EXHAUSTED, "too_many_calls", error, hint="Try again soon.", retry_after=1.0)
        self._counts[payer] += 1
        self._by_identity.setdefault(identity, set()).add(call)

        def remove() -> None:
            self._counts[payer] -= 1
            if not self._counts[payer]:
                del self._counts[payer]
            calls = self._by_identity[identity]
            calls.discard(call)
            if not calls:
                del self._by_identity[identity]

        return remove

    def _count_unauthenticated(self, call: Call) -> Callable[[], None]:
        """Unauthenticated callers share a few calls. A new one evicts the oldest."""
        error = f"{UNAUTHENTICATED_CALLS} calls of callers who are not logged in, at once, is the most"
        too_many = Fault(Kind.EXHAUSTED, "too_many_calls", error, hint="Try again soon.", retry_after=1.0)
        return self._unauthenticated.add(call.source, lambda: call.give_up(too_many))

    def _log(self, name: str, who: str, problem: Fault | GrpcRefusal | None, seconds: float) -> None:
        # The refusal log has those of unauthenticated callers and limits them; here they would push out the rest.
        if log.isEnabledFor(logging.INFO) and not (problem is not None and who == "nobody"):
            fields = {"method": name, "caller": who, "code": problem.code if problem else "ok", "seconds": seconds}
            log.info("%s", format_event("call", fields))


def _note_caller(context: Context, connection: Connection | None, admitted: Admission | Fault) -> str:
    """Tells the connection who its peer is. Returns the source of an unauthenticated one."""
    if connection is None:
        return "" if isinstance(admitted, Admission) else context.peer()
    if isinstance(admitted, Fault):
        connection.refuse()
        return connection.peer.source
    if not connection.authenticate(find_payer(admitted.caller.uid, admitted.caller.tenant)):
        error = "this user or tenant has too many connections"
        detail = f"{AUTHENTICATED_EACH} at once is the most, and a sixteenth of the daemon's descriptors"
        hint = "Use fewer connections: one carries many calls."
        raise Fault(Kind.EXHAUSTED, "too_many_connections", error, detail=detail, hint=hint, retry_after=10.0)
    return ""

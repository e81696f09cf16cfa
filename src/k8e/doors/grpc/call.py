"""One call of any method: its messages, its deadline and its answer.

Messages arrive as bytes and are parsed here, so that malformed ones are told as the caller's mistake; gRPC would tell
them as the server's. Payers take turns to receive messages, so that many large ones at once do not fill the memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from k8e.core.access.access import Payer, find_payer
from k8e.core.access.keys import Admission, Keys
from k8e.core.errors import Fault
from k8e.core.model import Caller
from k8e.doors.grpc.connection import Connection, Reading
from k8e.doors.grpc.errors import GrpcRefusal, malformed, stalled
from k8e.doors.grpc.message_limits import LARGE, PATIENCE, Arrival, MessageLimits
from k8e.doors.grpc.methods import OWNER_KEY, TENANT_KEY
from k8e.doors.requests import read_meant

MARGIN: Final = 30.0  # seconds of a call beyond what it waits for
LONG: Final = 1800.0  # seconds for clones of repositories, and for files of any size over any line
UNAUTHENTICATED_PATIENCE: Final = 10.0
UNAUTHENTICATED_MESSAGE: Final = 64 << 10
_UNAUTHENTICATED: Final = -2  # told apart by their source

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Handler:
    answer: Callable[[Call], Awaitable[None]]
    seconds: float = 60.0  # for a caller without a deadline
    unauthenticated: bool = False  # whether unauthenticated callers may call it
    single: bool = False  # its one answer is sent together with the status, which saves a turn of the loop


class Call:
    def __init__(
        self,
        context: Context,
        admitted: Admission | Fault,
        message_limits: MessageLimits,
        clock: asyncio.Timeout,
        source: str,
        connection: Connection | None,
        *,
        single: bool,
    ) -> None:
        self.source = source  # of an unauthenticated caller
        self.reading = Reading.NOT
        self._connection = connection
        self.admission = admitted if isinstance(admitted, Admission) else None
        self.refusal = admitted if isinstance(admitted, Fault) else None
        self.withdrawn = False  # the key was revoked during the call
        self.given_up: Fault | GrpcRefusal | None = None  # why it ends early
        self.answer = b""  # of a handler that gives a single one
        self._single = single
        self._opened = False
        self._context = context
        self._message_limits = message_limits
        self._clock = clock
        self._large: Payer | None = None  # who has a place among the large messages
        self._allocation = message_limits.memory.allocate(self.payer)
        self._task = asyncio.current_task()

    @property
    def caller(self) -> Caller:
        assert self.admission is not None
        return self.admission.caller

    @property
    def payer(self) -> Payer:
        if self.admission is None:
            return Payer(_UNAUTHENTICATED, self.source)
        return find_payer(self.caller.uid, self.caller.tenant)

    @property
    def expired(self) -> bool:
        return self.admission is not None and time.time() >= self.admission.expires

    def allow(self, seconds: float) -> None:
        """Sets the deadline, from now on; at most the end of the caller's certificate."""
        if self.admission is not None:
            seconds = min(seconds, self.admission.expires - time.time())
        self._clock.reschedule(asyncio.get_running_loop().time() + seconds)

    def withdraw(self) -> None:
        self.withdrawn = True
        if self._task is not None:
            self._task.cancel()

    def give_up(self, problem: Fault | GrpcRefusal) -> None:
        self.given_up = problem
        self._clock.reschedule(asyncio.get_running_loop().time())

    async def read(self, kind: type[M], patience: float = PATIENCE) -> M | None:
        """Reads the next message, None after the last, and frees the one before."""
        self.free()
        if self.admission is None:
            return await self._read_unauthenticated(kind)
        arrival = Arrival(self._message_limits, self.payer, self.give_up)
        await arrival.begin(patience)
        try:
            content = await self._receive(Reading.SOON)
            arrival.finish()
            if content is grpc.aio.EOF:
                return None
            assert isinstance(content, bytes)
            if len(content) > LARGE:
                await self._message_limits.large.acquire(self.payer)
                self._large = self.payer
            await self._allocation.add(len(content))
        finally:
            arrival.end()
        return self._parse(kind, content)

    async def _read_unauthenticated(self, kind: type[M]) -> M | None:
        """Unauthenticated callers take no turns: their calls are few and their messages small."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(UNAUTHENTICATED_PATIENCE, self.give_up, stalled(UNAUTHENTICATED_PATIENCE))
        try:
            content = await self._receive(Reading.SOON)
        finally:
            timer.cancel()
        if content is grpc.aio.EOF:
            return None
        if len(content) > UNAUTHENTICATED_MESSAGE:
            raise malformed(f"a caller who is not logged in sends at most {UNAUTHENTICATED_MESSAGE} bytes")
        return self._parse(kind, content)

    def _parse(self, kind: type[M], content: object) -> M:
        assert isinstance(content, bytes)
        try:
            return kind.FromString(content)
        except (DecodeError, ValueError, RecursionError) as error:
            raise malformed(f"this is no {kind.__name__}") from error

    def idle(self) -> AbstractContextManager[None]:
        """Counts the call as idle; `read_idly` may be called meanwhile."""
        return self._message_limits.idle(self.payer)

    async def read_idly(self, kind: type[M]) -> M | None:
        """Reads the next message of a call that may send nothing for hours; it takes no turn. The reader has to check
        that the message is small."""
        self.free()
        content = await self._receive(Reading.IDLE)
        if content is grpc.aio.EOF:
            return None
        await self._allocation.add(len(content))
        return self._parse(kind, content)

    async def _receive(self, reading: Reading) -> Any:
        """Receives the next message as bytes, or the end."""
        self.reading = reading
        try:
            content = await self._context.read()
        finally:
            self.reading = Reading.NOT
        if self._connection is not None and content is not grpc.aio.EOF:
            self._connection.note_message(len(content))
        return content

    def free(self) -> None:
        """Frees the memory of the message before."""
        self._allocation.free()
        if self._large is not None:
            self._message_limits.large.release(self._large)
            self._large = None

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

    async def check_client(self) -> None:
        """Raises if the client has broken off the call, which gRPC's reader cannot tell from its last message: nothing
        can be sent to it any more."""
        try:
            await self._open()
        except grpc.aio.BaseError as error:
            raise grpc.aio.UsageError("the client has left") from error

    async def _open(self) -> None:
        """Sends the initial metadata before the first message. gRPC would send both together and note only afterwards
        that it has: a call that is ended while its first message waits for a slow reader could not be told why, because
        gRPC would try to send the metadata again, and refuse to."""
        if self._opened:
            return
        self._opened = True
        opening = asyncio.ensure_future(self._context.send_initial_metadata(()))
        opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # also when the client has left
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})
            raise


def authenticate(keys: Keys, context: Context) -> Admission | Fault:
    """A Fault says why the caller is not authenticated."""
    certificate = next(iter(context.auth_context().get("x509_pem_cert") or ()), b"")
    try:
        return keys.admit(certificate)
    except Fault as fault:
        return fault


def set_meant(admission: Admission, context: Context) -> Admission:
    """Adds the tenant and the owner whose sessions the call is about, where its metadata name them."""
    metadata = context.invocation_metadata() or ()
    named = {name: str(value) for name, value in metadata if name in (TENANT_KEY, OWNER_KEY)}
    if not named:
        return admission
    meant = read_meant(named.get(TENANT_KEY, ""), named.get(OWNER_KEY, ""))
    return replace(admission, caller=replace(admission.caller, meant=meant))

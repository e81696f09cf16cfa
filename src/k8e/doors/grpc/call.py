"""One call, whatever its method: what has arrived, until when, and what is answered.

Messages arrive as bytes and are parsed here: what is no message is the caller's mistake, which gRPC's own way would
call ours. They are taken from the connection one payer's turn after the other's, so that many large ones at once do not
fill the memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from k8e.core.access.access import Payer, find_payer
from k8e.core.access.keys import Admission
from k8e.core.errors import Fault
from k8e.core.model import Caller
from k8e.doors.grpc.errors import GrpcRefusal, malformed, stalled
from k8e.doors.grpc.message_limits import LARGE, PATIENCE, Arrival, MessageLimits
from k8e.doors.grpc.proxy import Connection, Reading

MARGIN: Final = 30.0  # for a call beyond what it waits for
STRANGERS_PATIENCE: Final = 10.0
STRANGERS_MESSAGE: Final = 64 << 10
_NOBODY: Final = -2  # strangers, told apart by where they are

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Handler:
    answer: Callable[[Call], Awaitable[None]]
    seconds: float = 60.0  # for a caller who names no deadline; more needs a reason
    strangers: bool = False  # may call it
    single: bool = False  # its one answer leaves together with the status: a turn of gRPC's wheels less


class Call:
    def __init__(
        self,
        context: Context,
        admitted: Admission | Fault,
        messages: MessageLimits,
        clock: asyncio.Timeout,
        source: str,
        connection: Connection | None,
        *,
        single: bool,
    ) -> None:
        self.source = source  # of a stranger
        self.reading = Reading.NOT
        self._connection = connection
        self.admission = admitted if isinstance(admitted, Admission) else None
        self.refusal = admitted if isinstance(admitted, Fault) else None
        self.withdrawn = False  # the caller was known, and is not any more
        self.given_up: Fault | GrpcRefusal | None = None  # why it ends before its time
        self.answer = b""  # of a handler that gives a single one
        self._single = single
        self._opened = False
        self._context = context
        self._messages = messages
        self._clock = clock
        self._held = AsyncExitStack()
        self._load = messages.memory.allocate(self.payer)
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
        """From now on; at most as long as the caller is known."""
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
        """The next message, None after the last. The one before is forgotten."""
        await self._forget()
        if self.admission is None:
            return await self._read_stranger(kind)
        arrival = Arrival(self._messages, self.payer, self.give_up)
        async with arrival.expect(patience):
            content = await self._receive(Reading.SOON)
            arrival.note()
            if content is grpc.aio.EOF:
                return None
            assert isinstance(content, bytes)
            if len(content) > LARGE:
                await self._held.enter_async_context(self._messages.large.take(self.payer))
            await self._load.add(len(content))
        return self._parse(kind, content)

    async def _read_stranger(self, kind: type[M]) -> M | None:
        """Strangers take no turns of those who are known: they have places of their own, and little to say."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(STRANGERS_PATIENCE, self.give_up, stalled(STRANGERS_PATIENCE))
        try:
            content = await self._receive(Reading.SOON)
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
        return self._messages.idle(self.payer)

    async def read_idly(self, kind: type[M]) -> M | None:
        """The same for a caller who may say nothing for hours: no other caller waits for them. Their messages are meant
        to be small, which their reader checks."""
        await self._forget()
        content = await self._receive(Reading.SOME_TIME)
        if content is grpc.aio.EOF:
            return None
        await self._load.add(len(content))
        return self._parse(kind, content)

    async def _receive(self, reading: Reading) -> Any:
        """The next message, in bytes, or the end."""
        self.reading = reading
        try:
            content = await self._context.read()
        finally:
            self.reading = Reading.NOT
        if self._connection is not None and content is not grpc.aio.EOF:
            self._connection.hand_on(len(content))
        return content

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
        and note that they were only after it has left: a caller who is cut off while their first message waits for a
        slow reader could not be told why, because gRPC would send them again and refuses to."""
        if self._opened:
            return
        self._opened = True
        opening = asyncio.ensure_future(self._context.send_initial_metadata(()))
        opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # also when the caller has left
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})
            raise

    async def close(self) -> None:
        await self._forget()

"""`AgentLink`: the host's side of one agent, and the entry point of the link."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from k8e.link.channel import Channel
from k8e.link.codec.frames import FrameType, Request
from k8e.link.codec.protocol import NONCE_SIZE, PARKING_GENERATION
from k8e.link.codec.records import RecordReader, parse_command
from k8e.link.codec.requests import encode_park
from k8e.link.command import AgentProcess, CommandChannel, end_abandoned
from k8e.link.dial import Dialer
from k8e.link.errors import AgentError, BrokenInput, Code, LinkError, ProtocolViolation
from k8e.link.files import Files
from k8e.link.model import CommandInfo, Completed, ExecSpec
from k8e.link.multiplexer import Multiplexer, Timing, deadline

# Far more than an agent keeps (1,024 ended ones) or a sandbox can run.
_MAX_COMMANDS: Final = 65_536
_SHOWN: Final = 60  # characters of a command in an error


class AgentLink(Files):
    """Implements `model.Sandbox` over connections that a dialer makes, one at a time.

    Closing it leaves the sandbox and its commands as they are.
    """

    def __init__(self, mux: Multiplexer) -> None:
        super().__init__(mux)

    @classmethod
    async def open(
        cls, dialer: Dialer, *, instance: bytes, deadline: float = 10.0, timing: Timing | None = None
    ) -> Self:
        """Connects and completes the handshake. Tries until the deadline, so that an agent may still be starting."""
        if len(instance) != NONCE_SIZE:
            raise ValueError(f"instance has {len(instance)} bytes, must have {NONCE_SIZE}")
        mux = Multiplexer(dialer, instance, timing or Timing())
        await mux.open(deadline)
        return cls(mux)

    async def close(self) -> None:
        await self._mux.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def failure(self) -> LinkError | None:
        """The reason why the link cannot be used any more; None while it can."""
        return self._mux.failure

    @property
    def agent_version(self) -> str | None:
        """None while there is no connection."""
        return self._mux.agent_version

    @property
    def queued(self) -> int:
        """Bytes that wait in the daemon for consumers or for the agent."""
        return self._mux.queued

    async def failed(self) -> LinkError:
        """Returns when the link is gone for good, with the reason; also after `close`."""
        while self._mux.failure is None:
            await self._mux.changed.wait()
        return self._mux.failure

    # Commands

    async def start(self, spec: ExecSpec) -> AgentProcess:
        subject = ascii(b" ".join(spec.argv)[:_SHOWN])[1:]
        if spec.parked and self._mux.generation < PARKING_GENERATION:
            spec = replace(spec, parked=False)
        environment = self._mux.environments.encode(spec.env)
        channel = CommandChannel(self._mux, self._mux.new_id(), spec, subject=subject, environment=environment)
        try:
            async with deadline(self._mux.timing.reply, f"starting {subject}"):
                await self._mux.begin(channel)
                await channel.wait_opened()
        except BaseException:
            # Cancelled or overdue: the command may have started without its caller knowing it.
            end_abandoned(self._mux, channel)
            raise
        return AgentProcess(self._mux, channel, spec)

    async def attach(
        self, command: int, stdout_from: int = 0, stderr_from: int = 0, *, hold: bool = False, keep: int = 0
    ) -> AgentProcess:
        if self._mux.find(command) is not None:
            raise AgentError(Code.BUSY, subject=f"command {command:016x} is attached here already")
        channel = CommandChannel(self._mux, command, None, (stdout_from, stderr_from), hold=hold, keep=keep)
        try:
            async with deadline(self._mux.timing.reply, f"attaching to {channel.subject}"):
                await self._mux.begin(channel)
                await channel.wait_opened()
        except BaseException:
            # The command ran before and stays.
            channel.abandon()
            self._mux.spawn(self._leave(channel))
            raise
        return AgentProcess(self._mux, channel, None, hold=hold)

    async def _leave(self, channel: CommandChannel) -> None:
        while channel.opened is None and channel.result is None and channel.error is None:
            if self._mux.find(channel.id) is not channel:
                return
            await channel.changed.wait()
        channel.detach()

    async def run(
        self,
        spec: ExecSpec,
        input: bytes = b"",  # noqa: A002 - as in subprocess.run
        limit: int = 64 << 20,
    ) -> Completed:
        """Runs a command to its end. Of each stream the first `limit` bytes are kept. The outcome has the totals: when
        they are larger there was more, or some was dropped while the connection was down."""
        if input and not spec.stdin:
            raise ValueError("input for a command without stdin")
        if spec.detached:
            raise ValueError("a detached command cannot be run to its end")
        process = await self.start(spec)
        stdout, stderr = _Collector(limit), _Collector(limit)
        try:
            process.stdout.divert(stdout)
            process.stderr.divert(stderr)
            with contextlib.suppress(BrokenInput):  # a command that reads less is no error
                if input:
                    await process.write(input)
                await process.close_stdin()
            outcome = await process.wait()
        except BaseException:
            end_abandoned(self._mux, process.channel)
            raise
        return Completed(outcome, stdout.take(), stderr.take())

    async def commands(self) -> Sequence[CommandInfo]:
        async with deadline(self._mux.timing.reply, "listing commands"):
            return await self._repeat(self._list_commands)

    async def _list_commands(self) -> list[CommandInfo]:
        channel = Channel(self._mux, Request(self._mux.new_id(), FrameType.COMMANDS, b""), "listing commands")
        reader = RecordReader(parse_command)
        found: list[CommandInfo] = []
        try:
            await self._mux.begin(channel)
            with self._mux.close_on_violation():
                while content := await channel.output.read():
                    found += reader.feed(content)
                    if len(found) > _MAX_COMMANDS:
                        raise ProtocolViolation("a list of commands without end")
                reader.finish()
            await channel.wait_result()
        finally:
            self._mux.drop(channel)
        return found

    async def park(self, spec: ExecSpec, loader: bytes, *, keep: float | None = None) -> None:
        subject = f"parking {ascii(spec.argv[0])[1:]}"
        payload = encode_park(spec, loader, keep)
        async with deadline(self._mux.timing.reply, subject):
            await self._mux.connected()
            if self._mux.generation < PARKING_GENERATION:
                raise AgentError(Code.UNSUPPORTED, subject=f"{subject}: this agent is older than that")
            channel = Channel(self._mux, Request(self._mux.new_id(), FrameType.PARK, payload), subject)
            try:
                await self._mux.begin(channel)
                if await channel.wait_result():
                    with self._mux.close_on_violation():
                        raise ProtocolViolation(f"RESULT of {subject} has the wrong size")
            finally:
                self._mux.drop(channel)

    async def release(self, command: int) -> None:
        await self._mux.connected()
        self._mux.release(command)


class _Collector:
    """Keeps the first bytes of a stream; how many there were in all is in the outcome."""

    def __init__(self, limit: int) -> None:
        self._chunks: list[bytes] = []
        self._room = limit

    def __call__(self, content: bytes) -> None:
        if self._room > 0:
            kept = content[: self._room]
            self._room -= len(kept)
            self._chunks.append(kept)

    def take(self) -> bytes:
        return b"".join(self._chunks)

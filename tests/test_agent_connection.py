"""The agent's side of a connection: who is let in, who is replaced, and what ends it."""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections.abc import Iterator

import pytest

from devel.sandboxes import Launched, launch_bare
from k8e.link import AgentLink, UnixDialer
from k8e.link.errors import Code, LinkError
from tests.frames import (
    ACK,
    ATTACH,
    CANCEL,
    COMMANDS,
    DATA,
    DETACH,
    END,
    EOF,
    EXEC,
    GOODBYE,
    HEADER,
    HELLO,
    LIST,
    OPENED,
    PING,
    PONG,
    READ,
    RELEASE,
    RESIZE,
    RESULT,
    SIGNAL,
    STAT,
    WRITE,
    Disconnected,
    RawLink,
    exec_payload,
    file_payload,
    frame,
    hello,
)
from tests.sandboxes import needs_root

pytestmark = needs_root
SUPERSEDED, PROTOCOL_ERROR, NO_COMMON_GENERATION, SHUTTING_DOWN = 1, 2, 3, 4


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Launched]:
    with launch_bare() as launched:
        yield launched


@pytest.fixture
def link(sandbox: Launched) -> Iterator[RawLink]:
    with greeted(sandbox) as link:
        yield link


@pytest.fixture
def fresh() -> Iterator[RawLink]:
    """To an agent that nobody else has used."""
    with launch_bare() as launched, greeted(launched) as link:
        yield link


@contextlib.contextmanager
def greeted(sandbox: Launched) -> Iterator[RawLink]:
    with RawLink.waiting(sandbox.socket) as link:
        link.greet()
        yield link


def is_dismissed(link: RawLink, reason: int) -> None:
    """What is left in the connection ends with GOODBYE, then with the end of the stream."""
    while (last := link.receive()).type != GOODBYE:
        pass
    assert struct.unpack("<I", last.payload) == (reason,)
    is_closed(link)


def is_closed(link: RawLink) -> None:
    with pytest.raises(Disconnected):
        while True:
            link.receive()


def code_of(link: RawLink, channel: int) -> int:
    return int(struct.unpack_from("<I", link.until(RESULT, channel).payload)[0])


class TestHandshake:
    def test_repeats_the_nonce_and_names_the_instance(self, sandbox: Launched) -> None:
        nonce = secrets.token_bytes(16)
        with RawLink.waiting(sandbox.socket) as link:
            link.send(hello(nonce))
            answer = link.receive()
        assert answer.type == HELLO
        magic, generation, zero = struct.unpack_from("<IHH", answer.payload)
        assert (magic, generation, zero) == (0x4145384B, 4, 0)
        assert answer.payload[8:24] == nonce
        assert answer.payload[24:40] == sandbox.instance
        assert 1 <= len(answer.payload[40:]) <= 64

    def test_may_arrive_byte_by_byte(self, sandbox: Launched) -> None:
        with RawLink.waiting(sandbox.socket) as link:
            for byte in hello(bytes(16)):
                link.send(bytes([byte]))
            assert link.receive().type == HELLO

    @pytest.mark.parametrize(("low", "high"), [(5, 9), (0, 3), (9, 5)])
    def test_without_a_common_generation_says_so_and_ends(self, sandbox: Launched, low: int, high: int) -> None:
        with RawLink.waiting(sandbox.socket) as link:
            link.send(hello(bytes(16), low, high))
            answer = link.receive()
            assert answer.type in (HELLO, GOODBYE)
            if answer.type == HELLO:
                assert struct.unpack_from("<H", answer.payload, 4) == (0,)
            is_closed(link)

    def test_with_a_wider_range_picks_its_own_generation(self, sandbox: Launched) -> None:
        with RawLink.waiting(sandbox.socket) as link:
            link.send(hello(bytes(16), 0, 65535))
            assert struct.unpack_from("<H", link.receive().payload, 4) == (4,)

    @pytest.mark.parametrize(
        "first",
        [
            frame(PING, 0, bytes(8)),
            frame(EXEC, 1, exec_payload(b"true")),
            hello(bytes(16), magic=0x12345678),
            frame(HELLO, 0, bytes(23)),
            frame(HELLO, 0, bytes(25)),
            frame(HELLO, 7, hello(bytes(16))[HEADER.size :]),
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"\xff" * 64,
        ],
        ids=["ping", "exec", "magic", "short", "long", "channel", "http", "ones"],
    )
    def test_anything_else_first_ends_the_connection(self, sandbox: Launched, first: bytes) -> None:
        with RawLink.waiting(sandbox.socket) as link:
            link.send(first.ljust(64, b"\0"))  # a HELLO's worth of bytes: less than that might still become one
            is_closed(link)

    async def test_of_another_instance_is_noticed_by_the_host(self, sandbox: Launched) -> None:
        with pytest.raises(LinkError):
            await AgentLink.open(UnixDialer(sandbox.socket), instance=secrets.token_bytes(16), deadline=5.0)


class TestReplacement:
    def test_a_new_host_replaces_the_old_one_which_is_told(self, sandbox: Launched) -> None:
        with greeted(sandbox) as old, greeted(sandbox) as new:
            is_dismissed(old, SUPERSEDED)
            assert new.run(b"sh", b"-c", b"exit 5") == 5

    def test_a_command_outlives_the_host_that_started_it(self, sandbox: Launched) -> None:
        with greeted(sandbox) as old:
            channel = old.request(EXEC, exec_payload(b"cat", flags=0))
            old.until(OPENED, channel)
            with greeted(sandbox) as new:
                new.request(ATTACH, struct.pack("<QQ", 0, 0), channel)
                new.until(OPENED, channel)
                new.send(frame(DATA, channel, struct.pack("<Q", 0) + b"hello"))
                new.send(frame(EOF, channel, struct.pack("<Q", 5)))
                assert new.until(DATA, channel).payload[8:] == b"hello"
                assert code_of(new, channel) == 0
                new.send(frame(RELEASE, channel))

    def test_silent_strangers_do_not_keep_a_host_out(self, sandbox: Launched) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(RawLink.waiting(sandbox.socket))
            link = stack.enter_context(greeted(sandbox))
            assert link.run(b"true") == 0

    def test_strangers_do_not_disturb_the_host(self, sandbox: Launched, link: RawLink) -> None:
        channel = link.request(EXEC, exec_payload(b"cat", flags=0))
        link.until(OPENED, channel)
        for seed in range(50):
            with RawLink.waiting(sandbox.socket) as stranger:
                with contextlib.suppress(Disconnected):
                    stranger.send(secrets.token_bytes(seed * 3 + 1))
                if seed % 2:
                    with contextlib.suppress(Disconnected):
                        stranger.send(frame(EXEC, seed, exec_payload(b"true")))
        link.send(frame(DATA, channel, struct.pack("<Q", 0) + b"still here"))
        assert link.until(DATA, channel).payload[8:] == b"still here"
        link.send(frame(END, channel, struct.pack("<I", 1000)))
        assert code_of(link, channel) == 0
        link.send(frame(RELEASE, channel))


class TestChannels:
    def test_ping_is_answered_with_its_token(self, link: RawLink) -> None:
        for token in (0, 1, 0xFFFFFFFFFFFFFFFF):
            link.send(frame(PING, 0, struct.pack("<Q", token)))
            answer = link.receive()
            assert (answer.type, answer.payload) == (PONG, struct.pack("<Q", token))

    def test_an_id_in_use_is_a_duplicate_and_runs_nothing(self, link: RawLink) -> None:
        channel = link.request(EXEC, exec_payload(b"sh", b"-c", b"exit 3", flags=4))  # detached: nothing to wait for
        link.until(RESULT, channel)
        for _ in range(3):
            link.request(EXEC, exec_payload(b"touch", b"/tmp/ran-twice"), channel)
            assert code_of(link, channel) == Code.DUPLICATE
        stat = link.request(STAT, file_payload(b"/tmp/ran-twice"))
        assert code_of(link, stat) == Code.NOT_FOUND
        link.send(frame(RELEASE, channel))

    def test_attaching_to_what_is_not_there_is_unknown(self, link: RawLink) -> None:
        channel = link.request(ATTACH, struct.pack("<QQ", 0, 0))
        assert code_of(link, channel) == Code.UNKNOWN_COMMAND

    def test_frames_for_unknown_channels_are_ignored(self, link: RawLink) -> None:
        for kind, payload in (
            (DATA, bytes(9)),
            (EOF, bytes(8)),
            (ACK, bytes(8)),
            (SIGNAL, bytes(8)),
            (END, bytes(4)),
            (RESIZE, bytes(4)),
            (DETACH, b""),
            (RELEASE, b""),
            (CANCEL, b""),
        ):
            link.send(frame(kind, 12345, payload, stream=1 if kind == ACK else 0))
        assert link.run(b"true") == 0

    def test_a_terminal_without_stdin_takes_no_input(self, fresh: RawLink) -> None:
        """Content for it is dropped, or ends the connection; in no case the agent."""
        channel = fresh.request(EXEC, exec_payload(b"sleep", b"1000", flags=1 | 2))
        fresh.until(OPENED, channel)
        fresh.send(frame(DATA, channel, bytes(8) + b"nobody reads this"))
        fresh.send(frame(PING, 0, bytes(8)))
        fresh.until(PONG, 0)
        fresh.send(frame(END, channel, struct.pack("<I", 0)))
        assert code_of(fresh, channel) == 0

    def test_the_number_of_kept_commands_is_limited(self, fresh: RawLink) -> None:
        link = fresh
        kept = []
        while True:
            channel = link.request(EXEC, exec_payload(b"/bin/true", flags=2 | 4))
            code = code_of(link, channel)
            if code != Code.DETACHED:
                break
            kept.append(channel)
            assert len(kept) <= 1024
        assert code == Code.TOO_MANY
        assert len(kept) == 1024
        link.send(frame(RELEASE, kept[0]))
        # A running command is not forgotten: the release counts once it has ended.
        while True:
            channel = link.request(EXEC, exec_payload(b"/bin/true", flags=2 | 4))
            if (code := code_of(link, channel)) != Code.TOO_MANY:
                break
            link.send(frame(RELEASE, kept[0]))
        assert code == Code.DETACHED
        for one in (*kept, channel):
            link.request(ATTACH, struct.pack("<QQ", 0, 0), one)
            code_of(link, one)
            link.send(frame(RELEASE, one))
        assert fresh.run(b"true") == 0


class TestViolations:
    """What only a broken host sends. The connection ends; the agent and its commands stay."""

    @pytest.mark.parametrize(
        "wrong",
        [
            frame(99, 1, b""),
            frame(RESULT, 1, bytes(8)),
            frame(OPENED, 1, bytes(8)),
            frame(HELLO, 0, bytes(24)),
            HEADER.pack(0xFFFFFFFF, EXEC, 0, 0, 1),
            HEADER.pack(2097153, EXEC, 0, 0, 1),
            HEADER.pack(65537, STAT, 0, 0, 1),
            HEADER.pack(65545, DATA, 0, 0, 1),
            frame(PING, 0, bytes(7)),
            frame(PING, 5, bytes(8)),
            frame(EXEC, 0, exec_payload(b"true")),
            frame(EXEC, 3, bytes(8)),
            frame(STAT, 3, bytes(39)),
            frame(ATTACH, 3, bytes(15)),
            frame(COMMANDS, 3, b"x"),
        ],
        ids=lambda wrong: f"type{wrong[4]}-length{int.from_bytes(wrong[:4], 'little')}",
    )
    def test_ends_the_connection_and_nothing_else(self, sandbox: Launched, wrong: bytes) -> None:
        with greeted(sandbox) as link:
            link.send(wrong)
            is_dismissed(link, PROTOCOL_ERROR)
        with greeted(sandbox) as again:
            assert again.run(b"true") == 0

    @pytest.mark.parametrize("offset", [1, 1 << 40, (1 << 64) - 1])
    def test_content_from_the_wrong_place(self, sandbox: Launched, offset: int) -> None:
        with greeted(sandbox) as link:
            channel = link.request(EXEC, exec_payload(b"cat", flags=0))
            link.until(OPENED, channel)
            link.send(frame(DATA, channel, struct.pack("<Q", offset) + b"x"))
            is_dismissed(link, PROTOCOL_ERROR)
        with greeted(sandbox) as again:
            end_command(again, channel)

    def test_content_beyond_the_window(self, sandbox: Launched) -> None:
        with greeted(sandbox) as link:
            channel = link.request(EXEC, exec_payload(b"sleep", b"1000", flags=0))
            link.until(OPENED, channel)
            with contextlib.suppress(Disconnected):
                for start in range(0, 1 << 20, 65536):
                    link.send(frame(DATA, channel, struct.pack("<Q", start) + bytes(65536)))
            is_closed(link)
        with greeted(sandbox) as again:
            end_command(again, channel)

    def test_acknowledging_what_was_never_sent(self, sandbox: Launched) -> None:
        with greeted(sandbox) as link:
            channel = link.request(EXEC, exec_payload(b"cat", flags=0))
            link.until(OPENED, channel)
            link.send(frame(ACK, channel, struct.pack("<Q", 5000), stream=1))
            is_dismissed(link, PROTOCOL_ERROR)
        with greeted(sandbox) as again:
            end_command(again, channel)


def end_command(link: RawLink, channel: int) -> None:
    link.request(ATTACH, struct.pack("<QQ", 0, 0), channel)
    link.send(frame(END, channel, struct.pack("<I", 0)))
    assert code_of(link, channel) == 0
    link.send(frame(RELEASE, channel))


class TestPatience:
    def test_a_host_that_reads_no_answers_costs_no_memory(self) -> None:
        """Requests are not even taken while answers wait: nothing queues in the agent."""
        with launch_bare() as sandbox, greeted(sandbox) as link:
            link.socket.settimeout(1.0)
            with contextlib.suppress(TimeoutError):
                for _ in range(200_000):
                    link.send(frame(STAT, secrets.randbits(63), file_payload(b"/usr")))
            assert resident_kib(sandbox.agent_pid) < 1024
            with greeted(sandbox) as again:
                assert again.run(b"true") == 0

    def test_many_channels_that_nobody_reads_do_not_stop_the_rest(self, sandbox: Launched) -> None:
        with greeted(sandbox) as link:
            for _ in range(20):
                link.request(READ, file_payload(b"/usr/bin/python3.11"))
                link.request(LIST, file_payload(b"/usr/share", flags=1))
            channel = link.request(STAT, file_payload(b"/usr"))
            while (got := link.receive()).id != channel:
                assert got.type in (OPENED, DATA, EOF, RESULT)
            assert got.type == RESULT

    def test_an_unfinished_write_leaves_no_file_when_the_link_goes(self, sandbox: Launched) -> None:
        with greeted(sandbox) as link:
            channel = link.request(WRITE, file_payload(b"/small/unfinished"))
            link.until(OPENED, channel)
            link.send(frame(DATA, channel, struct.pack("<Q", 0) + bytes(60_000)))
        with greeted(sandbox) as again:
            channel = again.request(LIST, file_payload(b"/small"))
            assert struct.unpack_from("<IIQ", again.until(RESULT, channel).payload) == (0, 0, 0)


def resident_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))

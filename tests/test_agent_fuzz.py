"""The sanitized agent fed with noise, with frames that are right in form only, and with good frames gone bad.

Never a crash, a hang or a leak: afterwards it still works, has nobody left over, has not grown, and ends with status 0
and without a word from AddressSanitizer, UBSan or LeakSanitizer. All that as root of a sandbox with nothing to lose.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from devel.sandboxes import ASAN_AGENT, Launched, Variation, launch_bare
from tests.frames import (
    ACK,
    ATTACH,
    CANCEL,
    CHMOD,
    COMMANDS,
    CONNECT,
    DATA,
    DETACH,
    END,
    EOF,
    EXEC,
    FILE_REQUESTS,
    HEADER,
    LIST,
    MKDIR,
    MOVE,
    PARK,
    PING,
    READ,
    RELEASE,
    REMOVE,
    RESIZE,
    SIGNAL,
    STAT,
    WATCH,
    WRITE,
    Disconnected,
    RawLink,
    exec_payload,
    file_payload,
    frame,
    park_payload,
)
from tests.sandboxes import needs_root
from tests.shares import seed

pytestmark = needs_root

CASES = int(os.environ.get("K8E_FUZZ_CASES", "2000"))  # of each kind
SANITIZERS = {
    # Freed memory is kept aside to notice its use: not so much of it that growth could hide behind.
    "ASAN_OPTIONS": "detect_leaks=1:quarantine_size_mb=4:malloc_context_size=8:allocator_release_to_os_interval_ms=100",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}
GROWTH_KIB = 48 << 10
TIDY_AFTER = 1000  # cases: the agent keeps 1,024 ended commands, and a quarter of the requests are commands
PATHS = (
    b"/tmp/a",
    b"/tmp/b",
    b"/tmp",
    b"/tmp/fifo",
    b"/tmp/link",
    b"/usr/bin/env",
    b"/usr/share/doc",
    b"/absent",
    b"tmp/a",
)
COMMAND_LINES = (
    (b"true",),
    (b"/bin/sh", b"-c", b"exit 3"),
    (b"cat",),
    (b"head", b"-c", b"300000", b"/dev/zero"),
    (b"sh", b"-c", b"sleep 0.2 & echo out; echo err >&2"),
    (b"sleep", b"0.1"),
    (b"/no/such/program",),
)
INTERESTING = (0, 1, 2, 7, 8, 63, 64, 255, 256, 4095, 4096, 65535, 65536, 262144, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


@pytest.fixture
def sandbox() -> Iterator[Launched]:
    # Its socket is not inside, or a REMOVE of everything would end the test; the root is not writable.
    variation = Variation(
        agent=ASAN_AGENT,
        env=SANITIZERS,
        inherit_listener=True,
        bwrap=("--remount-ro", "/", "--remount-ro", "/workspace"),
    )
    with launch_bare(variation) as launched:
        yield launched


# As a command line and as one that is parked. Descriptor 63 is the conversation with the agent.
WAITING = [
    (b"bash", b"-c", script)
    for script in (
        b"true",
        b"printf P >&63; exec cat <&63 >/dev/null",
        b"printf P >&63; head -c1 <&63 >/dev/null; printf T >&63; exec 63>&-; cat; exit 3",
        b"printf P >&63; head -c1 <&63 >/dev/null; printf N >&63",
        b"printf P >&63; head -c1 <&63 >/dev/null; kill -9 $$",
        b"printf PT >&63",
        b"printf F >&63; exec cat <&63 >/dev/null",
        b"printf F >&63; head -c1 <&63 >/dev/null; printf F >&63",
        b"printf FP >&63",
        b"printf FFFOT >&63; sleep 0.05",
        b"printf PPPTTTNNN >&63",
        b"printf x >&63",
        b"exec 63>&-; sleep 0.05",
    )
]


class Generator:
    """Frames from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.channels: list[int] = []

    def channel(self) -> int:
        """Mostly one that was used before, so that frames meet a state."""
        if self.channels and self.random.random() < 0.8:
            return self.random.choice(self.channels[-8:])
        self.channels.append(self.random.getrandbits(63) | 1)
        return self.channels[-1]

    def new_channel(self) -> int:
        self.channels.append(self.random.getrandbits(63) | 1)
        return self.channels[-1]

    def number(self) -> int:
        return self.random.choice((self.random.choice(INTERESTING), self.random.getrandbits(32)))

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.choice((1, 15, 16, 17, 40, 100, 1000, 70_000)))

    def formed(self) -> bytes:
        """A good header, its type and length within what the protocol knows, around anything."""
        kind = self.random.choice((*range(50), *FILE_REQUESTS, EXEC, DATA, ACK))
        length = self.random.choice((0, 4, 8, 9, 16, 39, 40, 41, 52, 53, 100, 1000, 65536))
        return frame(kind, self.channel(), self.random.randbytes(length), self.random.choice((0, 0, 0, 1, 2, 3)))

    def parked(self) -> bytes:
        """What waits is played by a shell: the agent sees a library's answers, good ones and bad ones."""
        flags = self.random.choice((0, 0, 0, 0, 1, 2, 16))
        return park_payload(*self.random.choice(WAITING), keep=self.random.choice((1, 20, 100, 500)), flags=flags)

    def request(self) -> bytes:
        pick = self.random.random()
        if pick < 0.08:
            return frame(PARK, self.new_channel(), self.parked())
        if pick < 0.16:
            flags = self.random.choice((16, 18, 20, 22))
            return frame(EXEC, self.new_channel(), exec_payload(*self.random.choice(WAITING), flags=flags))
        if pick < 0.25:
            return frame(EXEC, self.new_channel(), self.command())
        if pick < 0.6:
            return frame(self.random.choice(FILE_REQUESTS), self.new_channel(), self.file())
        return self.follow_up()

    def command(self) -> bytes:
        return exec_payload(
            *self.random.choice(COMMAND_LINES),
            flags=self.random.choice((0, 1, 2, 3, 4, 6, 8)),
            uid=self.random.choice((0xFFFFFFFF, 0, 12345)),
            timeout=self.random.choice((0, 1, 200)),
            window=self.random.choice((0, 16384, 65536, 1 << 20, 0xFFFFFFFF)),
        )

    def file(self) -> bytes:
        return file_payload(
            self.random.choice(PATHS),
            self.random.choice((b"", *PATHS)),
            flags=self.random.choice((0, 1, 2, 3)),
            mode=self.random.choice((0xFFFFFFFF, 0o644, 0o777, self.number())),
            offset=self.random.choice((0, 1, 80, 1 << 40, (1 << 64) - 1)),
            length=self.random.choice((0, 10, (1 << 64) - 1)),
        )

    def follow_up(self) -> bytes:
        """Something about a channel that may or may not exist."""
        number, where = self.number(), self.channel()
        kind, payload, stream = self.random.choice(
            (
                (DATA, struct.pack("<Q", 0) + self.random.randbytes(100), 0),
                (DATA, struct.pack("<Q", number) + self.random.randbytes(1000), 0),
                (EOF, struct.pack("<Q", self.random.choice((0, 100, number))), 0),
                (ACK, struct.pack("<Q", self.random.choice((0, 4, 65536, number))), self.random.choice((1, 2))),
                (SIGNAL, struct.pack("<II", self.random.choice((0, 2, 15, 9, 64, number)), number % 4), 0),
                (END, struct.pack("<I", self.random.choice((0, 50, number))), 0),
                (RESIZE, struct.pack("<HH", number & 0xFFFF, 80), 0),
                (DETACH, b"", 0),
                (RELEASE, b"", 0),
                (CANCEL, b"", 0),
                (ATTACH, struct.pack("<QQ", self.random.choice((0, number)), 0), 0),
                (COMMANDS, b"", 0),
                (PING, struct.pack("<Q", number), 0),
            )
        )
        return frame(kind, 0 if kind == PING else where, payload, stream)

    def mutated(self) -> bytes:
        """A good frame with a few bytes or one number changed, cut short, or with something put in."""
        data = bytearray(self.request())
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            at = self.random.randrange(len(data)) if data else 0
            change = self.random.randrange(5)
            if change == 0:
                data[at : at + 1] = self.random.randbytes(1)
            elif change == 1:
                data[at : at + 4] = struct.pack("<I", self.number())
            elif change == 2:
                del data[at:]
            elif change == 3:
                data[at:at] = self.random.randbytes(self.random.randrange(1, 30))
            elif len(data) >= HEADER.size:
                struct.pack_into("<I", data, 0, len(data) - HEADER.size)  # the length right again
        return bytes(data)


@contextlib.contextmanager
def greeted(sandbox: Launched) -> Iterator[RawLink]:
    """A connection; when the agent does not answer, what became of it is the error."""
    try:
        with RawLink.waiting(sandbox.socket) as link:
            link.greet()
            yield link
    except (TimeoutError, Disconnected) as error:
        status = sandbox.runtime.poll()
        words = sandbox.stderr.read_text() if sandbox.stderr else ""
        raise AssertionError(f"no answer from the agent (status {status}): {words}") from error


def feed(sandbox: Launched, cases: int, make: Callable[[], bytes]) -> None:
    """Sends what is made, over as many connections as the agent makes us need."""
    with contextlib.ExitStack() as stack:
        link: RawLink | None = None
        for number in range(cases):
            if link is None:
                link = stack.enter_context(greeted(sandbox))
            try:
                link.send(make())
                if number % 7 == 0:
                    drain(link)
            except Disconnected:
                stack.close()
                link = None
            if number % 100 == 99:
                works(sandbox)
                stack.close()
                link = None
            if number % TIDY_AFTER == TIDY_AFTER - 1:
                clear(sandbox)


def drain(link: RawLink) -> None:
    """Takes what the agent has sent, without waiting for more: an agent may stop listening to those who do not read."""
    link.socket.setblocking(False)
    try:
        while link.socket.recv(1 << 20):
            pass
        raise Disconnected
    except BlockingIOError:
        return
    except ConnectionResetError as error:
        raise Disconnected from error
    finally:
        link.socket.settimeout(20.0)


def works(sandbox: Launched) -> None:
    with greeted(sandbox) as link:
        assert link.run(b"sh", b"-c", b"exit 7") == 7


def clear(sandbox: Launched) -> None:
    """Ends and forgets every command that fuzzing has left, until none is listed and no process is there."""
    deadline, others = time.monotonic() + 20, list[int]()
    with greeted(sandbox) as link:
        # Parking another of the kind lets those go that wait.
        link.until_result(link.request(PARK, park_payload(b"bash", b"-c", b"true")))
        # What is only just being started is in no list yet; its processes are.
        while (listed := list_commands(link)) or (others := other_processes(sandbox)):
            assert time.monotonic() < deadline, (listed, [describe(pid) for pid in others])
            for channel in listed:
                link.request(ATTACH, struct.pack("<QQ", 0, 0), channel)
                link.send(frame(END, channel, struct.pack("<I", 0)))
                link.until_result(channel)
                link.send(frame(RELEASE, channel))


def list_commands(link: RawLink) -> list[int]:
    channel = link.request(COMMANDS, b"")
    records = link.until_result(channel)
    found, at = [], 0
    while at < len(records):
        (length,) = struct.unpack_from("<I", records, at)
        found.append(struct.unpack_from("<Q", records, at + 8)[0])
        at += 4 + length
    return found


def resident_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))


def ends_cleanly(sandbox: Launched) -> None:
    assert sandbox.stderr is not None
    os.kill(sandbox.agent_pid, signal.SIGTERM)
    status = sandbox.runtime.wait(30)
    words = sandbox.stderr.read_text()
    assert not words, words
    assert status == 0


@pytest.mark.parametrize("kind", ["noise", "formed", "request", "mutated"])
def test_agent_survives(sandbox: Launched, kind: str) -> None:
    generator = Generator(seed(f"agent, {kind}"))
    feed(sandbox, CASES // 4, getattr(generator, kind))
    clear(sandbox)
    before = resident_kib(sandbox.agent_pid)
    feed(sandbox, CASES, getattr(generator, kind))
    clear(sandbox)
    works(sandbox)
    assert resident_kib(sandbox.agent_pid) - before < GROWTH_KIB
    ends_cleanly(sandbox)


def other_processes(sandbox: Launched) -> list[int]:
    """Whoever is in the sandbox but the agent, zombies included."""
    namespace = os.readlink(f"/proc/{sandbox.agent_pid}/ns/pid")
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if pid != sandbox.agent_pid and os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                found.append(pid)
        except OSError:
            continue  # gone meanwhile
    return found


def describe(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read()
    except OSError:
        return f"{pid} (gone)"


def test_agent_survives_noise_before_the_handshake(sandbox: Launched) -> None:
    generator = Generator(seed("agent, before the handshake"))
    for _ in range(CASES // 2):
        with RawLink.waiting(sandbox.socket) as link, contextlib.suppress(Disconnected):
            link.send(generator.noise())
    works(sandbox)
    ends_cleanly(sandbox)


def test_agent_survives_hosts_that_leave_at_any_moment(sandbox: Launched) -> None:
    """Each connection is cut in the middle of something: a frame, an answer, a stream, a walk."""
    generator = Generator(seed("agent, hosts that leave"))
    for number in range(CASES // 4):
        with greeted(sandbox) as link, contextlib.suppress(Disconnected):
            channel = generator.new_channel()
            link.send(frame(EXEC, channel, exec_payload(b"head", b"-c", b"1000000", b"/dev/zero")))
            link.send(frame(READ, generator.new_channel(), file_payload(b"/usr/bin/env")))
            link.send(frame(LIST, generator.new_channel(), file_payload(b"/usr/share", flags=1)))
            link.send(frame(WRITE, generator.new_channel(), file_payload(b"/tmp/file")))
            link.send(frame(WATCH, generator.new_channel(), file_payload(b"/tmp")))
            link.send(frame(DATA, generator.channels[-2], struct.pack("<Q", 0) + secrets.token_bytes(500)))
            link.send(frame(EXEC, generator.new_channel(), exec_payload(b"cat", flags=0))[: 20 + number % 60])
            if number % 3:
                link.socket.recv(1 + number % 5000)
        if number % 50 == 49:
            clear(sandbox)
    clear(sandbox)
    works(sandbox)
    ends_cleanly(sandbox)


def test_every_file_request_on_everything(sandbox: Launched) -> None:
    """Not random: each operation meets each kind of file, twice."""
    script = (
        b"cd /tmp; mkdir d; echo x > f; mkfifo p; ln -s f l; ln -s loop loop; ln -s gone g; mkdir -p deep/a; touch d/x"
    )
    with greeted(sandbox) as link:
        for _ in range(2):
            link.run(b"sh", b"-c", script)
            for kind in (STAT, READ, LIST, CHMOD, WATCH, CONNECT, MKDIR, WRITE, MOVE, REMOVE):
                for path in (b"f", b"d", b"p", b"l", b"loop", b"g", b"deep", b"absent", b"f/x", b"", b"x" * 300):
                    for flags in range(4):
                        payload = file_payload(b"/tmp/" + path, b"/tmp/other", flags=flags, offset=1, mode=0o700)
                        channel = link.request(kind, payload)
                        if kind == WRITE:
                            link.send(frame(EOF, channel, bytes(8)))
                        elif kind in (WATCH, CONNECT):
                            link.send(frame(CANCEL, channel))
                        link.until_result(channel)
    works(sandbox)
    ends_cleanly(sandbox)

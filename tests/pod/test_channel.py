"""The channel between a gateway and the agent of a pod: who gets in, and what a neighbour can do. The threats are those
of docs/kubernetes-channel.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from devel.sandboxes import POD_AGENT, Variation
from k8e.link import AgentLink, Timing
from k8e.link.errors import LinkLost, ProtocolViolation
from k8e.link.model import ExecSpec
from k8e.link.noise import GatewayKey
from k8e.link.noise.handshake import ANSWER_SIZE
from k8e.link.noise.stream import PREFIX
from tests.frames import EXEC, GOODBYE, HELLO, PING, PONG, RESULT, Disconnected, exec_payload, frame, hello
from tests.pod.rig import HERE, NEIGHBOUR, Pod, SealedLink, greeted, is_closed, launch_pod, take
from tests.sandboxes import PATH, needs_root

pytestmark = needs_root
SUPERSEDED, SHUTTING_DOWN = 1, 4
SLOTS = 16  # of peers
ECHO = ExecSpec((b"echo", b"here"), env=(PATH,), stdin=False)


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    with launch_pod() as launched:
        yield launched


def answers(link: SealedLink) -> None:
    token = secrets.token_bytes(8)
    link.send(frame(PING, 0, token))
    assert link.until(PONG, 0).payload == token


def reason_of(link: SealedLink) -> int:
    while (last := link.receive()).type != GOODBYE:
        pass
    return int(struct.unpack("<I", last.payload)[0])


def greeting() -> bytes:
    """The first message of a peer."""
    return PREFIX.pack(32) + GatewayKey.generate().public


class TestGateway:
    async def test_runs_commands(self, pod: Pod) -> None:
        dialer = pod.dialer()
        async with await AgentLink.open(dialer, instance=dialer.instance, deadline=20) as link:
            assert (await link.run(ECHO)).stdout == b"here\n"

    async def test_with_another_key_is_not_let_in(self, pod: Pod) -> None:
        dialer = pod.dialer(key=GatewayKey.generate())
        with pytest.raises(LinkLost, match="handshake"):
            await AgentLink.open(dialer, instance=dialer.instance, deadline=0.5)

    async def test_that_meant_another_pod_notices_it(self, pod: Pod) -> None:
        """The address of a pod that is gone is given to the next one."""
        dialer = pod.dialer(uid=str(uuid.uuid4()))
        with pytest.raises(LinkLost, match="UID"):
            await AgentLink.open(dialer, instance=dialer.instance, deadline=0.5)

    async def test_pins_the_key_before_it_says_anything(self, pod: Pod) -> None:
        pinned = []

        async def pin(key: bytes) -> None:
            pinned.append(key)
            raise ProtocolViolation("another gateway has pinned another key")

        dialer = pod.dialer(pin=pin)
        with greeted(pod) as other:
            with pytest.raises(ProtocolViolation, match="another gateway"):
                await AgentLink.open(dialer, instance=dialer.instance, deadline=20)
            answers(other)  # a HELLO would have replaced it
            assert pinned == [other.peer]
        assert dialer.pinned is None

    async def test_pins_once_and_then_wants_the_same_key(self, pod: Pod) -> None:
        pinned = []

        async def pin(key: bytes) -> None:
            pinned.append(key)

        dialer = pod.dialer(pin=pin)
        for _ in range(2):
            async with await AgentLink.open(dialer, instance=dialer.instance, deadline=20):
                pass
        assert pinned == [dialer.pinned]
        other = pod.dialer(pinned=secrets.token_bytes(32))
        with pytest.raises(ProtocolViolation, match="another agent"):
            await AgentLink.open(other, instance=other.instance, deadline=20)

    def test_meets_a_fresh_key_at_every_start_of_an_agent(self, pod: Pod) -> None:
        with launch_pod(key=pod.key) as second, greeted(pod) as one, greeted(second) as other:
            assert one.peer != other.peer

    def test_that_comes_second_replaces_the_first(self, pod: Pod) -> None:
        with greeted(pod) as old, greeted(pod) as new:
            assert reason_of(old) == SUPERSEDED
            assert is_closed(old.socket)
            assert new.run(b"sh", b"-c", b"exit 5") == 5

    def test_may_send_its_bytes_one_by_one(self, pod: Pod) -> None:
        with pod.gateway() as link:
            link.sent.clear()
            put, link.put = link.put, lambda data: None  # type: ignore[method-assign]
            nonce = secrets.token_bytes(16)
            sealed = b"".join(_seal(link, part) for part in (hello(nonce)[:7], hello(nonce)[7:]))
            for byte in sealed:
                put(bytes([byte]))
            assert link.receive().type == HELLO

    def test_that_does_not_read_stops_its_command_only(self, pod: Pod) -> None:
        with greeted(pod) as slow:
            slow.request(EXEC, exec_payload(b"cat", b"/dev/zero", window=1 << 20))
            with greeted(pod) as new:
                assert new.run(b"true") == 0

    def test_hears_that_the_agent_ends(self) -> None:
        with launch_pod() as pod, greeted(pod) as link:
            os.kill(pod.launched.agent_pid, signal.SIGTERM)
            assert reason_of(link) == SHUTTING_DOWN
            assert pod.launched.runtime.wait(20) == 0


def _seal(link: SealedLink, part: bytes) -> bytes:
    sealed = link.sealing.seal(part)
    return PREFIX.pack(len(sealed)) + sealed


class TestNeighbour:
    def test_that_replays_a_gateway_gets_nowhere(self, pod: Pod) -> None:
        with greeted(pod) as link:
            link.request(EXEC, exec_payload(b"touch", b"/tmp/replayed"), 77)
            link.until(RESULT, 77)
            recorded = b"".join(link.sent)
            link.run(b"rm", b"/tmp/replayed")
            first, rest = recorded[:34], recorded[34:]
            heard = set()
            for _ in range(3):
                with pod.connect(NEIGHBOUR) as peer:
                    peer.sendall(first)
                    heard.add(take(peer, PREFIX.size + ANSWER_SIZE))
                    with contextlib.suppress(OSError):
                        peer.sendall(rest)
                    assert is_closed(peer)
            assert len(heard) == 3, "an ephemeral key is used once"
            answers(link)
            assert link.run(b"test", b"-e", b"/tmp/replayed") == 1

    @pytest.mark.parametrize(
        "first",
        [
            PREFIX.pack(0),
            PREFIX.pack(31) + bytes(31),
            PREFIX.pack(33) + bytes(33),
            PREFIX.pack(65535) + bytes(65535),
            PREFIX.pack(32) + bytes(32),  # a point of low order
            b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n",
            hello(bytes(16)),  # as over a unix socket
        ],
        ids=["empty", "short", "long", "huge", "low order", "http", "hello"],
    )
    def test_that_sends_no_key_is_shown_out(self, pod: Pod, first: bytes) -> None:
        with pod.connect(NEIGHBOUR) as peer:
            with contextlib.suppress(OSError):
                peer.sendall(first)
            assert is_closed(peer)

    @pytest.mark.parametrize("record", [0, 1, 16, 17, 56, 256, 257, 65535])
    def test_that_cannot_read_the_answer_cannot_go_on(self, pod: Pod, record: int) -> None:
        with greeted(pod) as link, pod.connect(NEIGHBOUR) as peer:
            peer.sendall(greeting())
            take(peer, PREFIX.size + ANSWER_SIZE)
            with contextlib.suppress(OSError):
                peer.sendall(PREFIX.pack(record) + secrets.token_bytes(record))
            assert is_closed(peer)
            answers(link)

    def test_that_says_nothing_is_shown_out_after_a_while(self, pod: Pod) -> None:
        with pod.connect(NEIGHBOUR) as silent, pod.connect(NEIGHBOUR) as half, pod.connect(NEIGHBOUR) as answered:
            half.sendall(greeting()[:20])
            answered.sendall(greeting())
            take(answered, PREFIX.size + ANSWER_SIZE)
            for peer in (silent, half, answered):
                assert is_closed(peer)

    def test_that_floods_pushes_out_itself(self, pod: Pod) -> None:
        """A gateway that is slow to shake hands stays, whatever comes from another address meanwhile."""
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(pod.gateway())  # has shaken hands, but not proved itself
            for _ in range(8 * SLOTS):
                stack.enter_context(pod.connect(NEIGHBOUR))
            link.greet()
            answers(link)
            assert count_descriptors(pod) < 3 * SLOTS

    def test_that_floods_with_keys_has_few_answers(self, pod: Pod) -> None:
        """An answer costs the pod time on a processor; to an address that never proves itself there are few."""
        answered, begin = 0, time.monotonic()
        for _ in range(20 * SLOTS):
            with pod.connect(NEIGHBOUR) as peer, contextlib.suppress(Disconnected, OSError):
                peer.sendall(greeting())
                take(peer, PREFIX.size + ANSWER_SIZE)
                answered += 1
        # Sixteen at once, and one more in each 20 ms.
        assert 0 < answered <= SLOTS + 1 + (time.monotonic() - begin) / 0.020
        for _ in range(4 * SLOTS):  # the gateway proves itself each time
            with greeted(pod) as link:
                answers(link)

    def test_costs_no_memory(self, pod: Pod) -> None:
        with greeted(pod) as link:
            answers(link)
        before = resident_kib(pod)
        for _ in range(10 * SLOTS):
            with pod.connect(NEIGHBOUR) as peer, contextlib.suppress(OSError):
                peer.sendall(greeting() + secrets.token_bytes(300))
        assert resident_kib(pod) - before < 128


def count_descriptors(pod: Pod) -> int:
    return len(os.listdir(f"/proc/{pod.launched.agent_pid}/fd"))


def resident_kib(pod: Pod) -> int:
    status = Path(f"/proc/{pod.launched.agent_pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


class Wire:
    """Carries bytes between gateways and an agent, and may change what it carries."""

    def __init__(self, port: int, change: Callable[[int, bool, bytes], bytes]) -> None:
        self.port = port
        self.connections = 0
        self._change = change

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        there, back = await asyncio.open_connection(HERE, self.port)
        ways = ((reader, back, True), (there, writer, False))
        try:
            await asyncio.gather(*(self._copy(number, *way) for way in ways), return_exceptions=True)
        except asyncio.CancelledError:
            pass  # the test is over

    async def _copy(self, number: int, source: asyncio.StreamReader, to: asyncio.StreamWriter, inward: bool) -> None:
        try:
            while content := await source.read(65536):
                to.write(self._change(number, inward, content))
                await to.drain()
        finally:
            to.close()


@contextlib.asynccontextmanager
async def wire(pod: Pod, change: Callable[[int, bool, bytes], bytes]) -> AsyncIterator[tuple[Wire, int]]:
    carried = Wire(pod.port, change)
    server = await asyncio.start_server(carried.carry, HERE, 0)
    async with server:
        yield carried, server.sockets[0].getsockname()[1]


class TestManInTheMiddle:
    @pytest.mark.parametrize("inward", [True, False], ids=["to the agent", "from the agent"])
    @pytest.mark.parametrize("place", [0, 1, 2, 33, 34, 60, 100, 150, 40_000])
    async def test_a_flipped_bit_breaks_a_connection_and_nothing_else(self, pod: Pod, inward: bool, place: int) -> None:
        """Of the first connection one bit is changed. The link finds that it is broken, dials again, and goes on: what
        was sent arrives exactly once and as it was."""
        passed = 0

        def flip(number: int, way: bool, content: bytes) -> bytes:
            nonlocal passed
            if number > 1 or way is not inward:
                return content
            at, passed = place - passed, passed + len(content)
            if 0 <= at < len(content):
                return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]
            return content

        content = secrets.token_bytes(200_000)
        async with wire(pod, flip) as (carried, port):
            dialer = pod.dialer(port)
            timing = Timing(handshake=2.0)
            async with await AgentLink.open(dialer, instance=dialer.instance, deadline=20, timing=timing) as link:
                done = await link.run(ExecSpec((b"cat",), env=(PATH,)), input=content)
        assert done.stdout == content
        assert carried.connections >= 2

    async def test_a_connection_that_is_cut_is_dialled_again(self, pod: Pod) -> None:
        def cut(number: int, way: bool, content: bytes) -> bytes:
            if number <= 5 and len(content) > 200:
                raise ConnectionResetError
            return content

        content = secrets.token_bytes(300_000)
        async with wire(pod, cut) as (carried, port):
            dialer = pod.dialer(port)
            async with await AgentLink.open(dialer, instance=dialer.instance, deadline=20) as link:
                done = await link.run(ExecSpec((b"cat",), env=(PATH,)), input=content)
        assert done.stdout == content
        assert carried.connections >= 6

    async def test_reads_nothing_of_it(self, pod: Pod) -> None:
        """Neither the pod's key nor its UID nor a word of a command is to be seen."""
        heard = bytearray()

        def listen(number: int, way: bool, content: bytes) -> bytes:
            heard.extend(content)
            return content

        async with wire(pod, listen) as (_, port):
            dialer = pod.dialer(port)
            async with await AgentLink.open(dialer, instance=dialer.instance, deadline=20) as link:
                assert (await link.run(ECHO)).stdout == b"here\n"
        assert dialer.pinned is not None
        for secret in (dialer.pinned, dialer.instance, b"here", b"echo", b"K8EA"):
            assert secret not in heard


class TestStart:
    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["--address", "127.0.0.1", "--port", "0", "--instance", "0" * 32],
            ["--address", "127.0.0.1", "--port", "0", "--gateway", "0" * 64],
            ["--address", "127.0.0.1", "--gateway", "0" * 64, "--instance", "0" * 32],
            ["--address", "127.0.0.1", "--port", "65536", "--gateway", "0" * 64, "--instance", "0" * 32],
            ["--address", "localhost", "--port", "0", "--gateway", "0" * 64, "--instance", "0" * 32],
            ["--address", "127.0.0.1", "--port", "0", "--gateway", "0" * 62, "--instance", "0" * 32],
            ["--address", "127.0.0.1", "--port", "0", "--gateway", "0" * 66, "--instance", "0" * 32],
            ["--address", "127.0.0.1", "--port", "0", "--gateway", "0" * 64, "--instance", "$(K8E_POD_UID)"],
            ["--fd", "0", "--gateway", "0" * 64, "--instance", "0" * 32],
            ["--listen", "/run/agent.sock", "--gateway", "0" * 64, "--instance", "0" * 32],
        ],
        ids=lambda arguments: " ".join(arguments)[:60],
    )
    def test_refuses_what_is_missing_or_wrong(self, arguments: list[str]) -> None:
        done = subprocess.run([POD_AGENT, *arguments], capture_output=True, text=True, timeout=20)
        assert done.returncode == 70
        assert done.stderr.startswith("k8e-agent: ")

    def test_refuses_a_port_that_is_taken(self) -> None:
        with socket.create_server((HERE, 0)) as server:
            port = str(server.getsockname()[1])
            arguments = ["--address", HERE, "--port", port, "--gateway", "0" * 64, "--instance", "0" * 32]
            done = subprocess.run([POD_AGENT, *arguments], capture_output=True, timeout=20)
        assert done.returncode == 70

    def test_installs_itself_and_the_loader(self, tmp_path: Path) -> None:
        image, volume = tmp_path / "image", tmp_path / "volume"
        image.mkdir()
        volume.mkdir()
        for name in ("k8e-agent-pod", "k8e-loader.so"):
            (image / name).write_bytes(POD_AGENT.with_name(name).read_bytes())
        (image / "k8e-agent-pod").chmod(0o755)
        for names in (["k8e-agent-pod", "k8e-loader.so"], ["k8e-agent-pod"]):
            subprocess.run([image / "k8e-agent-pod", "--install", volume], check=True, timeout=20)
            assert sorted(path.name for path in volume.iterdir()) == ["k8e-agent-pod", "k8e-loader.so"]
            for name in names:
                assert (volume / name).read_bytes() == (image / name).read_bytes()
                assert (volume / name).stat().st_mode & 0o777 == 0o755
            (image / "k8e-loader.so").unlink(missing_ok=True)
        assert subprocess.run([image / "k8e-agent-pod", "--install", tmp_path / "absent"]).returncode == 70

    def test_takes_little_memory_when_idle(self) -> None:
        with launch_pod(Variation(agent=POD_AGENT)) as pod, greeted(pod) as link:
            channel = link.request(EXEC, exec_payload(b"head", b"-c", b"3000000", b"/dev/zero"))
            link.until(RESULT, channel)
            link.send(frame(41, channel))
            answers(link)
            wait_until(lambda: resident_kib(pod) <= 256)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_key_is_read_as_openssl_writes_it_and_not_shown() -> None:
    written = subprocess.run(["openssl", "genpkey", "-algorithm", "X25519"], capture_output=True, check=True).stdout
    key = GatewayKey.parse(written)
    assert GatewayKey.parse(key.pem()).public == key.public
    assert key.private.private_bytes_raw().hex() not in repr(key)
    other = subprocess.run(["openssl", "genpkey", "-algorithm", "ED25519"], capture_output=True, check=True).stdout
    for pem in (b"", b"nonsense", other):
        with pytest.raises(ValueError, match=r"."):
            GatewayKey.parse(pem)

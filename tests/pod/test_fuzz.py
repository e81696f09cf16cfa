"""The sanitized agent of pods fed with noise, with handshakes and records that were changed, and with peers that
leave at any moment. Never a crash, a hang or a leak: test_agent_fuzz.py says how that is seen."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from devel.sandboxes import ASAN_POD_AGENT, Variation
from k8e.link.noise import GatewayKey
from k8e.link.noise.handshake import ANSWER_SIZE
from k8e.link.noise.stream import PREFIX
from tests.frames import LIST, READ, Disconnected, exec_payload, file_payload, frame, hello
from tests.pod.rig import Pod, SealedLink, greeted, launch_pod, take
from tests.sandboxes import needs_root
from tests.shares import seed
from tests.test_agent_fuzz import CASES, SANITIZERS, Generator, drain, ends_cleanly

pytestmark = needs_root


@pytest.fixture
def pod() -> Iterator[Pod]:
    closed = ("--remount-ro", "/", "--remount-ro", "/workspace")
    with launch_pod(Variation(agent=ASAN_POD_AGENT, env=SANITIZERS, bwrap=closed)) as launched:
        yield launched


def works(pod: Pod) -> None:
    with greeted(pod) as link:
        assert link.run(b"sh", b"-c", b"exit 7") == 7


def source(chance: random.Random) -> str:
    return f"127.0.0.{chance.randrange(2, 40)}"


def mutate(chance: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(data)) if data else 0
        change = chance.randrange(4)
        if change == 0:
            data[at : at + 1] = chance.randbytes(1)
        elif change == 1:
            data[at : at + 2] = PREFIX.pack(chance.choice((0, 1, 15, 16, 17, 31, 32, 33, 256, 257, 65519, 65535)))
        elif change == 2:
            del data[at:]
        else:
            data[at:at] = chance.randbytes(chance.randrange(1, 40))
    return bytes(data)


def test_agent_survives_peers(pod: Pod) -> None:
    chance = random.Random(seed("pod, peers"))
    generator = Generator(seed("pod, noise"))
    with greeted(pod) as host:
        for _ in range(CASES // 2):
            with pod.connect(source(chance)) as peer, contextlib.suppress(OSError, Disconnected):
                if chance.random() < 0.3:
                    peer.sendall(generator.noise())
                    continue
                greeting = PREFIX.pack(32) + GatewayKey.generate().public
                peer.sendall(mutate(chance, greeting) if chance.random() < 0.5 else greeting)
                peer.settimeout(0.02)  # a key that was cut is not answered
                with contextlib.suppress(TimeoutError):
                    take(peer, PREFIX.size + ANSWER_SIZE)
                    peer.sendall(mutate(chance, PREFIX.pack(56) + chance.randbytes(56)))
        assert host.run(b"true") == 0
    works(pod)
    ends_cleanly(pod.launched)


def test_agent_survives_records_that_were_changed(pod: Pod) -> None:
    """A gateway whose bytes are changed on the way: records, their lengths, what follows them."""
    chance = random.Random(seed("pod, records"))
    for number in range(CASES // 4):
        # From addresses of their own: one that never proves itself gets few answers after a while.
        with contextlib.suppress(Disconnected, OSError), pod.gateway(source(chance)) as link:
            if number % 3:
                link.greet()
            change_on_the_way(chance, link, first=not number % 3)
        if number % 100 == 99:
            works(pod)
    works(pod)
    ends_cleanly(pod.launched)


def change_on_the_way(chance: random.Random, link: SealedLink, first: bool) -> None:
    put = link.put
    sealed: list[bytes] = []
    link.put = sealed.append  # type: ignore[method-assign, assignment]
    if first:
        link.send(hello(bytes(16)))
    for _ in range(chance.randrange(1, 4)):
        link.send(frame(READ, chance.getrandbits(63) | 1, file_payload(b"/usr/bin/env")))
        link.send(frame(LIST, chance.getrandbits(63) | 1, file_payload(b"/usr/share/doc", flags=1)))
        link.send(frame(16, chance.getrandbits(63) | 1, exec_payload(b"head", b"-c", b"100000", b"/dev/zero", flags=6)))
    put(mutate(chance, b"".join(sealed)))
    drain(link)


@pytest.mark.parametrize("kind", ["formed", "mutated"])
def test_agent_survives_a_gateway_that_errs(pod: Pod, kind: str) -> None:
    """Frames gone bad, well sealed: what the agent does over a unix socket it does here."""
    generator = Generator(seed(f"pod, {kind}"))
    left = CASES // 4
    while left > 0:
        with contextlib.suppress(Disconnected), greeted(pod) as link:
            while left > 0:
                left -= 1
                link.send(getattr(generator, kind)())
                if left % 7 == 0:
                    drain(link)
    works(pod)
    ends_cleanly(pod.launched)

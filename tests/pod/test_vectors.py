"""Both sides of the handshake against published test vectors, and against each other.

The vectors are of cacophony, as snow has them (tests/vectors/cacophony.txt), and of flynn/noise (vectors.txt). The
agent's side is its own C and Zig, built as a library."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from k8e.link.noise.handshake import ANSWER_SIZE, CipherState, HandshakeFailed, Initiator, NoncesExhausted
from k8e.link.noise.handshake import Responder as HelperSide
from scripts import build_agent

LOW_ORDER = (bytes(32), b"\x01" + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f", b"\xed" + b"\xff" * 30 + b"\x7f")


@dataclass(frozen=True, slots=True)
class Vector:
    prologue: str
    initiator: str
    responder: str
    initiator_ephemeral: str
    responder_ephemeral: str
    messages: tuple[tuple[str, str], ...]  # payload and ciphertext, in turn


CACOPHONY = Vector(
    prologue="4a6f686e2047616c74",
    initiator="e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1",
    responder="4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893",
    initiator_ephemeral="893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
    responder_ephemeral="bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
    messages=(
        (
            "4c756477696720766f6e204d69736573",
            "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79444c756477696720766f6e204d69736573",
        ),
        (
            "4d757272617920526f746862617264",
            (
                "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
                "0f37fda6c6abae4b0f54f9ad38b22fec739d5c4925a8d76de6cc7cf4a931711c"
                "d826b2104f120d624f4c7f3861f79d1e2a0b5867b1013a1ae3fd76ef9443424e"
                "ee0ffdf5b6aff9fd4f162e6bcbc2e8"
            ),
        ),
        ("462e20412e20486179656b", "3644419f0cd1f8d29bfa77ae0102ab35d947e9de5d26588c885168"),
        ("4361726c204d656e676572", "9e2d00ad34457ff17b09c8bbe65e840d5899d8abfb9cad8b62e008"),
        ("4a65616e2d426170746973746520536179", "ce3704a625817987d94952215471ee2f38c1ce68a6b60630780a569fed6efe1d95"),
        (
            "457567656e2042f6686d20766f6e2042617765726b",
            "466b03c085d7426507a6d510c695e5a311a0e43576bd381afe4f67243d1e17cd41df9387e2",
        ),
    ),
)
# With and without payloads of the handshake, with and without a prologue.
FLYNN = tuple(
    Vector(
        prologue=prologue,
        initiator="000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        responder="0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20",
        initiator_ephemeral="202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f",
        responder_ephemeral="4142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f60",
        messages=(
            (first, "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254" + first),
            (
                second,
                "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466"
                "4da461bfc2d7e228776700246eecb12bc654b92fef771afb5c6c6645648e11d8" + rest,
            ),
            (
                "79656c6c6f777375626d6172696e65",
                "f2705e50e8767f26211b34d7fed7756365369d16d09beb7c2242bf73344bdf",
            ),
            (
                "7375626d6172696e6579656c6c6f77",
                "5d5a714198d09c66a53b7430a506394c4fc09cf01ba87a63be5cc6a3950971",
            ),
        ),
    )
    for prologue, first, second, rest in (
        ("", "", "", "47f40b2d552be046c38b3882103e86fc283c15084a8b61fd16d83e556498ec48"),
        (
            "",
            "746573745f6d73675f30",
            "746573745f6d73675f31",
            "5f7ae53e16f2f8b10e6f6f77e6b737d17e65818a7649a0dd819b8b79f1e8aadf3dab7f4ccfdb86dbd5b4",
        ),
        ("6e6f74736563726574", "", "", "b0cfe2f8e48e009af03e6420e5f0dfab42491c7c224bb630b73d159ef7ff18a8"),
        (
            "6e6f74736563726574",
            "746573745f6d73675f30",
            "746573745f6d73675f31",
            "d792d9531d4982940eb0f25d701902557e65818a7649a0dd819b2669d91c8e90827d6252b0855edaee1c",
        ),
    )
)
VECTORS = (CACOPHONY, *FLYNN)


class KeyPair(ctypes.Structure):
    _fields_ = (("secret", ctypes.c_ubyte * 32), ("public", ctypes.c_ubyte * 32))


class Cipher(ctypes.Structure):
    _fields_ = (("key", ctypes.c_ubyte * 32), ("nonce", ctypes.c_uint64))


class Responder(ctypes.Structure):
    _fields_ = (
        ("own", KeyPair),
        ("gateway", ctypes.c_ubyte * 32),
        ("prologue", ctypes.c_char_p),
        ("prologue_length", ctypes.c_size_t),
    )


class AgentSide:
    """agent/pod/noise.c and crypto.zig."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("key_pair_make", "noise_answer", "cipher_seal", "cipher_open"):
            getattr(self._library, name).restype = ctypes.c_bool

    def key_pair(self, secret: bytes) -> KeyPair:
        pair = KeyPair()
        assert self._library.key_pair_make(ctypes.byref(pair), secret)
        return pair

    def answer(
        self, own: bytes, ephemeral: bytes, gateway: bytes, prologue: bytes, message: bytes, payload: bytes = b""
    ) -> tuple[bytes, Cipher, Cipher] | None:
        responder = Responder(self.key_pair(own), (ctypes.c_ubyte * 32)(*gateway), prologue, len(prologue))
        out = ctypes.create_string_buffer(ANSWER_SIZE + len(payload))
        opening, sealing = Cipher(), Cipher()
        answered = self._library.noise_answer(
            ctypes.byref(responder),
            ctypes.byref(self.key_pair(ephemeral)),
            message,
            ctypes.c_size_t(len(message)),
            payload,
            ctypes.c_size_t(len(payload)),
            out,
            ctypes.byref(opening),
            ctypes.byref(sealing),
        )
        return (out.raw, opening, sealing) if answered else None

    def seal(self, cipher: Cipher, text: bytes) -> bytes | None:
        out = ctypes.create_string_buffer(text, len(text) + 16)
        sealed = self._library.cipher_seal(ctypes.byref(cipher), out, ctypes.c_size_t(len(text)))
        return out.raw if sealed else None

    def open(self, cipher: Cipher, message: bytes) -> bytes | None:
        out = ctypes.create_string_buffer(message, max(1, len(message)))
        opened = self._library.cipher_open(ctypes.byref(cipher), out, ctypes.c_size_t(len(message)))
        return out.raw[: len(message) - 16] if opened else None


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> AgentSide:
    folder = tmp_path_factory.mktemp("noise")
    build_agent.set_zig_cache()
    build_agent.compile_crypto(build_agent.SOURCES, folder / "crypto.o", platform.machine(), "ReleaseSmall")
    sources = [str(build_agent.SOURCES / "pod" / "noise.c"), str(folder / "crypto.o")]
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(folder / "noise.so"), *sources], check=True)
    return AgentSide(folder / "noise.so")


def private(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def public(secret: X25519PrivateKey) -> bytes:
    return secret.public_key().public_bytes_raw()


def pairs(vector: Vector) -> list[tuple[bytes, bytes]]:
    return [(bytes.fromhex(payload), bytes.fromhex(ciphertext)) for payload, ciphertext in vector.messages]


@pytest.mark.parametrize("vector", VECTORS)
def test_the_gateways_side(vector: Vector) -> None:
    first, second, *others = pairs(vector)
    initiator = Initiator(
        private(vector.initiator), bytes.fromhex(vector.prologue), private(vector.initiator_ephemeral)
    )
    assert initiator.greet(first[0]) == first[1]
    peer, payload, sealing, opening = initiator.finish(second[1])
    assert peer == public(private(vector.responder))
    assert payload == second[0]
    for number, (text, ciphertext) in enumerate(others):
        if number % 2 == 0:
            assert sealing.seal(text) == ciphertext
        else:
            assert opening.open(ciphertext) == text


@pytest.mark.parametrize("vector", VECTORS)
def test_the_helpers_side(vector: Vector) -> None:
    first, second, *others = pairs(vector)
    responder = HelperSide(
        private(vector.responder),
        public(private(vector.initiator)),
        bytes.fromhex(vector.prologue),
        private(vector.responder_ephemeral),
    )
    answer, payload, sealing, opening = responder.answer(first[1], second[0])
    assert (answer, payload) == (second[1], first[0])
    for number, (text, ciphertext) in enumerate(others):
        if number % 2 == 0:
            assert opening.open(ciphertext) == text
        else:
            assert sealing.seal(text) == ciphertext


@pytest.mark.parametrize("key", LOW_ORDER)
def test_a_first_message_without_a_key(key: bytes) -> None:
    gateway = public(X25519PrivateKey.generate())
    with pytest.raises(HandshakeFailed):
        HelperSide(X25519PrivateKey.generate(), gateway, b"").answer(key)


@pytest.mark.parametrize("vector", VECTORS)
def test_the_agents_side(agent: AgentSide, vector: Vector) -> None:
    first, second, *others = pairs(vector)
    answered = agent.answer(
        bytes.fromhex(vector.responder),
        bytes.fromhex(vector.responder_ephemeral),
        public(private(vector.initiator)),
        bytes.fromhex(vector.prologue),
        first[1],
        second[0],
    )
    assert answered is not None
    answer, opening, sealing = answered
    assert answer == second[1]
    for number, (text, ciphertext) in enumerate(others):
        if number % 2 == 0:
            assert agent.open(opening, ciphertext) == text
        else:
            assert agent.seal(sealing, text) == ciphertext


def shake_hands(
    agent: AgentSide, change: Callable[[bytes], bytes] = lambda answer: answer, prologue: bytes = b"same"
) -> tuple[CipherState, CipherState, Cipher, Cipher]:
    gateway, own, ephemeral = (X25519PrivateKey.generate() for _ in range(3))
    initiator = Initiator(gateway, b"same")
    answered = agent.answer(
        own.private_bytes_raw(), ephemeral.private_bytes_raw(), public(gateway), prologue, initiator.greet()
    )
    assert answered is not None
    peer, _, sealing, opening = initiator.finish(change(answered[0]))
    assert peer == public(own)
    return sealing, opening, answered[1], answered[2]


@given(texts=st.lists(st.binary(max_size=300), max_size=8))
def test_both_sides_understand_each_other(agent: AgentSide, texts: list[bytes]) -> None:
    sealing, opening, agent_opening, agent_sealing = shake_hands(agent)
    for text in (*texts, bytes(65519)):
        assert agent.open(agent_opening, sealing.seal(text)) == text
        sealed = agent.seal(agent_sealing, text)
        assert sealed is not None
        assert opening.open(sealed) == text


@given(place=st.integers(0, ANSWER_SIZE - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_answer_is_noticed(agent: AgentSide, place: int, bit: int) -> None:
    # The highest bit of a public key is masked by the curve; the transcript has it all the same.
    with pytest.raises(HandshakeFailed):
        shake_hands(agent, lambda answer: flip(answer, place, bit))


def test_another_prologue_is_noticed(agent: AgentSide) -> None:
    with pytest.raises(HandshakeFailed):
        shake_hands(agent, prologue=b"other")


@pytest.mark.parametrize("size", [0, 1, ANSWER_SIZE - 1, 65536])
def test_an_answer_of_another_size_is_none(size: int) -> None:
    initiator = Initiator(X25519PrivateKey.generate(), b"")
    initiator.greet()
    with pytest.raises(HandshakeFailed):
        initiator.finish(bytes(size))


@pytest.mark.parametrize("point", LOW_ORDER)
def test_a_key_with_which_there_is_no_secret_is_refused(agent: AgentSide, point: bytes) -> None:
    secret = X25519PrivateKey.generate().private_bytes_raw()
    gateway = public(X25519PrivateKey.generate())
    assert agent.answer(secret, secret, gateway, b"", point) is None
    assert agent.answer(secret, secret, point, b"", gateway) is None
    initiator = Initiator(X25519PrivateKey.generate(), b"")
    initiator.greet()
    with pytest.raises(HandshakeFailed):
        initiator.finish(point + bytes(64))


def test_messages_are_opened_in_their_order_and_once(agent: AgentSide) -> None:
    sealing, opening, agent_opening, agent_sealing = shake_hands(agent)
    first, second = sealing.seal(b"first"), sealing.seal(b"second")
    assert agent.open(agent_opening, second) is None
    sealing, opening, agent_opening, agent_sealing = shake_hands(agent)
    first = sealing.seal(b"first")
    assert agent.open(agent_opening, first) == b"first"
    assert agent.open(agent_opening, first) is None
    answer = agent.seal(agent_sealing, b"answer")
    assert answer is not None
    assert opening.open(answer) == b"answer"
    with pytest.raises(InvalidTag):
        opening.open(answer)


def test_the_last_nonce_is_never_used(agent: AgentSide) -> None:
    cipher = Cipher((ctypes.c_ubyte * 32)(), (1 << 64) - 2)
    assert agent.seal(cipher, b"the last one") is not None
    assert agent.seal(cipher, b"one more") is None
    assert agent.open(cipher, bytes(32)) is None
    state = CipherState(bytes(32))
    state._nonce = (1 << 64) - 2
    state.seal(b"the last one")
    with pytest.raises(NoncesExhausted):
        state.seal(b"one more")
    with pytest.raises(NoncesExhausted):
        state.open(bytes(32))


@pytest.mark.parametrize("size", [0, 1, 15, 65536])
def test_a_message_of_an_impossible_size_is_not_opened(agent: AgentSide, size: int) -> None:
    assert agent.open(Cipher(), bytes(size)) is None


def flip(content: bytes, place: int, bit: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]

"""Noise_KX_25519_ChaChaPoly_BLAKE2s without I/O: noiseprotocol.org, revision 34, whose names the methods have.
Primitives are those of `cryptography` and of the standard library. The gateway is the initiator; the responder here is
the helper of a node, that of a pod is the agent's own.

    KX:  -> s            the gateway's static key, which the pod knows beforehand
         ...
         -> e
         <- e, ee, se, s, es
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

NAME: Final = b"Noise_KX_25519_ChaChaPoly_BLAKE2s"
KEY_SIZE: Final = 32
TAG_SIZE: Final = 16
MESSAGE_LIMIT: Final = 65535
TEXT_LIMIT: Final = MESSAGE_LIMIT - TAG_SIZE
ANSWER_SIZE: Final = 2 * KEY_SIZE + 2 * TAG_SIZE  # without a payload
_LAST_NONCE: Final = (1 << 64) - 1  # reserved by the specification
_NONCE: Final = struct.Struct("<4xQ")


class HandshakeFailed(Exception):
    """The peer is not the one that was meant, or the bytes on the way were changed."""


class NoncesExhausted(Exception):
    """2^64 - 1 messages were sent or received under one key."""


class CipherState:
    """One direction of the channel: messages are sealed or opened in order, each nonce once."""

    def __init__(self, key: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)
        self._nonce = 0

    @property
    def fresh(self) -> bool:
        return self._nonce == 0

    def _next_nonce(self) -> bytes:
        if self._nonce == _LAST_NONCE:
            raise NoncesExhausted
        nonce = _NONCE.pack(self._nonce)
        self._nonce += 1
        return nonce

    def seal(self, text: bytes | memoryview, associated: bytes = b"") -> bytes:
        return self._aead.encrypt(self._next_nonce(), text, associated)

    def open(self, message: bytes | memoryview, associated: bytes = b"") -> bytes:
        """Raises InvalidTag for a message that is not the next one of the peer."""
        return self._aead.decrypt(self._next_nonce(), message, associated)


def derive(chaining: bytes, material: bytes) -> tuple[bytes, bytes]:
    """HKDF with two outputs."""
    secret = hmac.digest(chaining, material, "blake2s")
    first = hmac.digest(secret, b"\x01", "blake2s")
    return first, hmac.digest(secret, first + b"\x02", "blake2s")


class _Symmetric:
    """The state that both sides go through."""

    def __init__(
        self, static: X25519PrivateKey, initiator: bytes, prologue: bytes, ephemeral: X25519PrivateKey | None
    ) -> None:
        self._static = static
        self._ephemeral = ephemeral or X25519PrivateKey.generate()
        self._hash = self._chaining = hashlib.blake2s(NAME).digest()  # longer than a hash, so hashed
        self._cipher: CipherState | None = None
        self._mix_hash(prologue)
        self._mix_hash(initiator)

    def _mix_hash(self, content: bytes) -> None:
        self._hash = hashlib.blake2s(self._hash + content).digest()

    def _mix_key(self, own: X25519PrivateKey, remote: bytes) -> None:
        shared = own.exchange(X25519PublicKey.from_public_bytes(remote))
        self._chaining, key = derive(self._chaining, shared)
        self._cipher = CipherState(key)

    def _open(self, sealed: bytes) -> bytes:
        assert self._cipher is not None
        text = self._cipher.open(sealed, self._hash)
        self._mix_hash(sealed)
        return text

    def _seal(self, text: bytes) -> bytes:
        assert self._cipher is not None
        sealed = self._cipher.seal(text, self._hash)
        self._mix_hash(sealed)
        return sealed


class Initiator(_Symmetric):
    """The gateway's side of one handshake: `greet`, then `finish` with what came back."""

    def __init__(self, static: X25519PrivateKey, prologue: bytes, ephemeral: X25519PrivateKey | None = None) -> None:
        """`ephemeral` is for test vectors: every handshake has a fresh one."""
        super().__init__(static, static.public_key().public_bytes_raw(), prologue, ephemeral)

    def greet(self, payload: bytes = b"") -> bytes:
        """Returns the first message. Its payload would be readable by all."""
        public = self._ephemeral.public_key().public_bytes_raw()
        self._mix_hash(public)
        self._mix_hash(payload)
        return public + payload

    def finish(self, message: bytes) -> tuple[bytes, bytes, CipherState, CipherState]:
        """Returns the peer's static key, its payload, and the ciphers to seal and to open with."""
        if not ANSWER_SIZE <= len(message) <= MESSAGE_LIMIT:
            raise HandshakeFailed("the answer has the wrong size")
        at = 2 * KEY_SIZE + TAG_SIZE
        remote, sealed_static, sealed_payload = message[:KEY_SIZE], message[KEY_SIZE:at], message[at:]
        try:
            self._mix_hash(remote)
            self._mix_key(self._ephemeral, remote)  # ee
            self._mix_key(self._static, remote)  # se
            peer = self._open(sealed_static)
            self._mix_key(self._ephemeral, peer)  # es
            payload = self._open(sealed_payload)
        except (InvalidTag, ValueError) as error:  # ValueError: a key of low order
            raise HandshakeFailed("the answer does not fit our keys and the pod's UID") from error
        sealing, opening = derive(self._chaining, b"")
        return peer, payload, CipherState(sealing), CipherState(opening)


class Responder(_Symmetric):
    """The other side of one handshake, which knows the gateway's public key beforehand."""

    def __init__(
        self, static: X25519PrivateKey, gateway: bytes, prologue: bytes, ephemeral: X25519PrivateKey | None = None
    ) -> None:
        super().__init__(static, gateway, prologue, ephemeral)
        self._gateway = gateway

    def answer(self, message: bytes, payload: bytes = b"") -> tuple[bytes, bytes, CipherState, CipherState]:
        """Returns the answer, the payload of the first message, and the ciphers to seal and to open with. That the peer
        is the gateway is known when the first message opens."""
        if not KEY_SIZE <= len(message) <= MESSAGE_LIMIT:
            raise HandshakeFailed("the first message has the wrong size")
        remote, greeting = message[:KEY_SIZE], message[KEY_SIZE:]
        own = self._ephemeral.public_key().public_bytes_raw()
        self._mix_hash(remote)
        self._mix_hash(greeting)
        try:
            self._mix_hash(own)
            self._mix_key(self._ephemeral, remote)  # ee
            self._mix_key(self._ephemeral, self._gateway)  # se
            sealed = self._seal(self._static.public_key().public_bytes_raw())
            self._mix_key(self._static, remote)  # es
        except ValueError as error:  # a key of low order
            raise HandshakeFailed("the first message has no key") from error
        answer = own + sealed + self._seal(payload)
        opening, sealing = derive(self._chaining, b"")
        return answer, greeting, CipherState(sealing), CipherState(opening)

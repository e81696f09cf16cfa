"""An API key as text: enough for a client to verify its gateway, and to log in without sending a secret.

    k8e_ + base64url without padding of:
        8 bytes   the key's id, which is not secret
       32 bytes   SHA-256 of the gateway's CA certificate (DER), to verify the gateway
       32 bytes   an Ed25519 private key, the secret; it never leaves the client
        4 bytes   the first bytes of SHA-256 over the 72 before, to detect a mistyped key

The gateway stores the public key only: its files do not allow a reader to impersonate a client.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Final, Self

PREFIX: Final = "k8e_"
_ID, _FINGERPRINT, _SECRET, _SUM = 8, 32, 32, 4
_PURPOSE: Final = b"k8e-login-v1\0"


class BadKey(ValueError):
    """The text is not an API key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    key_id: bytes
    fingerprint: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls, fingerprint: bytes) -> Self:
        return cls(secrets.token_bytes(_ID), fingerprint, secrets.token_bytes(_SECRET))

    @classmethod
    def parse(cls, text: str) -> Self:
        encoded = text.strip().removeprefix(PREFIX)
        try:
            content = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise BadKey("is not an API key") from None
        body, checksum = content[:-_SUM], content[-_SUM:]
        if not text.strip().startswith(PREFIX) or len(body) != _ID + _FINGERPRINT + _SECRET:
            raise BadKey("is not an API key")
        if hashlib.sha256(body).digest()[:_SUM] != checksum:
            raise BadKey("is an API key that was mistyped or cut off")
        return cls(body[:_ID], body[_ID : _ID + _FINGERPRINT], body[_ID + _FINGERPRINT :])

    @property
    def text(self) -> str:
        body = self.key_id + self.fingerprint + self.secret
        content = body + hashlib.sha256(body).digest()[:_SUM]
        return PREFIX + base64.urlsafe_b64encode(content).decode("ascii").rstrip("=")

    @property
    def public(self) -> bytes:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.from_private_bytes(self.secret).public_key()
        return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)

    def sign_login(self, request: bytes) -> bytes:
        """`request` is the certificate request, DER."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.from_private_bytes(self.secret)
        return key.sign(state_login(self.fingerprint, self.key_id, request))


def state_login(fingerprint: bytes, key_id: bytes, request: bytes) -> bytes:
    """Returns the statement that a login signs. It names the gateway and the request: an attacker who copies it gets a
    certificate for a key that the attacker does not have."""
    return _PURPOSE + fingerprint + key_id + hashlib.sha256(request).digest()


def verify_login(public: bytes, signature: bytes, statement: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except InvalidSignature:
        return False
    return True

"""The gateway's static key: the one secret of the channel. All replicas of a gateway have the same."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key


class GatewayKey:
    """An X25519 key. Its `repr` does not show it."""

    def __init__(self, private: X25519PrivateKey) -> None:
        self.private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> GatewayKey:
        return cls(X25519PrivateKey.generate())

    @classmethod
    def parse(cls, pem: bytes) -> GatewayKey:
        """Reads PKCS 8 in PEM, as `openssl genpkey -algorithm X25519` writes it. Raises ValueError."""
        private = load_pem_private_key(pem, password=None)
        if not isinstance(private, X25519PrivateKey):
            raise ValueError("not an X25519 key")
        return cls(private)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> GatewayKey:
        return cls.parse(Path(path).read_bytes())

    def pem(self) -> bytes:
        return self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def __repr__(self) -> str:
        return f"GatewayKey({self.public.hex()[:16]})"

"""The signatures of a login in pure Python, by the library ecdsa where cryptography, which is compiled, is not: Ed25519
for the API key, P-256 for a certificate request and its key.

Not in constant time: it runs at a login only, on the client's own machine, and the key of each request is new.
"""

from __future__ import annotations

import hashlib

from ecdsa import Ed25519, NIST256p, SigningKey, der
from ecdsa.util import sigencode_der

COMMON_NAME = der.encode_oid(2, 5, 4, 3)
ECDSA_SHA256 = der.encode_oid(1, 2, 840, 10045, 4, 3, 2)
SET, UTF8 = b"\x31", b"\x0c"


def sign_ed25519(secret: bytes, message: bytes) -> bytes:
    return bytes(SigningKey.from_string(secret, curve=Ed25519).sign(message))


def make_request() -> tuple[bytes, str]:
    """As k8e.identity.authority.make_request: a new key (PEM) and the request for its certificate (PEM)."""
    key = SigningKey.generate(curve=NIST256p)
    name = der.encode_sequence(COMMON_NAME, encode(UTF8, b"k8e client"))
    asked = der.encode_sequence(
        der.encode_integer(0),
        der.encode_sequence(encode(SET, name)),
        key.verifying_key.to_der(),
        der.encode_constructed(0, b""),
    )
    signature = key.sign(asked, hashfunc=hashlib.sha256, sigencode=sigencode_der)
    request = der.encode_sequence(asked, der.encode_sequence(ECDSA_SHA256), der.encode_bitstring(signature, 0))
    return bytes(key.to_pem()), bytes(der.topem(request, "CERTIFICATE REQUEST")).decode("ascii")


def encode(tag: bytes, content: bytes) -> bytes:
    return tag + bytes(der.encode_length(len(content))) + content

"""The authorities' keys on their way to a further server: sealed with a key that is in the server's token only. Pure.

Who reads all Secrets of the cluster gets the sealed text, and who has a worker's token not even that.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Mapping
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from k8e.cluster.trust.join_token import BadToken, JoinToken

_NONCE: Final = 12


def seal_keys(keys: Mapping[str, bytes], token: JoinToken) -> bytes:
    """Returns the keys, by name, as only the token's owner can read them."""
    content = json.dumps({name: base64.b64encode(value).decode() for name, value in keys.items()}).encode()
    nonce = secrets.token_bytes(_NONCE)
    return nonce + _cipher(token).encrypt(nonce, content, _context(token))


def open_keys(sealed: bytes, token: JoinToken) -> dict[str, bytes]:
    """Returns what was sealed for this token; BadToken when it was sealed for another one, or was changed."""
    try:
        content = _cipher(token).decrypt(sealed[:_NONCE], sealed[_NONCE:], _context(token))
        return {str(name): base64.b64decode(value, validate=True) for name, value in json.loads(content).items()}
    except (InvalidTag, ValueError, TypeError, AttributeError, binascii.Error) as error:
        hint = "is the token complete? A server's has 159 characters; make a new one on a server"
        raise BadToken("keys_sealed", "this token does not open the cluster's keys", hint=hint) from error


def _cipher(token: JoinToken) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(bytes.fromhex(token.key))


def _context(token: JoinToken) -> bytes:
    """Names the purpose of the sealed text: it opens under no other token's id, and for no other cluster."""
    return f"k8e keys 1 {token.fingerprint} {token.id}".encode()

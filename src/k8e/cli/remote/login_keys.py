"""The keys and signatures of a login: by the library cryptography, or in pure Python in the standalone program."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING

from k8e.cli import client

if TYPE_CHECKING:
    from k8e.identity.api_key import ApiKey


def make_request() -> tuple[bytes, str]:
    """A new key (PEM) and the request for its certificate (PEM)."""
    if client.has_daemon:
        from k8e.identity import authority

        return authority.make_request()
    from k8e.cli.standalone import signatures

    return signatures.make_request()


def sign_login(key: ApiKey, request: str) -> bytes:
    content = b64decode("".join(request.splitlines()[1:-1]))
    if client.has_daemon:
        return key.sign_login(content)
    from k8e.cli.standalone.signatures import sign_ed25519
    from k8e.identity.api_key import state_login

    return sign_ed25519(key.secret, state_login(key.fingerprint, key.key_id, content))

"""The certificates that a server sends in a handshake, verified or not."""

from __future__ import annotations

import _ssl
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl


def list_chain(connection: ssl.SSLSocket) -> list[bytes]:
    """Returns them as DER. Python has a public name for it only since 3.13."""
    if hasattr(connection, "get_unverified_chain"):
        return list(connection.get_unverified_chain())
    inner: Any = connection._sslobj  # type: ignore[attr-defined]  # noqa: SLF001
    return [certificate.public_bytes(_ssl.ENCODING_DER) for certificate in inner.get_unverified_chain()]

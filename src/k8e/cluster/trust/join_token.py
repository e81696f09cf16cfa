"""Tokens by which a machine joins a cluster: who may join, and which cluster is the right one. Pure.

    K8E1 FINGERPRINT :: ID . SECRET             a worker's, without the spaces
    K8E1 FINGERPRINT :: ID . SECRET :: KEY      a server's

The fingerprint is that of the authority behind the API server: a machine that joins sends nothing to a server that
another authority vouches for. ID and SECRET are a bootstrap token of Kubernetes, which the API server checks and whose
end it keeps; it is a Secret in kube-system. KEY opens the authorities' keys (sealed_keys.py); the cluster never has it.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hmac
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from k8e.cluster.errors import ClusterError

NAMESPACE: Final = "kube-system"
WORKERS: Final = "system:bootstrappers:k8e:workers"
SERVERS: Final = "system:bootstrappers:k8e:servers"
_TYPE: Final = "bootstrap.kubernetes.io/token"
_PREFIX: Final = "bootstrap-token-"
_LETTERS: Final = string.ascii_lowercase + string.digits
_FORM: Final = re.compile(r"K8E1([0-9a-f]{64})::([a-z0-9]{6})\.([a-z0-9]{16})(?:::([0-9a-f]{64}))?")
_ID: Final = re.compile(r"[a-z0-9]{6}")


class BadToken(ClusterError):
    """The text is no token. It is not in the error."""


@dataclass(frozen=True, slots=True)
class JoinToken:
    fingerprint: str
    id: str
    secret: str = field(repr=False)
    key: str = field(default="", repr=False)  # 32 bytes in hexadecimal digits; a server's token has one

    @classmethod
    def make(cls, fingerprint: str, *, server: bool = False) -> Self:
        # 16 of 36 characters: 82 bits, as Kubernetes wants it; it is tried online only.
        return cls(fingerprint, _draw(6), _draw(16), secrets.token_hex(32) if server else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _FORM.fullmatch(text.strip())
        if match is None:
            hint = "a token begins with K8E1 and has 93 characters, a server's 159; node-token of a server has one"
            raise BadToken("bad_join_token", "this is no token of a cluster", hint=hint)
        return cls(*match.groups(""))

    @property
    def text(self) -> str:
        return f"K8E1{self.fingerprint}::{self.bearer}" + (f"::{self.key}" if self.key else "")

    @property
    def bearer(self) -> str:
        """The part that the API server knows."""
        return f"{self.id}.{self.secret}"

    def is_for(self, fingerprint: str) -> bool:
        return hmac.compare_digest(self.fingerprint, fingerprint)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token as the cluster keeps it, without the secret."""

    id: str
    description: str
    created: float
    expires: float | None  # None: never
    makes_servers: bool = False

    def is_over(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires

    @property
    def body(self) -> dict[str, Any]:
        expires = None if self.expires is None else write_time(self.expires)
        return {
            "id": self.id,
            "for": "server" if self.makes_servers else "worker",
            "description": self.description,
            "created": write_time(self.created),
            "expires": expires,
        }


def describe_token(token: JoinToken, description: str, expires: float | None) -> dict[str, Any]:
    """Returns the Secret of a token with which a worker can join, and nothing else; or a server, whose keys are in a
    Secret of their own."""
    data = {
        "token-id": token.id,
        "token-secret": token.secret,
        "usage-bootstrap-authentication": "true",
        # A server is a node, too, which joins as every other does.
        "auth-extra-groups": f"{WORKERS},{SERVERS}" if token.key else WORKERS,
        "description": description,
    }
    if expires is not None:
        data["expiration"] = write_time(expires)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": _TYPE,
        "metadata": {"name": name_secret(token.id), "namespace": NAMESPACE},
        "stringData": data,
    }


def read_token(found: Mapping[str, Any]) -> TokenRecord | None:
    """Returns the record in a Secret; None when it is no token, or one that was changed beyond use."""
    metadata, data = found.get("metadata") or {}, found.get("data") or {}
    if found.get("type") != _TYPE or "deletionTimestamp" in metadata:
        return None
    try:
        values = {name: base64.b64decode(value, validate=True).decode() for name, value in data.items()}
        end = values.get("expiration")
        created, expires = read_time(metadata["creationTimestamp"]), None if end is None else read_time(end)
    except (KeyError, ValueError, TypeError, binascii.Error):
        return None
    token_id = values.get("token-id", "")
    if metadata.get("name") != f"{_PREFIX}{token_id}" or _ID.fullmatch(token_id) is None:
        return None
    makes_servers = SERVERS in values.get("auth-extra-groups", "").split(",")
    return TokenRecord(token_id, values.get("description", ""), created, expires, makes_servers)


def name_secret(token_id: str) -> str:
    if _ID.fullmatch(token_id) is None:
        hint = "an id has six characters; it stands between :: and the point of a token"
        raise BadToken("bad_join_token", "this is no id of a token", hint=hint)
    return f"{_PREFIX}{token_id}"


def write_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_time(text: str) -> float:
    """ValueError when it is no time with an offset."""
    found = datetime.datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(f"{text!r} does not name its offset")
    return found.timestamp()


def _draw(count: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(count))

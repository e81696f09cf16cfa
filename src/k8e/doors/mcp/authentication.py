"""Who calls over HTTP. Web pages are kept out.

On loopback a client needs no key when the kernel says that it belongs to the user that listens, or to root. All other
clients need an API key, over TLS beyond loopback. A key is checked with every request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k8e.core.access.keys import Admission, Keys
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, Scope
from k8e.doors.addresses import bracket
from k8e.doors.http.errors import HttpRefusal
from k8e.doors.mcp.transport.connection import HttpCall

PATH: Final = "/mcp"
_CHALLENGE: Final = 'Bearer realm="k8e"'
_HINT: Final = "Send an API key: Authorization: Bearer k8e_... (k8e sandbox-apikey create NAME)."
_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = b"01"
_UID: Final = 7  # the column


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address that the server listens on: its names, and the user that needs no key."""

    port: int | None  # None: any, because it is behind a Service or a load balancer, which have ports of their own
    names: tuple[str, ...]  # *.example.com is every name one label below
    secure: bool
    user: Caller | None  # None: every client needs a key
    tenant: str = ""  # the tenant that all clients share; keys of other tenants are refused

    @property
    def scheme(self) -> str:
        return "https" if self.secure else "http"

    def has_name(self, host: str) -> bool:
        """`host`: as clients send it, with the port."""
        name, colon, port = host.rpartition(":")
        if not colon or host.endswith("]"):
            name, port = host, "443" if self.secure else "80"
        if self.port is not None and port != str(self.port):
            return False
        own = {bracket(each.lower()) for each in self.names}
        return name in own or f"*.{name.partition('.')[2]}" in own


class Authenticator:
    def __init__(self, address: ListenAddress, keys: Keys) -> None:
        self._address = address
        self._keys = keys

    async def authenticate(self, call: HttpCall) -> Admission:
        """Raises HttpRefusal and Fault. The identity is a key's; empty for the user that listens."""
        self._refuse_web_pages(call)
        if call.request.path != (PATH[1:],):
            raise HttpRefusal(404, "no_such_endpoint", "there is nothing at this address", hint=PATH)
        sent = call.authorization
        if not sent:
            return await self._authenticate_user(call)
        kind, _, token = sent[0].partition(" ")
        if len(sent) > 1 or kind.lower() != "bearer":
            raise Fault(Kind.UNAUTHENTICATED, "key_needed", "only API keys are taken here", hint=_HINT)
        admission = await self._keys.admit_bearer(token.strip(), call.connection.peer_address[0])
        self._check_tenant(admission.caller)
        return admission

    def _refuse_web_pages(self, call: HttpCall) -> None:
        """Refuses other host names, which a page could have pointed at this address, and foreign origins."""
        host, origin = (call.header(b"host") or "").lower(), call.header(b"origin")
        reached = call.connection.own_address[0]
        direct = self._address.user is None and host == f"{bracket(reached)}:{self._address.port}"
        if not direct and not self._address.has_name(host):
            error = "this is not the host you are looking for"
            raise HttpRefusal(421, "host_refused", error, hint=f"one of: {', '.join(self._address.names)}")
        if origin is not None and origin.lower() != f"{self._address.scheme}://{host}":
            raise HttpRefusal(403, "origin_refused", "web pages may not call this", hint="call it from a program")

    async def _authenticate_user(self, call: HttpCall) -> Admission:
        user = self._address.user
        if user is None:
            raise Fault(Kind.UNAUTHENTICATED, "key_needed", "this needs an API key", hint=_HINT)
        peer, own = call.connection.peer_address, call.connection.own_address
        uid = await asyncio.to_thread(find_user, peer, own) if peer[0] and own[0] else None
        if uid not in (0, user.uid):
            error = "without a key only the user who started this can use it"
            detail = "it is not known who calls" if uid is None else f"the caller is uid {uid}"
            raise Fault(Kind.UNAUTHENTICATED, "key_needed", error, detail=detail, hint=_HINT)
        return Admission(user, "", float("inf"))

    def _check_tenant(self, caller: Caller) -> None:
        wanted = self._address.tenant
        if wanted and caller.scope is not Scope.ADMIN and wanted not in (caller.tenant, *caller.tenants):
            error = "this is for another tenant than the key's"
            raise Fault(Kind.DENIED, "wrong_tenant", error, hint="Use a key of that tenant.")


def challenge(problem: Fault | HttpRefusal, status: int, sent: Sequence[str]) -> dict[str, str]:
    """The header of RFC 6750: asks for a key where none was sent, and says that a sent one is not valid."""
    if status == 401:
        description = problem.error.replace('"', "'")
        wrong = f', error="invalid_token", error_description="{description}"' if sent else ""
        return {"WWW-Authenticate": _CHALLENGE + wrong}
    if status == 403 and isinstance(problem, Fault):
        return {"WWW-Authenticate": f'{_CHALLENGE}, error="insufficient_scope"'}
    return {}


def find_user(peer: tuple[str, int], own: tuple[str, int], tables: Iterable[Path] = _TABLES) -> int | None:
    """The uid of the process whose socket `peer` is connected to our socket `own`. None: unknown."""
    wanted = {b"%b %b %b" % (there, here, _ESTABLISHED) for there, here in zip(_spell(peer), _spell(own), strict=True)}
    for table in tables:
        try:
            content = table.read_bytes()
        except OSError:
            continue
        for needle in wanted:
            start = content.find(b" %b " % needle)
            if start >= 0:
                line = content[content.rfind(b"\n", 0, start) + 1 : content.find(b"\n", start)]
                return int(line.split()[_UID])
    return None


def _spell(address: tuple[str, int]) -> list[bytes]:
    """Writes an address as the tables do: 32-bit words in this machine's byte order. A program may reach an IPv4
    address with an IPv6 socket."""
    ip = ipaddress.ip_address(address[0])
    forms = [ip.packed]
    if ip.version == 4:
        forms.append(bytes(10) + b"\xff\xff" + ip.packed)
    words = [[form[start : start + 4] for start in range(0, len(form), 4)] for form in forms]
    return [
        b"".join(b"%08X" % int.from_bytes(word, sys.byteorder) for word in each) + b":%04X" % address[1]
        for each in words
    ]

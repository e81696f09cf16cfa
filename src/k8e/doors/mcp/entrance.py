"""Who is let in over HTTP, and as whom. Web pages never are.

On loopback that is the user who listens, whom the kernel tells from others, or whoever brings an API key; on every
other address only who brings a key, over TLS. A key is examined anew with every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from k8e.core.access.keys import Keys
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller
from k8e.core.model import Scope as Rank
from k8e.doors.addresses import bracket
from k8e.doors.http.errors import HttpRefusal, describe
from k8e.doors.mcp.neighbours import find_user

PATH: Final = "/mcp"
_CHALLENGE: Final = 'Bearer realm="k8e"'
_HINT: Final = "Send an API key: Authorization: Bearer k8e_... (k8e sandbox-apikey create NAME)."


@dataclass(frozen=True, slots=True)
class Visitor:
    caller: Caller
    identity: str = ""  # of a key; empty: the user who listens
    expires: float = float("inf")


@dataclass(frozen=True, slots=True)
class House:
    """Where agents are received: what clients call it, and who needs no key."""

    port: int
    names: tuple[str, ...]  # *.example.com is everything one label below
    secure: bool
    host: Caller | None  # whose agents come without a key; None: nobody's
    tenant: str = ""  # whose sessions everybody uses; only who has it is let in

    @property
    def scheme(self) -> str:
        return "https" if self.secure else "http"

    def is_called(self, host: str) -> bool:
        """`host` as clients send it."""
        name, colon, port = host.rpartition(":")
        if not colon or host.endswith("]"):
            name, port = host, "443" if self.secure else "80"
        if port != str(self.port):
            return False
        own = {bracket(each.lower()) for each in self.names}
        return name in own or f"*.{name.partition('.')[2]}" in own


class Entrance:
    def __init__(self, house: House, keys: Keys) -> None:
        self._house = house
        self._keys = keys

    async def admit(self, scope: Scope) -> Visitor:
        """Raises HttpRefusal and Fault."""
        headers = Headers(scope=scope)
        self._refuse_web_pages(scope, headers)
        if scope["path"] != PATH:
            raise HttpRefusal(404, "no_such_endpoint", "there is nothing at this address", hint=PATH)
        sent = headers.getlist("authorization")
        if not sent:
            return await self._recognise(scope)
        kind, _, token = sent[0].partition(" ")
        if len(sent) > 1 or kind.lower() != "bearer":
            raise Fault(Kind.UNAUTHENTICATED, "key_needed", "only API keys are taken here", hint=_HINT)
        admitted = await self._keys.admit_bearer(token.strip())
        self._check_tenant(admitted.caller)
        return Visitor(admitted.caller, admitted.identity, admitted.expires)

    def _refuse_web_pages(self, scope: Scope, headers: Headers) -> None:
        """Neither under another name of ours nor from another place."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        reached = scope.get("server") or ("", 0)
        direct = self._house.host is None and host == f"{bracket(str(reached[0]))}:{self._house.port}"
        if not direct and not self._house.is_called(host):
            error = "this is not the host you are looking for"
            raise HttpRefusal(421, "host_refused", error, hint=f"one of: {', '.join(self._house.names)}")
        if origin is not None and origin.lower() != f"{self._house.scheme}://{host}":
            raise HttpRefusal(403, "origin_refused", "web pages may not call this", hint="call it from a program")

    async def _recognise(self, scope: Scope) -> Visitor:
        host, peer, own = self._house.host, scope.get("client"), scope.get("server")
        if host is None:
            raise Fault(Kind.UNAUTHENTICATED, "key_needed", "this needs an API key", hint=_HINT)
        uid = await asyncio.to_thread(find_user, tuple(peer), tuple(own)) if peer and own else None
        if uid not in (0, host.uid):
            error = "without a key only the user who started this can use it"
            detail = "it is not known who calls" if uid is None else f"the caller is uid {uid}"
            raise Fault(Kind.UNAUTHENTICATED, "key_needed", error, detail=detail, hint=_HINT)
        return Visitor(host)

    def _check_tenant(self, caller: Caller) -> None:
        wanted = self._house.tenant
        if wanted and caller.scope is not Rank.ADMIN and wanted not in (caller.tenant, *caller.tenants):
            error = "this is for another tenant than the key's"
            raise Fault(Kind.DENIED, "wrong_tenant", error, hint="Use a key of that tenant.")


def explain(problem: Fault | HttpRefusal, sent: Iterable[str]) -> JSONResponse:
    """With what RFC 6750 wants said: who sent nothing is asked for a key, who sent one hears that it is no good."""
    status, body = describe(problem)
    headers = {}
    if status == 401:
        described = problem.error.replace('"', "'")
        wrong = f', error="invalid_token", error_description="{described}"' if list(sent) else ""
        headers["WWW-Authenticate"] = _CHALLENGE + wrong
    elif status == 403 and isinstance(problem, Fault):
        headers["WWW-Authenticate"] = f'{_CHALLENGE}, error="insufficient_scope"'
    return JSONResponse(body, status_code=status, headers=headers)

"""Who calls over the unix socket: the kernel names the process and its user (SO_PEERCRED). Web pages are kept out."""

from __future__ import annotations

import socket
import struct
from typing import Final

from k8e.core.model import Caller
from k8e.doors.http.errors import HttpRefusal
from k8e.doors.http.exchange import Request

HOSTS: Final = (b"", b"localhost")


def read_caller(client: socket.socket) -> Caller:
    pid, uid, _ = struct.unpack("iII", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Caller(uid, pid=pid)


def refuse_web_pages(request: Request) -> None:
    """A browser that a web page makes call the daemon names the page's origin or another host, and can send none of
    the content types that the routes take."""
    if b"origin" in request.headers or b"sec-fetch-site" in request.headers:
        raise HttpRefusal(403, "origin_refused", "web pages may not call this", hint="call it from a program")
    if request.headers.get(b"host", b"") not in HOSTS:
        raise HttpRefusal(403, "host_refused", "this is not the host you are looking for", hint="Host: localhost")

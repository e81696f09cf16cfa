"""`k8e sandbox-mcp`: a bridge from an agent's pipes to the daemon, which speaks the protocol. It understands nothing of
what it carries, and imports next to nothing: an agent waits for it."""

from __future__ import annotations

import os

from k8e.cli.client import ELSEWHERE, JSON, Client, Response, connect, quote, quote_json
from k8e.cli.ending import FAILED, Failure, read_some, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket

SHUT_RDWR = 2


def bridge(tenant: str) -> int:
    """Standard output is the protocol's: what has to be said to people goes to stderr."""
    try:
        refuse_elsewhere()
        target = "/v1/mcp" + (f"?tenant_id={quote(tenant)}" if tenant else "")
        head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        connection = connect()
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode("ascii"))
        from _thread import start_new_thread

        start_new_thread(carry, (connection,))
        response = Response(connection)
        if response.status != 200:
            write_all(2, response.read())
            return FAILED
        for piece in response.pieces():
            write_all(1, piece)
    except Failure as failure:
        import json

        write_all(2, json.dumps(failure.body).encode() + b"\n")
        return failure.status
    return 0


def listen(address: str, tenant: str) -> int:
    """The daemon listens, for as long as we are here; what it says is printed as it comes."""
    refuse_elsewhere()
    fields = f'{{"http_addr": {quote_json(address)}, "tenant_id": {quote_json(tenant)}}}'
    response = Client().request("POST", "/v1/mcp/listen", fields.encode("ascii"), JSON)
    if response.status != 200:
        write_all(1, response.read())
        return FAILED
    for piece in response.pieces():
        write_all(1, piece)
    return 0


def refuse_elsewhere() -> None:
    for name in ELSEWHERE:
        if os.environ.get(name):
            raise Failure(
                "mcp_not_remote",
                "sandbox-mcp speaks to the daemon of this machine only",
                detail=f"{name} names a gateway",
                hint="run it where the daemon is, for example: ssh HOST k8e sandbox-mcp",
            )


def carry(connection: socket) -> None:
    """Standard input, to its end. After it, answers may still come; nobody waits for them once our output is closed."""
    try:
        while piece := read_some(0):
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        import select

        poll = select.poll()
        poll.register(1, 0)
        poll.poll()
        connection.shutdown(SHUT_RDWR)
    except (OSError, Failure):
        pass  # the connection has ended, and whoever reads from it knows

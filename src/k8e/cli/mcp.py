"""`k8e sandbox-mcp`: the bridge that carries MCP messages between an AI agent's pipes and the daemon, or a gateway. It
understands nothing of what it carries, and imports next to nothing: an agent waits for it.

The daemon sends requests of its own (mcp_requests.py), in lines that begin with a byte which no line of the protocol
has; replies go the same way, between two lines of the AI agent.
"""

from __future__ import annotations

import os

from k8e.cli.client import GATEWAY_VARIABLES, LocalClient, add_query, check, find_gateway
from k8e.cli.client.http import connect, send_patiently
from k8e.cli.client.response import Response
from k8e.cli.process import Failure, print_json, read_some, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from _socket import socket
    from _thread import LockType
    from collections.abc import Callable, Iterable

SHUT_RDWR = 2
MARK = b"\x1e"


def serve(options: argparse.Namespace) -> int:
    for name, value in (("CERT", options.tls_cert), ("KEY", options.tls_key)):
        if value:
            os.environ[f"K8E_SANDBOX_{name}"] = value
    return listen(options.http_addr, options.tenant_id) if options.http else bridge(options.tenant_id)


def serve_agentkernel(options: argparse.Namespace) -> int:
    return bridge(options.tenant_id, "agentkernel", permissive=options.allow_permissive)


def bridge(tenant: str, front: str = "", *, permissive: bool = False) -> int:
    """Standard output is the protocol's: errors go to stderr."""
    try:
        profile = find_gateway()
        if profile is None:
            return bridge_to_daemon(tenant, front, permissive=permissive)
        if front:
            raise Failure(
                "mcp_not_remote",
                f"{front} mcp server serves the daemon of this machine only",
                hint="k8e sandbox-mcp carries an agent to a gateway",
            )
        from k8e.cli.remote.mcp import bridge_to_gateway

        return bridge_to_gateway(profile, tenant)
    except Failure as failure:
        print_json(failure.body, 2)
        return failure.status


def open_mcp(cwd: str, home: str, tenant_id: str, front: str) -> socket:
    """A connection on which an AI agent's messages follow in chunks, and the daemon's in the answer."""
    target = add_query("/v1/mcp", cwd=cwd, home=home, tenant_id=tenant_id, front=front, answers="1")
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    connection = connect()
    send_patiently(connection, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode("ascii"))
    return connection


def bridge_to_daemon(tenant: str, front: str, *, permissive: bool) -> int:
    connection = open_mcp(find_folder(), os.path.realpath(os.environ.get("HOME") or "/"), tenant, front)
    from _thread import allocate_lock, start_new_thread

    left: list[bool] = []
    between = allocate_lock()  # held while a line of the AI agent is not complete
    start_new_thread(carry, (connection, between, left))
    response = check(Response(connection))

    def reply(request: bytes) -> None:
        start_new_thread(answer, (connection, between, request, permissive))

    try:
        pass_on(response.pieces(), reply)
    except Failure:
        if not left:
            raise
    return 0


def listen(address: str, tenant: str) -> int:
    """The daemon listens for as long as this process runs, and what it writes is printed. This process reads the
    certificates: the daemon may read more files than the user may."""
    certificate, key = (read_pem(os.environ.pop(f"K8E_SANDBOX_{name}", "")) for name in ("CERT", "KEY"))
    for name in GATEWAY_VARIABLES:
        if os.environ.get(name):
            raise Failure(
                "mcp_not_remote",
                "--http serves the daemon of this machine only",
                detail=f"{name} names a gateway",
                hint="run it on the gateway's machine with an address of its own, or leave out --http",
            )
    wanted = {"http_addr": address, "tenant_id": tenant, "certificate": certificate, "key": key}
    for piece in LocalClient().listen_mcp(wanted):
        write_all(1, piece)
    return 0


def find_folder() -> str:
    """The working directory; empty when it is gone."""
    try:
        return os.path.realpath(os.getcwd())
    except OSError:
        return ""


def read_pem(path: str) -> str:
    if not path:
        return ""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(64 << 10)
    except OSError as error:
        hint = "--tls-cert and --tls-key name PEM files that you can read"
        raise Failure("certificate_unreadable", f"{path} cannot be read", detail=str(error), hint=hint) from error


def pass_on(pieces: Iterable[bytes], reply: Callable[[bytes], None]) -> None:
    """Writes the daemon's messages to the AI agent, and hands requests to the bridge to `reply`."""
    request: bytes | None = None  # that has begun
    for piece in pieces:
        while piece:
            if request is None:
                lines, mark, piece = piece.partition(MARK)
                write_all(1, lines)
                request = b"" if mark else None
            else:
                words, end, piece = piece.partition(b"\n")
                request += words
                if end:
                    reply(request)
                    request = None


def answer(connection: socket, between: LockType, request: bytes, permissive: bool) -> None:
    from k8e.cli.mcp_requests import find_answer

    line = MARK + find_answer(request, permissive=permissive) + b"\n"
    try:
        with between:
            send_chunk(connection, line)
    except OSError:
        pass  # the connection has ended


def send_chunk(connection: socket, data: bytes) -> None:
    send_patiently(connection, b"%x\r\n%b\r\n" % (len(data), data))


def carry(connection: socket, between: LockType, left: list[bool]) -> None:
    """Sends standard input to its end, then waits until the AI agent closes our standard output, which is noted in
    `left`: answers may come until then, and the connection ends after it."""
    complete = True
    try:
        while piece := read_some(0):
            if complete:
                between.acquire()
            if MARK in piece:  # only the bridge sends marked lines; as MARK is no JSON, the line stays invalid
                piece = piece.replace(MARK, b"\x1f")
            send_chunk(connection, piece)
            if complete := piece.endswith(b"\n"):
                between.release()
        if not complete:
            send_chunk(connection, b"\n")
            between.release()
        with between:
            send_chunk(connection, MARK + b'{"end": true}\n')
        import select

        poll = select.poll()
        poll.register(1, 0)
        poll.poll()
        left.append(True)
        connection.shutdown(SHUT_RDWR)
    except (OSError, Failure):
        pass  # the connection has ended, which the main thread notices

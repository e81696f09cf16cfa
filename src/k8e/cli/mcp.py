"""`k8e sandbox-mcp`: a bridge from an agent's pipes to the daemon, or a gateway, which speaks the protocol. It
understands nothing of what it carries, and imports next to nothing: an agent waits for it.

The daemon sends requests of its own (mcp_requests.py), in lines that begin with a byte which no line of the protocol
has; replies go the same way, between two lines of the AI agent.
"""

from __future__ import annotations

import os

from k8e.cli.client.http import ELSEWHERE, JSON, Client, connect, quote, quote_json, run_dir, send_patiently
from k8e.cli.client.response import Response
from k8e.cli.process import FAILED, Failure, read_some, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from _thread import LockType
    from collections.abc import Callable, Iterable

SHUT_RDWR = 2
MARK = b"\x1e"


def bridge(tenant: str, front: str = "", *, permissive: bool = False) -> int:
    """Standard output is the protocol's: what has to be said to people goes to stderr."""
    try:
        if (place := find_elsewhere()) is not None:
            from k8e.cli.client.http import quieten_grpc

            quieten_grpc()
            from k8e.cli.remote.mcp import bridge_far

            if front:
                raise Failure(
                    "mcp_not_remote",
                    f"{front} mcp server serves the daemon of this machine only",
                    hint="k8e sandbox-mcp carries an agent to a gateway",
                )
            return bridge_far(place, tenant)
        target = f"/v1/mcp?cwd={quote(find_folder())}&home={quote(os.path.realpath(os.environ.get('HOME') or '/'))}"
        target += f"&tenant_id={quote(tenant)}" if tenant else ""
        target += f"&front={front}" if front else ""
        head = f"POST {target}&answers=1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        connection = connect()
        send_patiently(connection, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode("ascii"))
        from _thread import allocate_lock, start_new_thread

        left: list[bool] = []
        between = allocate_lock()  # held while a line of the agent's is not complete
        start_new_thread(carry, (connection, between, left))
        response = Response(connection)
        if response.status != 200:
            write_all(2, response.read())
            return FAILED

        def reply(question: bytes) -> None:
            start_new_thread(answer, (connection, between, question, permissive))

        try:
            pass_on(response.pieces(), reply)
        except Failure:
            if not left:
                raise
    except Failure as failure:
        import json

        write_all(2, json.dumps(failure.body).encode() + b"\n")
        return failure.status
    return 0


def listen(address: str, tenant: str) -> int:
    """The daemon listens, for as long as we are here; what it says is printed as it comes. Certificates are read by us:
    the daemon may read more than we may."""
    certificate, key = (read_pem(os.environ.pop(f"K8E_SANDBOX_{name}", "")) for name in ("CERT", "KEY"))
    for name in ELSEWHERE:
        if os.environ.get(name):
            raise Failure(
                "mcp_not_remote",
                "--http serves the daemon of this machine only",
                detail=f"{name} names a gateway",
                hint="run it on the gateway's machine with an address of its own, or leave out --http",
            )
    names = {"http_addr": address, "tenant_id": tenant, "certificate": certificate, "key": key}
    fields = "{" + ", ".join(f'"{name}": {quote_json(value)}' for name, value in names.items()) + "}"
    response = Client().request("POST", "/v1/mcp/listen", fields.encode("ascii"), JSON)
    if response.status != 200:
        write_all(1, response.read())
        return FAILED
    for piece in response.pieces():
        write_all(1, piece)
    return 0


def find_folder() -> str:
    """Where we were started; empty when that is gone."""
    try:
        return os.path.realpath(os.getcwd())
    except OSError:
        return ""


def find_elsewhere() -> str | None:
    """The profile of a gateway, empty for the one that variables name; None is the daemon of this machine. As for every
    other command."""
    for name in ELSEWHERE:
        if os.environ.get(name):
            return ""
    if not os.path.exists(run_dir() + "/k8e.sock") and os.path.exists(
        os.path.expanduser("~/.k8e/sandbox/profiles.yaml")
    ):
        from k8e.cli.remote.profiles import Profiles

        return Profiles().current or None
    return None


def read_pem(path: str) -> str:
    if not path:
        return ""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(64 << 10)
    except OSError as error:
        raise Failure("certificate_unreadable", f"{path} cannot be read", detail=str(error)) from error


def pass_on(pieces: Iterable[bytes], reply: Callable[[bytes], None]) -> None:
    """To the agent, but for what is asked of us."""
    question: bytes | None = None  # that has begun
    for piece in pieces:
        while piece:
            if question is None:
                lines, mark, piece = piece.partition(MARK)
                write_all(1, lines)
                question = b"" if mark else None
            else:
                words, end, piece = piece.partition(b"\n")
                question += words
                if end:
                    reply(question)
                    question = None


def answer(connection: socket, between: LockType, question: bytes, permissive: bool) -> None:
    from k8e.cli.mcp_requests import find_answer

    line = MARK + find_answer(question, permissive=permissive) + b"\n"
    try:
        with between:
            send_chunk(connection, line)
    except OSError:
        pass  # nobody waits for it any more


def send_chunk(connection: socket, data: bytes) -> None:
    send_patiently(connection, b"%x\r\n%b\r\n" % (len(data), data))


def carry(connection: socket, between: LockType, left: list[bool]) -> None:
    """Standard input, to its end. After it, answers may still come; nobody waits for them once our output is closed,
    which is noted in `left`: an end like any other."""
    complete = True
    try:
        while piece := read_some(0):
            if complete:
                between.acquire()
            if MARK in piece:  # nobody but us speaks for us; as it is no JSON, it stays none
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
        pass  # the connection has ended, and whoever reads from it knows

"""`k8e sandbox-mcp`: a bridge from an agent's pipes to the daemon, or a gateway, which speaks the protocol. It
understands nothing of what it carries, and imports next to nothing: an agent waits for it."""

from __future__ import annotations

import os

from k8e.cli.client import ELSEWHERE, JSON, Client, Response, connect, quote, quote_json, run_dir
from k8e.cli.ending import FAILED, Failure, read_some, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket

SHUT_RDWR = 2


def bridge(tenant: str, front: str = "", first: bytes = b"") -> int:
    """Standard output is the protocol's: what has to be said to people goes to stderr. `first` is a line of ours about
    where we are, before the agent's."""
    try:
        if (place := find_elsewhere()) is not None:
            from k8e.cli.client import quieten_grpc

            quieten_grpc()
            from k8e.cli.remote.agents import bridge_far

            if front:
                raise Failure(
                    "mcp_not_remote",
                    f"{front} mcp server serves the daemon of this machine only",
                    hint="k8e sandbox-mcp carries an agent to a gateway",
                )
            return bridge_far(place, tenant)
        target = f"/v1/mcp?cwd={quote(find_folder())}&home={quote(os.path.realpath(os.environ.get('HOME') or '/'))}"
        target += f"&tenant_id={quote(tenant)}" if tenant else ""
        target += f"&front={front}&described=1" if front else ""
        head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        connection = connect()
        chunk = b"%x\r\n%b\r\n" % (len(first), first) if first else b""
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode("ascii") + chunk)
        from _thread import start_new_thread

        left: list[bool] = []
        start_new_thread(carry, (connection, left))
        response = Response(connection)
        if response.status != 200:
            write_all(2, response.read())
            return FAILED
        try:
            for piece in response.pieces():
                write_all(1, piece)
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
        from k8e.cli.remote.files import Profiles

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


def carry(connection: socket, left: list[bool]) -> None:
    """Standard input, to its end. After it, answers may still come; nobody waits for them once our output is closed,
    which is noted in `left`: an end like any other."""
    try:
        while piece := read_some(0):
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        import select

        poll = select.poll()
        poll.register(1, 0)
        poll.poll()
        left.append(True)
        connection.shutdown(SHUT_RDWR)
    except (OSError, Failure):
        pass  # the connection has ended, and whoever reads from it knows

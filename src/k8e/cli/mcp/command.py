"""`k8e sandbox-mcp`: the bridge (bridge.py) that carries MCP messages between an AI agent's pipes and the daemon or
a gateway; and the daemon's listener for MCP over HTTP. It imports next to nothing: an agent waits for it.

The daemon sends requests of its own (requests.py), in lines that begin with a byte which no line of the protocol
has; replies go the same way, between two lines of the AI agent.
"""

from __future__ import annotations

import os
import time
from _socket import AF_UNIX, SHUT_RDWR, SOCK_STREAM, socket

from k8e.cli.client import GATEWAY_VARIABLES, LocalClient, add_query, check, find_gateway, run_dir
from k8e.cli.client.http import connect, send_patiently
from k8e.cli.client.response import Response
from k8e.cli.mcp.bridge import MARK, NOT_YET, PATIENCE, PAUSE, Bridge
from k8e.cli.process import Failure, print_json, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable


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


class LocalLink:
    """A connection to the daemon, on which chunks go both ways."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection

    def send(self, data: bytes) -> None:
        send_patiently(self._connection, b"%x\r\n%b\r\n" % (len(data), data))

    def end_input(self) -> None:
        """The connection stays open: the bridge still answers requests of the daemon."""
        self.send(MARK + b'{"end": true}\n')

    def receive(self) -> Iterable[bytes]:
        return check(Response(self._connection)).pieces()

    def shut_down(self) -> None:
        try:
            self._connection.shutdown(SHUT_RDWR)
        except OSError:
            pass  # it has ended


def bridge_to_daemon(tenant: str, front: str, *, permissive: bool) -> int:
    folder, home = find_folder(), os.path.realpath(os.environ.get("HOME") or "/")

    def answer(request: bytes) -> bytes:
        from k8e.cli.mcp.requests import find_answer

        return find_answer(request, permissive=permissive)

    return Bridge(lambda: LocalLink(open_mcp(folder, home, tenant, front)), answer).run()


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
    listener = Listener({"http_addr": address, "tenant_id": tenant, "certificate": certificate, "key": key})
    while True:
        listener.follow()
        listener.wait()


class Listener:
    """The request for which the daemon listens. The next daemon gets the same, with the address of the first."""

    def __init__(self, wanted: dict[str, str]) -> None:
        self._wanted = wanted
        self._listened = False
        self._ended = 0.0  # when a daemon that listened ended
        self._stopped = False

    def follow(self) -> None:
        """Returns when the daemon has ended. Raises Failure when it does not listen."""
        self._stopped, listening = True, False
        try:
            for piece in LocalClient().listen_mcp(self._wanted):
                self._wanted["http_addr"] = self._wanted["http_addr"] if listening else read_address(piece)
                self._listened = listening = True
                write_all(1, piece)
            told = Failure("daemon_stopped", "the daemon was stopped", hint="the next daemon listens here again")
        except Failure as failure:
            self._stopped = failure.code != "connection_lost"
            if not self._listened or (self._stopped and not self._may_change(failure)):
                raise
            told = failure
        if listening:
            self._ended = time.monotonic()
            print_json(told.body, 2)

    def _may_change(self, failure: Failure) -> bool:
        """An earlier daemon may be about to end, and may still have the address."""
        taken = failure.code == "address_unusable" and time.monotonic() < self._ended + PATIENCE
        return taken or failure.code in NOT_YET

    def wait(self) -> None:
        """A daemon that was stopped is not started again from here. One that died is, where that is allowed."""
        if self._stopped or os.geteuid() != 0:
            wait_for_daemon()


def wait_for_daemon() -> None:
    while True:
        time.sleep(PAUSE)
        connection = socket(AF_UNIX, SOCK_STREAM)
        try:
            connection.connect(run_dir() + "/k8e.sock")
            return
        except OSError:
            pass
        finally:
            connection.close()


def read_address(told: bytes) -> str:
    """The address in the daemon's first line."""
    import json

    return str(json.loads(told)["listening"]).split("/")[2]


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

"""`agentkernel run -p HOST:SANDBOX`: ports of this machine that lead to servers in the sandbox.

This process listens, with the rights of its user, and asks the daemon for a connection to the sandbox's own loopback
for each client that comes. So a port is closed when the run ends, however it ends, and the sandbox gets no way out.
"""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time

from k8e.cli.agentkernel.output import say
from k8e.cli.client import LocalClient, SessionName
from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.client.streams import LocalPort

LOOPBACK = "127.0.0.1"
PIECE = 64 << 10
BACKLOG = 64
MOST = 64  # clients of one run at once: the daemon connects no more of them (k8e.core.ports)
PAUSE = 0.1  # seconds, after a client that could not be taken
CLOSED = (errno.EBADF, errno.EINVAL)  # as `accept` fails when its socket was closed
RESET = struct.pack("ii", 1, 0)  # linger for no time: the client is told that the connection broke
FORM = "HOST:SANDBOX, such as 8000:8000, 127.0.0.2:8080:80, 0.0.0.0:80:8000 or [::1]:8000:8000"


class Port:
    """One -p. `host` is 0 where any free port of the machine will do."""

    def __init__(self, address: str, host: int, inside: int) -> None:
        self.address = address
        self.host = host
        self.inside = inside

    @property
    def place(self) -> str:
        return f"[{self.address}]:{self.host}" if ":" in self.address else f"{self.address}:{self.host}"

    def describe(self) -> dict[str, object]:
        return {"address": self.address, "host": self.host, "sandbox": self.inside}


def read_port(text: str) -> Port:
    front, _, inside = text.rpartition(":")
    address, _, host = front.rpartition(":")
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    try:
        socket.inet_pton(family, address or LOOPBACK)
        return Port(address or LOOPBACK, read_number(host, 0), read_number(inside, 1))
    except (OSError, ValueError):
        raise Failure("usage", f"--publish: {text!r} is no {FORM.partition(',')[0]}", hint=FORM) from None


def read_number(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= 65535:
        raise ValueError(text)
    return int(text)


class Forwarding:
    """The listening sockets of one run. They are bound before anything runs, and served once there is a sandbox."""

    def __init__(self, ports: list[Port]) -> None:
        self._listeners: list[tuple[socket.socket, Port]] = []
        self._room = threading.Semaphore(MOST)
        try:
            for port in ports:
                self._listeners.append((listen(port), port))
        except Failure:
            self.close()
            raise

    def serve(self, session_id: str) -> None:
        for listener, port in self._listeners:
            threading.Thread(target=accept, args=(listener, session_id, port.inside, self._room), daemon=True).start()

    def close(self) -> None:
        for listener, _ in self._listeners:
            stop(listener, socket.SHUT_RDWR)
            listener.close()


def listen(port: Port) -> socket.socket:
    family = socket.AF_INET6 if ":" in port.address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((port.address, port.host))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise explain(port, error) from error
    if not port.host:
        port.host = listener.getsockname()[1]
        say(f"{port.place} leads to port {port.inside} of the sandbox")
    return listener


def explain(port: Port, error: OSError) -> Failure:
    hints = {
        errno.EADDRINUSE: f"another program has it: choose another, or any that is free (-p 0:{port.inside})",
        errno.EACCES: f"ports below 1024 are root's: choose a higher one, such as -p {8000 + port.host}:{port.inside}",
        errno.EADDRNOTAVAIL: "this machine has no such address: leave it out (loopback), or see `ip address`",
    }
    hint = hints.get(error.errno or 0, f"-p 0:{port.inside} takes any free port of loopback")
    detail = error.strerror or str(error)
    return Failure("port_unavailable", f"{port.place} cannot be listened on", detail=detail, hint=hint)


def accept(listener: socket.socket, session_id: str, inside: int, room: threading.Semaphore) -> None:
    """Until the run ends. A client that cannot be taken does not end it: one that comes later may be."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError as error:
            if error.errno in CLOSED:
                return  # with the run
            time.sleep(PAUSE)  # such as EMFILE: the clients that are there have all descriptors
            continue
        if not room.acquire(blocking=False):
            reset(client)
            continue
        try:
            threading.Thread(target=serve, args=(client, session_id, inside, room), daemon=True).start()
        except RuntimeError:  # no more threads
            reset(client)
            room.release()


def serve(client: socket.socket, session_id: str, inside: int, room: threading.Semaphore) -> None:
    try:
        forward(client, session_id, inside)
    finally:
        client.close()
        room.release()


def forward(client: socket.socket, session_id: str, inside: int) -> None:
    """One connection, to the end of both directions. Where it cannot be made, or breaks off inside, the client sees a
    reset: while the server starts, a client that tries again is what helps."""
    try:
        connection = LocalClient().connect_port(SessionName(session_id), inside)
    except (Failure, OSError):
        return reset(client)
    sending = threading.Thread(target=send_in, args=(client, connection), daemon=True)
    try:
        sending.start()
        for piece in connection.pieces():
            client.sendall(piece)
        client.shutdown(socket.SHUT_WR)
        sending.join()
    except (Failure, OSError, RuntimeError):
        reset(client)
    connection.close()
    return None


def send_in(client: socket.socket, connection: LocalPort) -> None:
    try:
        while piece := client.recv(PIECE):
            connection.write(piece)
        connection.close_write()
    except OSError:
        connection.close()  # the client broke off, or the daemon did


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    stop(client, socket.SHUT_RD)
    client.close()


def stop(end: socket.socket, how: int) -> None:
    """Wakes the thread that waits for it: to close it alone would leave it open as long as that thread waits."""
    try:
        end.shutdown(how)
    except OSError:
        pass  # it is not connected any more

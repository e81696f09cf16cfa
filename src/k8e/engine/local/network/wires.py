"""Wires: a pair of interfaces, one end on the machine, the other in a network namespace that a sandbox is started in.

The namespace has no name. It lives as long as the descriptor that is handed out, and from the sandbox's start on as
long as the sandbox: after a crash at any moment the kernel removes what no process uses, and the wire with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import INNER_INTERFACE, Network, Wire
from k8e.engine.local.network.netlink.route import (
    RouteSocket,
    add_address,
    add_default_route,
    add_neighbour,
    add_pair,
    remove_link,
    set_alias,
    set_up,
)
from k8e.engine.local.system.calls import CLONE_NEWNET, setns, unshare
from k8e.engine.local.system.tasks import in_own_thread

_LOOPBACK = 1  # its index in every namespace
_OWN_NAMESPACE = "/proc/thread-self/ns/net"
# The machine ignores what a sandbox says about routes, and has no address on the wire but ours. The rules drop such
# packets as well.
_DEAF = {
    "ipv6/conf/{}/accept_ra": "0",
    "ipv6/conf/{}/addr_gen_mode": "1",
    "ipv6/conf/{}/accept_redirects": "0",
    "ipv4/conf/{}/accept_redirects": "0",
    "ipv4/conf/{}/accept_source_route": "0",
    "ipv4/conf/{}/route_localnet": "0",
    "ipv4/conf/{}/send_redirects": "0",
}
_HINT = "the daemon needs root, and a kernel with network namespaces and veth"


def open_wire(wire: Wire, sandbox: str) -> int:
    """Makes both ends and configures them; they are up when this returns. The descriptor is of the namespace, which is
    the caller's to close."""
    try:
        return in_own_thread(lambda: _open(wire, sandbox))
    except OSError as error:
        with contextlib.suppress(EngineError):
            remove_wire(wire)
        raise EngineError("network wire", f"{wire.interface} cannot be made: {error}", _HINT) from error


def _open(wire: Wire, sandbox: str) -> int:
    namespace, inner = _new_namespace()
    try:
        with inner, RouteSocket() as host:
            _lay(wire, sandbox, host, inner, namespace)
    except BaseException:
        os.close(namespace)
        raise
    return namespace


def _new_namespace() -> tuple[int, RouteSocket]:
    """And a socket that changes what is in there, also when this thread is back in its own namespace."""
    before = os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare(CLONE_NEWNET)
        try:
            return _furnish()
        finally:
            setns(before, CLONE_NEWNET)
    finally:
        os.close(before)


def _furnish() -> tuple[int, RouteSocket]:
    # Interfaces there give themselves no addresses and follow no advertisements.
    for name, value in (("addr_gen_mode", "1"), ("accept_ra", "0"), ("accept_redirects", "0")):
        _set(f"ipv6/conf/default/{name}", value)
    # Any user inside may bind any port: no process there has the capability for low ones.
    _set("ipv4/ip_unprivileged_port_start", "0")
    namespace = os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return namespace, RouteSocket()
    except BaseException:
        os.close(namespace)
        raise


def _lay(wire: Wire, sandbox: str, host: RouteSocket, inner: RouteSocket, namespace: int) -> None:
    host.request(add_pair(wire.interface, wire.host_mac, INNER_INTERFACE, wire.inner_mac, namespace))
    outside, inside = host.index_of(wire.interface), inner.index_of(INNER_INTERFACE)
    host.request(set_alias(outside, f"k8e sandbox {sandbox}"[:255]))
    for name, value in _DEAF.items():
        _set(name.format(wire.interface), value)
    inner.request(*(add_address(inside, inner_end) for _, inner_end in wire.pairs), set_up(_LOOPBACK), set_up(inside))
    host.request(*(add_address(outside, host_end) for host_end, _ in wire.pairs), set_up(outside))
    inner.request(*(add_default_route(inside, host_end.ip) for host_end, _ in wire.pairs))
    # Both ends know each other's hardware address from the start, whatever is sent on the wire.
    host.request(*(add_neighbour(outside, inner_end.ip, wire.inner_mac) for _, inner_end in wire.pairs))
    inner.request(*(add_neighbour(inside, host_end.ip, wire.host_mac) for host_end, _ in wire.pairs))


def _set(name: str, value: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # no IPv6 here
        Path("/proc/sys/net", name).write_text(value)


def remove_wire(wire: Wire) -> None:
    """Fine for one that is not there. The other end goes with it."""
    if not wire_exists(wire):
        return
    try:
        with RouteSocket() as host:
            host.request(remove_link(host.index_of(wire.interface)))
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.ENXIO):
            raise EngineError("network wire", f"{wire.interface} cannot be removed: {error}", _HINT) from error


def wire_exists(wire: Wire) -> bool:
    """Asked of the kernel: /sys shows the namespace that it was mounted in, which need not be ours."""
    try:
        socket.if_nametoindex(wire.interface)
    except OSError:
        return False
    return True


def known_networks() -> list[Network]:
    """Where the machine has routes and addresses already, wires included: a lease is no use in there."""
    with RouteSocket() as host:
        return host.networks()

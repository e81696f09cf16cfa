"""Wires: a pair of interfaces, one end on the machine, the other in a network namespace that a sandbox is started in.
Of a virtual machine: one interface (a tap), whose other end is the descriptor that the machine's VMM has; or, where the
VMM opens its tap itself, a pair as for others, and a bridge from its inner end to a tap in the namespace.

The namespace has no name. It lives as long as the descriptor that is handed out, and from the sandbox's start on as
long as the sandbox: after a crash at any moment the kernel removes what no process uses, and the wire with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import INNER_INTERFACE, Network, Wire
from k8e.engine.local.network.netlink.route import (
    RouteSocket,
    add_address,
    add_bridge,
    add_default_route,
    add_neighbour,
    add_pair,
    remove_link,
    set_alias,
    set_mac,
    set_master,
    set_up,
)
from k8e.engine.local.system.calls import CLONE_NEWNET, opened, setns, unshare
from k8e.engine.tasks import in_own_thread

_LOOPBACK = 1  # its index in every namespace
_OWN_NAMESPACE = "/proc/thread-self/ns/net"
# The machine ignores what a sandbox says about routes, and has no address on the wire but ours. The rules drop such
# packets as well.
_DEAF = {
    "ipv6/conf/{}/accept_ra": "0",
    "ipv6/conf/{}/addr_gen_mode": "1",
    "ipv6/conf/{}/accept_redirects": "0",
    "ipv4/conf/{}/accept_redirects": "0",
    # Only the sandbox's own address asks: a question from any other would make an entry in the machine's one table of
    # neighbours, which a thousand of them fill. (The rules drop what asks so in IPv6.)
    "ipv4/conf/{}/arp_ignore": "2",
    "ipv4/conf/{}/accept_source_route": "0",
    "ipv4/conf/{}/route_localnet": "0",
    "ipv4/conf/{}/send_redirects": "0",
}
_HINT = "the daemon needs root, and a kernel with network namespaces, veth and, for virtual machines, /dev/net/tun"
TAP, _BRIDGE = "tap0", "bridge0"  # in the namespace
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC
# A tap, without a header of the device's own, with the one in which virtio says what is left to do with a packet.
_TAP_FLAGS = 0x0002 | 0x1000 | 0x4000


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


def open_tap(wire: Wire, sandbox: str) -> int:
    """Makes the machine's end as `open_wire` does. The descriptor is the other end, and the interface goes with the
    last process that has it."""
    try:
        return _open_tap(wire, sandbox)
    except OSError as error:
        with contextlib.suppress(EngineError):
            remove_wire(wire)
        raise EngineError("network wire", f"{wire.interface} cannot be made: {error}", _HINT) from error


def _open_tap(wire: Wire, sandbox: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", wire.interface.encode(), _TAP_FLAGS))
        with RouteSocket() as host:
            outside = host.index_of(wire.interface)
            host.request(set_mac(outside, wire.host_mac))
            _configure(wire, sandbox, host, outside)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_bridged_tap(wire: Wire, sandbox: str, owner: int) -> int:
    """As `open_wire`; there the inner end leads to a tap that this user may open, and has no address itself."""
    try:
        return in_own_thread(lambda: _open_bridged_tap(wire, sandbox, owner))
    except OSError as error:
        with contextlib.suppress(EngineError):
            remove_wire(wire)
        raise EngineError("network wire", f"{wire.interface} cannot be made: {error}", _HINT) from error


def _open_bridged_tap(wire: Wire, sandbox: str, owner: int) -> int:
    namespace, inner = _new_namespace()
    try:
        with inner, RouteSocket() as host:
            # Not the guest's own hardware address: a bridge keeps what is for its own interfaces.
            host.request(add_pair(wire.interface, wire.host_mac, INNER_INTERFACE, _other_mac(wire), namespace))
            _configure(wire, sandbox, host, host.index_of(wire.interface))
            setns(namespace, CLONE_NEWNET)  # this thread ends with it
            _make_tap(owner)
            inner.request(add_bridge(_BRIDGE))
            bridge, ends = inner.index_of(_BRIDGE), [inner.index_of(name) for name in (INNER_INTERFACE, TAP)]
            inner.request(*(set_master(end, bridge) for end in ends), *(set_up(end) for end in (bridge, *ends)))
    except BaseException:
        os.close(namespace)
        raise
    return namespace


def _make_tap(owner: int) -> None:
    with opened("/dev/net/tun", os.O_RDWR) as descriptor:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", TAP.encode(), _TAP_FLAGS))
        fcntl.ioctl(descriptor, _TUNSETOWNER, owner)
        fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)  # as long as the namespace


def _other_mac(wire: Wire) -> str:
    head, _, last = wire.inner_mac.rpartition(":")
    return f"{head}:{int(last, 16) ^ 0x80:02x}"


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
    pairs = wire.pairs
    inner.request(*(add_address(inside, inner_end) for _, inner_end in pairs), set_up(_LOOPBACK), set_up(inside))
    _configure(wire, sandbox, host, outside)
    inner.request(
        *(add_default_route(inside, host_end.ip) for host_end, _ in pairs),
        *(add_neighbour(inside, host_end.ip, wire.host_mac) for host_end, _ in pairs),
    )


def _configure(wire: Wire, sandbox: str, host: RouteSocket, outside: int) -> None:
    """The machine's end. Both ends know each other's hardware address from the start, whatever is sent on the wire."""
    for name, value in _DEAF.items():
        _set(name.format(wire.interface), value)
    host.request(
        set_alias(outside, alias_of(sandbox)),
        *(add_address(outside, host_end) for host_end, _ in wire.pairs),
        set_up(outside),
        *(add_neighbour(outside, inner_end.ip, wire.inner_mac) for _, inner_end in wire.pairs),
    )


def alias_of(sandbox: str) -> str:
    return f"k8e sandbox {sandbox}"[:255]


def _set(name: str, value: str) -> None:
    with contextlib.suppress(FileNotFoundError), opened(f"/proc/sys/net/{name}", os.O_WRONLY) as file:  # or no IPv6
        os.write(file, value.encode())


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

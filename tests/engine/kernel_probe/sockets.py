"""Families and protocols of sockets, the interfaces behind them, and the input of terminals."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
import termios

from .calls import ATTEMPTS, HIGH, attempt, call, try_every

FAMILIES = {
    "AX25": 3, "IPX": 4, "APPLETALK": 5, "NETROM": 6, "X25": 9, "ROSE": 11, "DECnet": 12, "KEY": 15, "PACKET": 17,
    "ECONET": 19, "RDS": 21, "PPPOX": 24, "LLC": 26, "IB": 27, "MPLS": 28, "CAN": 29, "TIPC": 30, "BLUETOOTH": 31,
    "RXRPC": 33, "PHONET": 35, "IEEE802154": 36, "CAIF": 37, "ALG": 38, "NFC": 39, "VSOCK": 40, "KCM": 41,
    "QIPCRTR": 42, "SMC": 43, "XDP": 44,
}  # fmt: skip
NETLINKS = {
    "USERSOCK": 2, "SOCK_DIAG": 4, "NFLOG": 5, "XFRM": 6, "SELINUX": 7, "ISCSI": 8, "AUDIT": 9, "FIB_LOOKUP": 10,
    "CONNECTOR": 11, "NETFILTER": 12, "DNRTMSG": 14, "KOBJECT_UEVENT": 15, "GENERIC": 16, "SCSITRANSPORT": 18,
    "ECRYPTFS": 19, "RDMA": 20, "CRYPTO": 21, "SMC": 22,
}  # fmt: skip


def open_socket(family: int, kind: int, protocol: int = 0) -> object:
    return call("socket", family, kind, protocol)


def open_any_socket(family: int, protocols: tuple[int, ...] = (0,)) -> object:
    """Of every type: one that opens is enough."""
    kinds = (socket.SOCK_RAW, socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
    return try_every(
        *(lambda k=kind, p=protocol: open_socket(family, k, p) for kind in kinds for protocol in protocols)
    )


for _name, _number in FAMILIES.items():
    ATTEMPTS[f"AF_{_name}"] = lambda family=_number: open_any_socket(family, (0, 2, 768))  # type: ignore[misc]
for _name in ("PACKET", "VSOCK", "ALG", "KEY"):
    ATTEMPTS[f"AF_{_name}-high-bits"] = lambda family=FAMILIES[_name]: (  # type: ignore[misc]
        open_any_socket(family | HIGH, (0, 2, 768))
    )
for _name, _number in NETLINKS.items():
    ATTEMPTS[f"NETLINK_{_name}"] = lambda protocol=_number: open_socket(16, socket.SOCK_RAW, protocol)  # type: ignore[misc]
    ATTEMPTS[f"NETLINK_{_name}-high-bits"] = lambda protocol=_number: try_every(  # type: ignore[misc]
        lambda: open_socket(16 | HIGH, socket.SOCK_RAW, protocol | HIGH),
        lambda: open_socket(16, socket.SOCK_RAW | HIGH, protocol | HIGH),
        lambda: open_socket(16 | HIGH, socket.SOCK_DGRAM, protocol),
    )
for _family, _label in ((socket.AF_INET, "INET"), (socket.AF_INET6, "INET6")):
    ATTEMPTS[f"SOCK_RAW-{_label}"] = lambda family=_family: try_every(  # type: ignore[misc]
        *(lambda p=protocol: open_socket(family, socket.SOCK_RAW, p) for protocol in (1, 6, 17, 58, 89, 255))
    )


def ask_for_all(name: str, *lists: tuple[object, ...]) -> object:
    """The filter has to say no to each: any other answer means that the kernel was asked, and looked for a module."""
    asked = []
    for arguments in lists:
        try:
            call(name, *arguments)
        except PermissionError:
            continue
        except OSError as error:
            asked.append(f"{arguments[:3]}: {error.strerror}")
        else:
            asked.append(f"{arguments[:3]}: made")
    if not asked:
        raise PermissionError(errno.EPERM, "all of them")
    return asked


def pair_of_other_families(high_bits: int = 0) -> object:
    pair, families = ctypes.create_string_buffer(8), (0, *range(2, 46))
    return ask_for_all("socketpair", *((family | high_bits, socket.SOCK_STREAM, 0, pair) for family in families))


def sockets_of_other_protocols() -> object:
    """Be it SCTP, DCCP, UDP-Lite, a packet socket by its old name, or TCP's type with the protocol of UDP."""
    wanted = [(kind, protocol) for kind in (1, 2, 5) for protocol in (33, 108, 115, 132, 136, 255, 256)]
    wanted += [(5, 0), (6, 33), (10, 768), (10, 0), (1, 17), (1, 1), (1, 58), (2, 6), (2, 262)]
    families = (socket.AF_INET, socket.AF_INET6)
    return ask_for_all("socket", *((family, *each) for family in families for each in wanted))


ATTEMPTS["sockets-of-other-protocols"] = sockets_of_other_protocols
ATTEMPTS["socketpair-of-other-families"] = pair_of_other_families
ATTEMPTS["socketpair-of-other-families-high-bits"] = lambda: pair_of_other_families(HIGH)


@attempt("netlink-route-add-interface")
def add_interface() -> object:
    """RTM_NEWLINK of kind `dummy`: asking is allowed on a route socket, changing is not."""

    def attribute(kind: int, value: bytes) -> bytes:
        return struct.pack("<HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)

    info = attribute(18, attribute(1, b"dummy"))
    body = struct.pack("<BBHiII", 0, 0, 0, 0, 0, 0) + attribute(3, b"evil0\0") + info
    header = struct.pack("<IHHII", 16 + len(body), 16, 0x605, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        route.settimeout(5)
        route.send(header + body)
        answer = route.recv(4096)
    code = struct.unpack_from("<i", answer, 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))
    return "added"


@attempt("bring-loopback-down")
def bring_loopback_down() -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, 0x8914, struct.pack("16sh22x", b"lo", 0))  # SIOCSIFFLAGS
    return "down"


def type_into_terminal(request: int, argument: bytes) -> object:
    """On the terminal that controls this process: a session of our own on a fresh pair, for those without one."""
    if not sys.stdin.isatty():
        os.setsid()
        _, follower = os.openpty()
        fcntl.ioctl(follower, termios.TIOCSCTTY, 0)
    else:
        follower = 0
    return call("ioctl", follower, request, ctypes.create_string_buffer(argument))


for _name, _number, _argument in (("TIOCSTI", 0x5412, b"x"), ("TIOCLINUX", 0x541C, b"\3\0")):
    for _suffix, _bits in (("", 0), ("-high-bits", HIGH), ("-many-high-bits", 0x7FFFFFFF << 32)):
        ATTEMPTS[_name + _suffix] = lambda request=_number | _bits, argument=_argument: (  # type: ignore[misc]
            type_into_terminal(request, argument)
        )

"""Frames as a guest's kernel that is the attacker's, or a VMM that was taken over, may put on the wire: by hand."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address, ip_address

ARP, IPV4, IPV6 = 0x0806, 0x0800, 0x86DD
BROADCAST, ROUTERS = "ff:ff:ff:ff:ff:ff", "33:33:00:00:00:01"


def pack_mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def frame(target: str, source: str, kind: int, body: bytes) -> bytes:
    return pack_mac(target) + pack_mac(source) + struct.pack("!H", kind) + body


def checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total = sum(int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(source: str, target: str, protocol: int, body: bytes, hops: int = 64, at: int = 16) -> tuple[int, bytes]:
    """Returns its kind and bytes. `at`: where in the body its sum is, over the addresses, too."""
    begin, end = ip_address(source), ip_address(target)
    pseudo = begin.packed + end.packed + struct.pack("!II", len(body), protocol)
    body = body[:at] + struct.pack("!H", checksum(pseudo + body)) + body[at + 2 :]
    if begin.version == 6:
        return IPV6, struct.pack("!IHBB", 6 << 28, len(body), protocol, hops) + begin.packed + end.packed + body
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, hops, protocol, 0) + begin.packed + end.packed
    return IPV4, head[:10] + struct.pack("!H", checksum(head)) + head[12:] + body


def syn(source: str, target: str, port: int = 80) -> tuple[int, bytes]:
    return packet(source, target, 6, struct.pack("!HHIIBBHHH", 40000, port, 1, 0, 0x50, 2, 8192, 0, 0))


def datagram(source: str, target: str, port: int, data: bytes = b"x") -> tuple[int, bytes]:
    return packet(source, target, 17, struct.pack("!HHHH", 40000, port, 8 + len(data), 0) + data, at=6)


def arp(operation: int, mac: str, sender: str, target: str, target_mac: str = "00:00:00:00:00:00") -> bytes:
    begin, end = IPv4Address(sender), IPv4Address(target)
    head = struct.pack("!HHBBH", 1, IPV4, 6, 4, operation)
    return head + pack_mac(mac) + begin.packed + pack_mac(target_mac) + end.packed


def router_advertisement(source: str, mac: str, prefix: str) -> tuple[int, bytes]:
    """A router for everything, with a prefix to take an address of, and a name server."""
    option = struct.pack("!BB6s", 1, 1, pack_mac(mac))
    option += struct.pack("!BBBBIII16s", 3, 4, 64, 0xC0, 86400, 86400, 0, IPv6Address(prefix).packed)
    option += struct.pack("!BBHI16s", 25, 3, 0, 3600, IPv6Address(source).packed)
    return packet(source, "ff02::1", 58, struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 9000, 0, 0) + option, 255, 2)


def solicitation(source: str, target: str, mac: str) -> tuple[int, bytes]:
    body = struct.pack("!BBHI16sBB6s", 135, 0, 0, 0, IPv6Address(target).packed, 1, 1, pack_mac(mac))
    return packet(source, target, 58, body, 255, 2)


def advertisement(source: str, target: str, mac: str) -> tuple[int, bytes]:
    """That the source, overriding what is known, is at this hardware address."""
    body = struct.pack("!BBHI16sBB6s", 136, 0, 0, 0x60000000, IPv6Address(source).packed, 2, 1, pack_mac(mac))
    return packet(source, target, 58, body, 255, 2)


def redirect(source: str, target: str, better: str) -> tuple[int, bytes]:
    body = struct.pack("!BBHI16s16s", 137, 0, 0, 0, IPv6Address(better).packed, IPv6Address(target).packed)
    return packet(source, target, 58, body, 255, 2)

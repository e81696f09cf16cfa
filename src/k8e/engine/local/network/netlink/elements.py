"""Elements of the table's sets: encoded for the kernel and read back. Pure.

Keys are what nft would make of the same rules: each field padded to four bytes, addresses and ports in network order,
marks in the machine's.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from k8e.engine.local.network.netlink.messages import (
    CREATE,
    NFTABLES,
    Message,
    attribute,
    attributes_of,
    nested,
    netfilter_attributes,
    netfilter_message,
    parse_attributes,
    text,
)
from k8e.policy import Address

_INET = 1  # NFPROTO_INET
_NEW, _GET, _DELETE = 12, 13, 14
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS = 1, 2, 3
_LIST_ELEMENT = 1
_KEY, _DATA, _TIMEOUT, _EXPIRATION, _KEY_END = 1, 2, 4, 5, 10
_VALUE, _VERDICT = 1, 2
_CODE, _CHAIN = 1, 2
_GOTO = -4
_IFNAME = 16
_AT_ONCE = 256  # elements in one message: its length is 16 bits


@dataclass(frozen=True, slots=True)
class Element:
    key: bytes
    end: bytes = b""  # of an interval, inclusive
    data: bytes = b""
    milliseconds: int = 0  # until it goes by itself; 0: never
    goto: str = ""  # of a map of verdicts: the chain

    def encode(self) -> bytes:
        parts = [nested(_KEY, attribute(_VALUE, self.key))]
        if self.end:
            parts.append(nested(_KEY_END, attribute(_VALUE, self.end)))
        if self.data:
            parts.append(nested(_DATA, attribute(_VALUE, self.data)))
        if self.goto:
            verdict = attribute(_CODE, struct.pack("!i", _GOTO)) + text(_CHAIN, self.goto)
            parts.append(nested(_DATA, nested(_VERDICT, verdict)))
        if self.milliseconds:
            parts.append(attribute(_TIMEOUT, struct.pack("!Q", self.milliseconds)))
        return nested(_LIST_ELEMENT, *parts)


@dataclass(frozen=True, slots=True)
class Found:
    """An element as the kernel has it."""

    key: bytes
    end: bytes
    data: bytes
    timeout: int  # milliseconds, 0: never
    remaining: int


def _padded(field: bytes) -> bytes:
    return field + bytes(-len(field) % 4)


def target_key(address: Address, port: int) -> bytes:
    return address.packed + _padded(struct.pack("!H", port))


def mark_bytes(mark: int) -> bytes:
    return struct.pack("=I", mark)


def name_element(address: Address, port: int, mark: int, milliseconds: int) -> Element:
    return Element(target_key(address, port), data=mark_bytes(mark), milliseconds=milliseconds)


def range_element(first: Address, last: Address, port: int, mark: int) -> Element:
    return Element(target_key(first, port), target_key(last, port), mark_bytes(mark))


def every_element(interface: str, mark: int) -> Element:
    return Element(interface_key(interface), data=mark_bytes(mark))


def interface_key(interface: str) -> bytes:
    return interface.encode().ljust(_IFNAME, b"\0")


def live_element(mark: int) -> Element:
    return Element(mark_bytes(mark))


def read_target(key: bytes) -> tuple[Address, int]:
    size = len(key) - 4
    return ip_address(key[:size]), struct.unpack_from("!H", key, size)[0]


def read_mark(data: bytes) -> int:
    mark: int = struct.unpack("=I", data)[0]
    return mark


def read_refused(key: bytes) -> tuple[Address, int, int]:
    """Address, protocol, port."""
    size = len(key) - 8
    return ip_address(key[:size]), key[size], struct.unpack_from("!H", key, size + 4)[0]


def _list_of(table: str, name: str, elements: Sequence[Element]) -> bytes:
    parts = [text(_LIST_TABLE, table), text(_LIST_SET, name)]
    if elements:
        parts.append(nested(_LIST_ELEMENTS, *(element.encode() for element in elements)))
    return b"".join(parts)


def _chunks(elements: Iterable[Element]) -> Iterator[Sequence[Element]]:
    chosen = list(elements)
    for start in range(0, len(chosen), _AT_ONCE):
        yield chosen[start : start + _AT_ONCE]


def add_elements(table: str, name: str, elements: Iterable[Element]) -> list[Message]:
    return [
        netfilter_message(NFTABLES, _NEW, _INET, _list_of(table, name, chunk), CREATE) for chunk in _chunks(elements)
    ]


def delete_elements(table: str, name: str, elements: Iterable[Element]) -> list[Message]:
    return [netfilter_message(NFTABLES, _DELETE, _INET, _list_of(table, name, chunk)) for chunk in _chunks(elements)]


def flush_set(table: str, name: str) -> Message:
    return netfilter_message(NFTABLES, _DELETE, _INET, _list_of(table, name, ()))


@functools.lru_cache(maxsize=1024)
def get_elements(table: str, name: str) -> Message:
    """Every command asks four times, of the same sets."""
    return netfilter_message(NFTABLES, _GET, _INET, _list_of(table, name, ()))


def read_elements(answers: Iterable[bytes]) -> list[Found]:
    return [
        _read_element(attributes_of(element))
        for answer in answers
        for _, element in parse_attributes(netfilter_attributes(answer).get(_LIST_ELEMENTS, b""))
    ]


def _read_element(fields: dict[int, bytes]) -> Found:
    def value(kind: int) -> bytes:
        return attributes_of(fields[kind]).get(_VALUE, b"") if kind in fields else b""

    def number(kind: int) -> int:
        return int.from_bytes(fields[kind], "big") if kind in fields else 0

    return Found(value(_KEY), value(_KEY_END), value(_DATA), number(_TIMEOUT), number(_EXPIRATION))

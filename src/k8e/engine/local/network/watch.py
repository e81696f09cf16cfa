"""Watches for rules that go: those of our table, or routing rules of wires, whatever program removed them.

Nothing opens meanwhile (routing_rules.py); this is so that sandboxes have their network back at once, and not with
their next command. Addresses and refusals come and go all the time and are passed over.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from k8e.engine.local.network.netlink.messages import NFTABLES, netfilter_attributes, read_messages
from k8e.engine.local.network.netlink.route import DELRULE, read_rule

_NETFILTER, _ROUTE = 12, 0
_RULES_GROUP = 1 << 6  # NFNLGRP_NFTABLES
_ROUTING_GROUPS = 1 << 7 | 1 << 18  # RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_RULE
# A table, a chain, a rule, a set that goes; and one that comes, which is how a table is switched off.
_OF_INTEREST = frozenset(NFTABLES << 8 | kind for kind in (2, 5, 8, 11, 0))
_ELEMENTS_GONE = NFTABLES << 8 | 14
_TABLE_NAME, _SET_NAME = 1, 2
_WIRES = b"wires"  # the one set whose elements only ever come
_AT_ONCE = 64  # datagrams, before others have their turn
_BUFFER = 1 << 20


class Watch:
    """`notice` is called in the event loop; `has_wire` says whether an interface is a sandbox's of ours."""

    def __init__(self, table: str, has_wire: Callable[[str], bool], notice: Callable[[], None]) -> None:
        self._table = table.encode()
        self._has_wire = has_wire
        self._notice = notice
        self.noticed = False  # since the reader set it to False
        self._loop = asyncio.get_running_loop()
        self._sockets = [_listen(_NETFILTER, _RULES_GROUP), _listen(_ROUTE, _ROUTING_GROUPS)]
        for each in self._sockets:
            self._loop.add_reader(each, self._read, each)

    def close(self) -> None:
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()

    def has_news(self) -> bool:
        """Whether a change of rules, perhaps of ours, waits to be read."""
        try:
            self._sockets[0].recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:  # messages are lost, which the kernel tells only once
            self.noticed = True
            self._notice()
        return True

    def _read(self, source: socket.socket) -> None:
        ours = False
        for _ in range(_AT_ONCE):
            try:
                ours = self._is_ours(source, source.recv(1 << 17)) or ours
            except BlockingIOError:
                break
            except OSError:
                ours = True  # the buffer overflowed, and messages are lost
        if ours:
            self.noticed = True
            self._notice()

    def _is_ours(self, source: socket.socket, data: bytes) -> bool:
        if source is self._sockets[0] and self._table not in data:
            return False  # of another table, of which there may be many, and large ones
        return any(self._concerns_us(kind, body) for kind, _, body in read_messages(data))

    def _concerns_us(self, kind: int, body: bytes) -> bool:
        if kind == DELRULE:
            return self._has_wire(read_rule(body).interface)
        if kind not in _OF_INTEREST and kind != _ELEMENTS_GONE:
            return False
        found = {number: value.rstrip(b"\0") for number, value in netfilter_attributes(body).items()}
        if found.get(_TABLE_NAME) != self._table:
            return False
        return kind in _OF_INTEREST or found.get(_SET_NAME) == _WIRES


def _listen(protocol: int, groups: int) -> socket.socket:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    listening = socket.socket(socket.AF_NETLINK, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        listening.bind((0, groups))
    except OSError:
        listening.close()
        raise
    return listening

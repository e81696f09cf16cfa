"""The engine's table in the kernel: made by nft, its elements changed directly.

Everything blocks for a moment and is called in threads.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
from collections.abc import Iterable, Sequence

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.connection_limits import USUAL, ConnectionLimits
from k8e.engine.local.network.netlink.elements import Found, flush_set, get_elements, read_elements
from k8e.engine.local.network.netlink.messages import (
    NFTABLES,
    Message,
    NetfilterSocket,
    NetlinkError,
    NoSuchThing,
    netfilter_attributes,
    netfilter_message,
    text,
)
from k8e.engine.local.network.rules import (
    OWN_WIRES,
    Json,
    Layout,
    build_table,
    build_wires,
    count_rules,
    name_edition,
    remove_table,
    wire_sets,
)
from k8e.engine.local.system.tool import bound_to, find_tool
from k8e.policy import FORBIDDEN, GLOBAL

_DEADLINE = 60.0
_INET = 1
_GET_TABLE, _GET_CHAIN, _GET_RULE = 1, 4, 7
_CHAIN_TABLE, _CHAIN_NAME = 1, 3
_RULE_TABLE = 1
_TABLE_NAME, _TABLE_FLAGS = 1, 2
_DORMANT = 1
_HINT = "install nftables (Debian and Ubuntu: apt-get install nftables)"


def run_nft(commands: Sequence[Json]) -> None:
    """All of it at once or nothing."""
    nft = find_tool("nft")
    if nft is None:
        raise EngineError("network rules", "nft is not installed", _HINT)
    try:
        done = subprocess.run(
            bound_to(os.getpid(), [nft, "-j", "-f", "-"]),
            input=json.dumps({"nftables": commands}).encode(),
            capture_output=True,
            timeout=_DEADLINE,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError("network rules", f"nft: {error}", _HINT) from error
    if done.returncode != 0:
        complaint = done.stderr.decode(errors="replace").strip()[-1000:] or f"exit status {done.returncode}"
        raise EngineError(
            "network rules", f"nft: {complaint}", "the kernel needs nf_tables with inet, nat and conntrack"
        )


class Table:
    """One per engine, named after its state directory."""

    def __init__(self, name: str, shares: ConnectionLimits = USUAL, layout: Layout = OWN_WIRES) -> None:
        self.name = name
        self._shares = shares
        self._layout = layout

    @functools.cached_property
    def kernel(self) -> NetfilterSocket:
        """Opened when it is first used, also after `close`."""
        try:
            return NetfilterSocket()
        except OSError as error:
            raise EngineError("network rules", f"netlink: {error}", "the kernel needs netfilter") from error

    def close(self) -> None:
        if kernel := vars(self).pop("kernel", None):
            kernel.close()

    def is_current(self) -> bool:
        """Whether it is there with the rules that we know."""
        wanted = text(_CHAIN_TABLE, self.name) + text(_CHAIN_NAME, name_edition(self._shares, self._layout))
        try:
            self.kernel.request(netfilter_message(NFTABLES, _GET_CHAIN, _INET, wanted))
        except NoSuchThing:
            return False
        except NetlinkError as error:
            raise EngineError("network rules", f"netlink: {error}", "the daemon needs root") from error
        return True

    def is_whole(self, wires: int | None = None) -> bool:
        """Whether it works and has as many rules as it should: a chain may have been flushed, or all of them. `wires`:
        how many there should be rules for, where that does not follow from the set of them."""
        try:
            tables = self._dump(_GET_TABLE, _TABLE_NAME)
            working = [each for each in tables if not int.from_bytes(each.get(_TABLE_FLAGS, b""), "big") & _DORMANT]
            count = len(self.wires()) if wires is None else wires
            return bool(working) and len(self._dump(_GET_RULE, _RULE_TABLE)) == count_rules(count, self._layout)
        except NoSuchThing:
            return False
        except NetlinkError as error:
            raise EngineError("network rules", f"netlink: {error}", "the daemon needs root") from error

    def _dump(self, kind: int, place: int) -> list[dict[int, bytes]]:
        """Those of our table: `place` is the attribute that says so."""
        wanted = netfilter_message(NFTABLES, kind, _INET, text(place, self.name) if kind == _GET_RULE else b"")
        found = (netfilter_attributes(each) for each in self.kernel.dump(wanted))
        return [each for each in found if each.get(place, b"").rstrip(b"\0") == self.name.encode()]

    def replace(self, wires: Iterable[Wire]) -> None:
        """By a new one that lets nothing out, in one step."""
        table = build_table(self.name, FORBIDDEN, GLOBAL, self._shares, self._layout)
        run_nft([*remove_table(self.name), *table, *build_wires(self.name, wires, self._shares, self._layout)])

    def add_wires(self, wires: Iterable[Wire]) -> None:
        run_nft(build_wires(self.name, wires, self._shares, self._layout))

    def remove(self) -> None:
        run_nft(remove_table(self.name))

    def wires(self) -> frozenset[str]:
        """The interfaces that there are rules for."""
        return frozenset(found.key.rstrip(b"\0").decode() for found in self.elements("wires"))

    def elements(self, name: str) -> list[Found]:
        return read_elements(self.kernel.dump(get_elements(self.name, name)))

    def commit(self, messages: Sequence[Message]) -> None:
        """One transaction."""
        self.kernel.commit(messages)

    def clear(self, wire: Wire) -> list[Message]:
        return [flush_set(self.name, name) for name in wire_sets(wire)]


def is_own_address(address: object) -> bool:
    """Whether it is the machine's: only its own can be bound."""
    family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        probe.bind((str(address), 0))
        return True
    return False

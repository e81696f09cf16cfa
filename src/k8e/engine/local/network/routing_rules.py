"""Routing rules that close a wire when the rules of our table are gone.

A firewall that is reloaded (`nft flush ruleset`) removes our table too. So the wires do not depend on it alone: a
routing rule for each, before all others, prohibits packets from the wire without the bit that our table puts into their
mark. Without the table there is no bit and no route, to the world or to the machine itself; also while no daemon is
there.

The first rule of a machine is the one for its own addresses, and nothing can be put before it. While there are wires it
stands one place further back. There is always one: the new one is added before the old one is removed. Everything here
blocks for a moment.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import INTERFACE_PREFIX, Wire
from k8e.engine.local.network.netlink.messages import Message
from k8e.engine.local.network.netlink.route import RouteSocket, RoutingRule, own_addresses, prohibit_unmarked
from k8e.engine.local.network.rules import PASS

_HINT = "the daemon needs root, and a kernel with policy routing (IP_MULTIPLE_TABLES, IPV6_MULTIPLE_TABLES)"
_FIRST, _SECOND = 0, 1
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


def make_room() -> None:
    """Makes room for rules before the machine's first one."""
    with _kernel() as kernel:
        for family in _FAMILIES.values():
            if any(rule.looks_up_own_addresses and rule.priority == _FIRST for rule in kernel.rules(family)):
                _request(kernel, own_addresses(family, _SECOND).add())
                _request(kernel, own_addresses(family, _FIRST).remove())


def guard_wires(wires: Iterable[Wire]) -> None:
    """Adds the rules that are missing, after `make_room`."""
    with _kernel() as kernel:
        for wire in wires:
            _request(kernel, *(rule.add() for rule in _rules(wire)))


def unguard_wire(wire: Wire) -> None:
    """Removes the rules of a wire that is gone."""
    with _kernel() as kernel:
        _request(kernel, *(rule.remove() for rule in _rules(wire)))


def leave_rules() -> None:
    """As they were, when no engine on the machine has a wire any more. Where an administrator has moved the rule, it
    stays there."""
    with _kernel() as kernel:
        for family in _FAMILIES.values():
            found = kernel.rules(family)
            if any(rule.interface.startswith(INTERFACE_PREFIX) for rule in found):
                continue
            ours = own_addresses(family, _SECOND)
            if ours in found:
                _request(kernel, own_addresses(family, _FIRST).add())
                _request(kernel, ours.remove())


def _rules(wire: Wire) -> list[RoutingRule]:
    return [prohibit_unmarked(_FAMILIES[each.version], wire.interface, PASS) for each in wire.host_addresses]


@contextlib.contextmanager
def _kernel() -> Iterator[RouteSocket]:
    try:
        with RouteSocket() as kernel:
            yield kernel
    except OSError as error:
        raise EngineError("network routing", f"rules of routing cannot be changed: {error}", _HINT) from error


def _request(kernel: RouteSocket, *messages: Message) -> None:
    """Fine when it is so already: several engines may be at it."""
    kernel.request(*messages, fine=(errno.EEXIST, errno.ENOENT))

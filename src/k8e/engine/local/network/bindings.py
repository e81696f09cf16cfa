"""Binds an interface to the rules of a wire, where the interface is not ours to name: the rules are there beforehand,
numbered, and meet no packet until a binding says which interface and which address are theirs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.netlink.elements import Element, add_elements, delete_elements, interface_key
from k8e.engine.local.network.netlink.messages import Message

_CHAINS = {"refusing": "refuse", "asking": "ask", "opening": "open"}


def _elements(wire: Wire) -> Iterator[tuple[str, Element]]:
    """The set `wires` first: from then on nothing passes that the others do not say."""
    interface = interface_key(wire.interface)
    yield "wires", Element(interface)
    for name, chain in _CHAINS.items():
        yield name, Element(interface, goto=f"{chain}_{wire.index}")
    for outer, inner in wire.pairs:
        version = inner.version
        yield f"sources{version}", Element(interface + inner.ip.packed)
        yield f"resolvers{version}", Element(interface + outer.ip.packed)
        yield f"inner{version}", Element(inner.ip.packed)
        yield f"answering{version}", Element(interface, data=outer.ip.packed)


def bind(table: str, wire: Wire) -> list[Message]:
    """Fine when it is bound already. The address of the resolver is the same for all such wires, and stays."""
    messages = [each for name, element in _elements(wire) for each in add_elements(table, name, [element])]
    outers = [(f"outer{outer.version}", Element(outer.ip.packed)) for outer, _ in wire.pairs]
    return messages + [each for name, element in outers for each in add_elements(table, name, [element])]


def unbind(table: str, wire: Wire) -> list[Message]:
    """Fine when it is not bound: deleting what is not there would fail, so it is added first."""
    messages: list[Message] = []
    for name, element in _elements(wire):
        messages += add_elements(table, name, [element])
        messages += delete_elements(table, name, [Element(element.key)])
    return messages

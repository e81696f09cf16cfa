"""The rules for a sandbox's packets in the kernel, as JSON for nft. Pure.

One table for each engine. The rules of a wire are there before the wire is: they are made a block of wires at a time,
and opening a wire only fills its sets. Which rules a packet meets is looked up by its interface, so that many wires
cost no more than one.

    prerouting   drops packets that are not from the wire's own address; redirects queries on port 53 to our resolver;
                 does not track those that are sent there anyway (nor does output track the answers);
                 sets a bit of the packet's mark, without which nothing is routed
    input        to the machine: the resolver, neighbour discovery, nothing else; to its ends of wires: from wires only,
                 but for services of the machine that its own users ask there, and never the resolver
    forward      from a wire: established connections whose reason still holds, new ones that the sets allow
                 to a wire: answers to those
    output       from the machine to a sandbox: answers only
    postrouting  masquerades

A connection carries the mark of the reason that let it out (ct mark). `live` holds the reasons that are in force: a
connection outlives the addresses of its name, and ends when its reason does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from itertools import product
from typing import Any, TypeAlias

from k8e.engine.local.dns.resolv_conf import PORT, REDIRECTED_PORT
from k8e.engine.local.network.addresses import INTERFACE_PREFIX, Network, Wire
from k8e.engine.local.network.connection_limits import USUAL, ConnectionLimits

Json: TypeAlias = dict[str, Any]

FAMILY = "inet"
KEPT_REFUSALS = 256  # of each wire and family, until core asks
REFUSAL_SECONDS = 3600
MAX_ADDRESSES = 4096  # of resolved names, of each wire and family
MAX_BLOCKS = 2048  # listed addresses and blocks times their ports

# Which rules a table has: a new daemon that knows others replaces them, and one that finds the machine's table of
# connections to be of another size. Count it up whenever the rules or the layout of sets change.
EDITION = "edition_8"

# Of a packet's mark, from the end of prerouting until it has found its way: one that other software leaves alone.
PASS = 0x1000

_KEY = {4: "ipv4_addr", 6: "ipv6_addr"}
_PROTOCOL = {4: "ip", 6: "ip6"}


def _payload(protocol: str, field: str) -> Json:
    return {"payload": {"protocol": protocol, "field": field}}


def _meta(key: str) -> Json:
    return {"meta": {"key": key}}


def _ct(key: str) -> Json:
    return {"ct": {"key": key}}


def _is(left: Json, right: Any, operator: str = "==") -> Json:
    return {"match": {"op": operator, "left": left, "right": right}}


def _concat(*parts: Json) -> Json:
    return {"concat": list(parts)}


def _goto(chain: str) -> Json:
    return {"goto": {"target": chain}}


_IIF, _OIF, _L4 = _meta("iifname"), _meta("oifname"), _meta("l4proto")
_PORT = _payload("th", "dport")
_ACCEPT: Json = {"accept": None}
_DROP: Json = {"drop": None}
_WITH_PORTS = _is(_L4, {"set": ["tcp", "udp"]})
_ASKED = _is(_PORT, {"set": [PORT, REDIRECTED_PORT]})
_FROM_WIRE = _is(_IIF, "@wires")
_TO_WIRE = _is(_OIF, "@wires")
_LIVE = _is(_ct("mark"), "@live")
_MARK_PASS: Json = {"mangle": {"key": _meta("mark"), "value": {"|": [_meta("mark"), PASS]}}}
_UNMARK: Json = {"mangle": {"key": _meta("mark"), "value": {"&": [_meta("mark"), 0xFFFFFFFF ^ PASS]}}}
_REFUSE: Json = {"vmap": {"key": _IIF, "data": "@refusing"}}
_SYN_ONLY = {
    "match": {"op": "==", "left": {"&": [_payload("tcp", "flags"), ["fin", "syn", "rst", "ack"]]}, "right": "syn"}
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The points in which the tables of engines differ."""

    # Of the names of all wires. Empty: wires have names that others gave them, each is bound to its rules when it is
    # there (bindings.py), and its sandbox's address is routed and translated by others.
    prefix: str = INTERFACE_PREFIX
    agent_port: int = 0  # of TCP: can be connected to inside, from everywhere but sandboxes; 0: nothing can

    @property
    def own_wires(self) -> bool:
        return bool(self.prefix)

    @property
    def every_wire(self) -> str:
        """Of this engine, and of others where names tell."""
        return f"{self.prefix}*" if self.prefix else "@wires"


OWN_WIRES = Layout()


class TableBuilder:
    """Collects commands for one table, so that each line says only what it is about."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.commands: list[Json] = []

    def add(self, kind: str, **fields: Any) -> None:
        place = {"family": FAMILY} if kind == "table" else {"family": FAMILY, "table": self.table}
        self.commands.append({"add": {kind: place | fields}})

    def set(self, name: str, key: str | list[str], **fields: Any) -> None:
        self.add("set", name=name, type=key, **fields)

    def map(self, name: str, key: str | list[str], value: str, **fields: Any) -> None:
        self.add("map", name=name, type=key, map=value, **fields)

    def hook(self, name: str, kind: str, hook: str, priority: int) -> None:
        self.add("chain", name=name, type=kind, hook=hook, prio=priority, policy="accept")

    def chain(self, name: str) -> None:
        self.add("chain", name=name)

    def rule(self, chain: str, *expressions: Json) -> None:
        self.add("rule", chain=chain, expr=list(expressions))

    def elements(self, name: str, elements: Sequence[Any]) -> None:
        self.add("element", name=name, elem=list(elements))


def name_edition(shares: ConnectionLimits, layout: Layout = OWN_WIRES) -> str:
    """The name of an empty chain that says which rules a table has."""
    return f"{EDITION}_{shares.size}" + (f"_{layout.agent_port}" if layout.agent_port else "")


def build_table(
    table: str,
    forbidden: Iterable[Network],
    public: Iterable[Network],
    shares: ConnectionLimits = USUAL,
    layout: Layout = OWN_WIRES,
) -> list[Json]:
    """Everything that does not depend on which wires there are. `forbidden` is what no list can open, `public` what a
    list opens that has everything on it."""
    build = TableBuilder(table)
    build.add("table", name=table)
    build.chain(name_edition(shares, layout))
    build.set("wires", "ifname")
    build.set("live", "mark")
    build.map("refusing", "ifname", "verdict")
    build.map("opening", "ifname", "verdict")
    build.map("asking", "ifname", "verdict")
    ranges = {"forbidden": list(forbidden), "global": list(public)}
    for version in (4, 6):
        key = _KEY[version]
        build.set(f"sources{version}", ["ifname", key])
        build.set(f"resolvers{version}", ["ifname", key])
        build.set(f"inner{version}", key)
        build.set(f"outer{version}", key)
        build.map(f"answering{version}", "ifname", key)
        for name, networks in ranges.items():
            build.set(f"{name}{version}", key, flags=["interval"])
            prefixes = [_prefix(each) for each in networks if each.version == version]
            if prefixes:
                build.elements(f"{name}{version}", prefixes)
    _build_reject(build)
    _build_arrival(build, layout)
    _build_forward(build, layout)
    if not layout.own_wires:
        return build.commands
    build.hook("postrouting", "nat", "postrouting", 100)
    for version in (4, 6):
        build.rule(
            "postrouting",
            _is(_payload(_PROTOCOL[version], "saddr"), f"@inner{version}"),
            _is(_OIF, layout.every_wire, "!="),
            {"masquerade": None},
        )
    return build.commands


def _from_agent(layout: Layout) -> list[Json]:
    """Answers of the agent, on connections that were opened from outside."""
    reply = _is({"ct": {"key": "direction"}}, "reply")
    return [_is(_L4, "tcp"), _is(_payload("tcp", "sport"), layout.agent_port), reply, _is(_ct("state"), "established")]


def _to_agent(layout: Layout) -> list[Json]:
    original = _is({"ct": {"key": "direction"}}, "original")
    return [_is(_L4, "tcp"), _is(_payload("tcp", "dport"), layout.agent_port), original]


def _prefix(network: Network) -> Json | str:
    if network.prefixlen == network.max_prefixlen:
        return str(network.network_address)
    return {"prefix": {"addr": str(network.network_address), "len": network.prefixlen}}


def _build_reject(build: TableBuilder) -> None:
    """At once, and so that programs understand. gVisor passes only `port unreachable` on to programs."""
    build.chain("reject")
    build.rule("reject", _is(_L4, "tcp"), {"reject": {"type": "tcp reset"}})
    build.rule("reject", _is(_L4, "udp"), {"reject": {"type": "icmpx", "expr": "port-unreachable"}})
    build.rule("reject", {"reject": {"type": "icmpx", "expr": "admin-prohibited"}})


def _build_arrival(build: TableBuilder, layout: Layout) -> None:
    neighbours = _is(_payload("icmpv6", "type"), {"set": ["nd-neighbor-solicit", "nd-neighbor-advert"]})
    build.hook("spoofing", "filter", "prerouting", -300)
    # A sandbox may ask whether its address is free, before it has one. Not from a link-local address: each that asks
    # would have an entry in the machine's one table of neighbours, which a thousand of them fill.
    build.rule("spoofing", _FROM_WIRE, _is(_payload("ip6", "saddr"), "::"), neighbours, _ACCEPT)
    for version in (4, 6):
        source = _concat(_IIF, _payload(_PROTOCOL[version], "saddr"))
        build.rule("spoofing", _FROM_WIRE, _is(source, f"@sources{version}", "!="), _DROP)
    _leave_untracked(build)

    build.hook("questions", "nat", "prerouting", -100)
    for version, (protocol, port) in product((4, 6), (("tcp", PORT), ("udp", REDIRECTED_PORT))):
        resolver = {"map": {"key": _IIF, "data": f"@answering{version}"}}
        build.rule(
            "questions",
            _is(_meta("nfproto"), f"ipv{version}"),
            _is(_L4, protocol),
            _is(_PORT, PORT),
            {"dnat": {"family": _PROTOCOL[version], "addr": resolver, "port": port}},
        )

    # After all other chains that set marks. Answers as well: a check of the way back (rp_filter) looks for the route
    # that they would take from the wire.
    build.hook("passing", "filter", "prerouting", 300)
    build.rule("passing", _FROM_WIRE, _MARK_PASS)
    build.rule("passing", _is({"ct": {"key": "direction"}}, "reply"), _LIVE, _MARK_PASS)
    for version in (4, 6) if layout.agent_port else ():
        inside = _is(_payload(_PROTOCOL[version], "daddr"), f"@inner{version}")
        build.rule("passing", inside, *_to_agent(layout), _MARK_PASS)

    build.chain("to_machine")
    build.rule("to_machine", _UNMARK)
    for version in (4, 6):
        resolver = _concat(_IIF, _payload(_PROTOCOL[version], "daddr"))
        ask = {"vmap": {"key": _IIF, "data": "@asking"}}
        build.rule("to_machine", _WITH_PORTS, _ASKED, _is(resolver, f"@resolvers{version}"), ask)
    if layout.agent_port:
        build.rule("to_machine", *_from_agent(layout), _ACCEPT)
    build.rule("to_machine", neighbours, _ACCEPT)
    build.rule("to_machine", _REFUSE)
    build.rule("to_machine", _DROP)
    build.hook("input", "filter", "input", -5)
    build.rule("input", _FROM_WIRE, _goto("to_machine"))
    # The machine's ends of wires are for the wires: neither a neighbour nor an account of the machine asks a resolver
    # in a sandbox's name. (The resolver's sockets are bound to the wire besides, for when these rules are gone.)
    for version in (4, 6):
        ends = _is(_payload(_PROTOCOL[version], "daddr"), f"@outer{version}")
        build.rule("input", _is(_IIF, "lo", "!="), ends, _DROP)
        build.rule("input", ends, _WITH_PORTS, _ASKED, _goto("reject"))

    build.hook("output", "filter", "output", -5)
    if layout.agent_port:
        build.rule("output", _TO_WIRE, *_to_agent(layout), _ACCEPT)
    build.rule("output", _TO_WIRE, _is(_ct("state"), "new"), _goto("reject"))
    _end_what_comes_too_late(build, "output", layout)


def _leave_untracked(build: TableBuilder) -> None:
    """Queries that are sent to the resolver itself, and its answers, need no entry in the table of connections, where
    each would stand for half a minute. Those that are redirected need one, because their answers are translated back:
    so the resolver has another port for them."""
    build.hook("answers", "filter", "output", -300)
    udp, no_track = _is(_L4, "udp"), {"notrack": None}
    for version in (4, 6):
        resolver = _concat(_IIF, _payload(_PROTOCOL[version], "daddr"))
        build.rule("spoofing", _FROM_WIRE, udp, _is(_PORT, PORT), _is(resolver, f"@resolvers{version}"), no_track)
        ends = _is(_payload(_PROTOCOL[version], "saddr"), f"@outer{version}")
        build.rule("answers", ends, udp, _is(_payload("udp", "sport"), PORT), no_track)


def _build_forward(build: TableBuilder, layout: Layout) -> None:
    build.chain("outward")
    build.rule("outward", _UNMARK)
    if layout.agent_port:
        build.rule("outward", *_from_agent(layout), _ACCEPT)
    build.rule("outward", _is(_ct("state"), "established"), _LIVE, _ACCEPT)
    build.rule("outward", _is(_OIF, layout.every_wire), _REFUSE)
    for version in (4, 6):
        build.rule("outward", _is(_payload(_PROTOCOL[version], "daddr"), f"@forbidden{version}"), _REFUSE)
    build.rule(
        "outward", _is(_ct("state"), "new"), _is(_L4, "tcp"), _SYN_ONLY, {"vmap": {"key": _IIF, "data": "@opening"}}
    )
    build.rule("outward", _REFUSE)
    build.rule("outward", _DROP)

    build.chain("inward")
    build.rule("inward", _UNMARK)
    if layout.agent_port:
        build.rule("inward", *_to_agent(layout), _ACCEPT)
    build.rule("inward", _is({"ct": {"key": "direction"}}, "reply"), _LIVE, _ACCEPT)
    # Packets of no connection, or of a revoked one: the other end is told as well.
    build.rule("inward", _is(_L4, "tcp"), {"reject": {"type": "tcp reset"}})
    build.rule("inward", _DROP)

    build.hook("forward", "filter", "forward", -5)
    build.rule("forward", _FROM_WIRE, _goto("outward"))
    build.rule("forward", _TO_WIRE, _goto("inward"))
    _end_what_comes_too_late(build, "forward", layout)


def _end_what_comes_too_late(build: TableBuilder, hook: str, layout: Layout) -> None:
    """For a sandbox that has just gone: the packet would follow the machine's default route."""
    for version in (4, 6) if layout.own_wires else ():
        late = _is(_payload(_PROTOCOL[version], "daddr"), f"@inner{version}")
        build.rule(hook, late, _is(_OIF, layout.every_wire, "!="), _DROP)


def build_wires(
    table: str, wires: Iterable[Wire], shares: ConnectionLimits = USUAL, layout: Layout = OWN_WIRES
) -> list[Json]:
    """The rules of wires, which let nothing out yet: that is what filling their sets does."""
    build = TableBuilder(table)
    chosen = list(wires)
    if not chosen:
        return []
    for wire in chosen:
        _build_wire(build, wire, shares)
    if not layout.own_wires:
        return build.commands
    build.elements("wires", [wire.interface for wire in chosen])
    build.elements("refusing", [[wire.interface, _goto(f"refuse_{wire.index}")] for wire in chosen])
    build.elements("asking", [[wire.interface, _goto(f"ask_{wire.index}")] for wire in chosen])
    build.elements("opening", [[wire.interface, _goto(f"open_{wire.index}")] for wire in chosen])
    for version in (4, 6):
        ends = [(wire.interface, *pair) for wire in chosen for pair in _ends(wire, version)]
        if ends:
            build.elements(f"sources{version}", [{"concat": [name, inner]} for name, _, inner in ends])
            build.elements(f"resolvers{version}", [{"concat": [name, host]} for name, host, _ in ends])
            build.elements(f"inner{version}", [inner for _, _, inner in ends])
            build.elements(f"outer{version}", [host for _, host, _ in ends])
            build.elements(f"answering{version}", [[name, host] for name, host, _ in ends])
    return build.commands


def _ends(wire: Wire, version: int) -> list[tuple[str, str]]:
    return [(str(host.ip), str(inner.ip)) for host, inner in wire.pairs if host.version == version]


def _build_wire(build: TableBuilder, wire: Wire, shares: ConnectionLimits) -> None:
    number = wire.index
    build.chain(f"ask_{number}")
    # The kernel remembers a redirected query for half a minute, and a connection while it is open.
    too_many = {"ct count": {"val": shares.queries(number), "inv": True}}
    build.rule(f"ask_{number}", _is(_ct("state"), "new"), too_many, _DROP)
    build.rule(f"ask_{number}", _ACCEPT)
    build.chain(f"refuse_{number}")
    build.chain(f"open_{number}")
    build.rule(
        f"open_{number}", {"ct count": {"val": shares.connections(number), "inv": True}}, _goto(f"refuse_{number}")
    )
    build.map(f"every_{number}", "ifname", "mark")
    for version in (4, 6):
        target = _payload(_PROTOCOL[version], "daddr")
        key = [_KEY[version], "inet_service"]
        build.map(f"names{version}_{number}", key, "mark", flags=["timeout"], size=MAX_ADDRESSES)
        build.map(f"blocks{version}_{number}", key, "mark", flags=["interval"], size=MAX_BLOCKS)
        build.set(
            f"refused{version}_{number}",
            [_KEY[version], "inet_proto", "inet_service"],
            flags=["timeout"],
            timeout=REFUSAL_SECONDS,
            size=KEPT_REFUSALS,
        )
        for kind in ("names", "blocks"):
            reason = {"map": {"key": _concat(target, _payload("tcp", "dport")), "data": f"@{kind}{version}_{number}"}}
            build.rule(f"open_{number}", {"mangle": {"key": _ct("mark"), "value": reason}}, _ACCEPT)
        # A rule of its own: when the set is full the rest of the rule is not looked at.
        build.rule(
            f"refuse_{number}",
            _WITH_PORTS,
            {"set": {"op": "update", "elem": _concat(target, _L4, _PORT), "set": f"@refused{version}_{number}"}},
        )
    # What has everything on its list: the map has the wire's name, or nothing.
    for version in (4, 6):
        public = _is(_payload(_PROTOCOL[version], "daddr"), f"@global{version}")
        reason = {"map": {"key": _IIF, "data": f"@every_{number}"}}
        build.rule(f"open_{number}", public, {"mangle": {"key": _ct("mark"), "value": reason}}, _ACCEPT)
    build.rule(f"open_{number}", _goto(f"refuse_{number}"))
    build.rule(f"refuse_{number}", _goto("reject"))


def count_rules(wires: int, layout: Layout = OWN_WIRES) -> int:
    """Of a table that is whole and has rules for so many wires."""
    some = Wire(0, IPv4Address(0), None)
    base, each = build_table("", (), (), layout=layout), build_wires("", [some])
    return _count(base) + wires * _count(each)


def _count(commands: Iterable[Json]) -> int:
    return sum("rule" in command["add"] for command in commands)


def wire_sets(wire: Wire) -> tuple[str, ...]:
    """The sets that belong to a wire, all empty when no sandbox has it."""
    kinds = ("names4", "names6", "blocks4", "blocks6", "every", "refused4", "refused6")
    return tuple(f"{kind}_{wire.index}" for kind in kinds)


def remove_table(table: str) -> list[Json]:
    """Also when there is none."""
    return [
        {"add": {"table": {"family": FAMILY, "name": table}}},
        {"delete": {"table": {"family": FAMILY, "name": table}}},
    ]

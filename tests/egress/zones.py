"""The name server of the small internet: what it answers, without sockets.

A zone is plain data, because the test changes it while the server runs: name -> properties, by record type and

    ttl         seconds (300); several values come in any order (round robin)
    turns       lists of A records: the next answer has the next, the last stays
    truncate    true: over UDP only "ask again over TCP"
    rcode       e.g. "SERVFAIL", instead of an answer
"""

from __future__ import annotations

from typing import Any

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

Zone = dict[str, dict[str, Any]]
_MAX_CHAIN = 16


class NameService:
    def __init__(self) -> None:
        self.zone: Zone = {}
        self.questions: list[tuple[str, str, str]] = []  # name as it was written, type, "udp" or "tcp"
        self._count: dict[str, int] = {}

    def publish(self, zone: Zone) -> None:
        self.zone = zone
        self._count.clear()

    def reply(self, wire: bytes, transport: str) -> bytes:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        kind = dns.rdatatype.to_text(question.rdtype)
        self.questions.append((question.name.to_text(omit_final_dot=True), kind, transport))
        response = dns.message.make_response(query, recursion_available=True)
        name, properties = question.name, self._find(question.name)
        for _ in range(_MAX_CHAIN):
            if properties is None or "CNAME" not in properties or kind == "CNAME":
                break
            target = dns.name.from_text(properties["CNAME"])
            self._add(response, name, properties, "CNAME", [target.to_text()])
            name, properties = target, self._find(target)
        if properties is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif "rcode" in properties:
            response.set_rcode(dns.rcode.from_text(properties["rcode"]))
        elif properties.get("truncate") and transport == "udp":
            response.flags |= dns.flags.TC
        else:
            kinds = [key for key in properties if key.isupper()] if kind == "ANY" else [kind]
            for one in kinds:
                self._add(response, name, properties, one, self._values(name, properties, one))
        return response.to_wire(max_size=65535)

    def _find(self, name: dns.name.Name) -> dict[str, Any] | None:
        return self.zone.get(name.to_text(omit_final_dot=True).lower())

    def _values(self, name: dns.name.Name, properties: dict[str, Any], kind: str) -> list[str]:
        values: list[str] = list(properties.get(kind, []))
        if kind == "A" and "turns" in properties:
            count = self._count[str(name)] = self._count.get(str(name), -1) + 1
            return list(properties["turns"][: count + 1][-1])
        return values

    def _add(
        self,
        response: dns.message.Message,
        name: dns.name.Name,
        properties: dict[str, Any],
        kind: str,
        values: list[str],
    ) -> None:
        if values:
            response.answer.append(dns.rrset.from_text(name, properties.get("ttl", 300), "IN", kind, *values))

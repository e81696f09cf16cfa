"""The hosts of a policy. The machine's default list of hosts is not known here, only whether it is part of them."""

from __future__ import annotations

from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ALL = "*"


class Hosts(Record):
    names: tuple[str, ...] = ()
    usual: bool = False  # with the machine's default list

    @property
    def everywhere(self) -> bool:
        return ALL in self.names

    def within(self, other: Hosts) -> bool:
        """Whether this surely reaches no further than `other`. The default list's entries are not known here, so no
        name is looked up in it."""
        if other.everywhere:
            return True
        if self.everywhere or (self.usual and not other.usual):
            return False
        if set(self.names) <= set(other.names):
            return True
        from k8e.policy import HostList, excess

        return not excess(HostList.parse(self.names), HostList.parse(other.names))

    def plus(self, names: tuple[str, ...]) -> Hosts:
        return Hosts(tuple(dict.fromkeys((*self.names, *names))), self.usual)

    def to_request(self) -> dict[str, Any]:
        if self.usual:
            return {"more_hosts": list(self.names)}
        return {"allowed_hosts": list(self.names)}

    def describe(self) -> str:
        if self.everywhere:
            return "everywhere, but private addresses and metadata services"
        parts = (["the machine's usual hosts"] if self.usual else []) + list(self.names)
        return ", ".join(parts) or "nowhere"


EVERYWHERE = Hosts((ALL,))
NOWHERE = Hosts()

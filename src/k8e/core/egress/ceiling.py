"""The ceiling: the widest list of hosts that a caller from the gateway may set (`gateway_hosts` of `[egress]`).

A local user could reach the machine's private network anyway; a caller with an API key could not, and must not come to
it through a sandbox. The usual list, which the administrator gives to every session that names none, is not beyond the
ceiling, nor is what the session has already. A child is bounded by its parent (children.py), and names that lead to
private addresses by the resolver, as for all callers.
"""

from __future__ import annotations

from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Caller
from k8e.core.parts import Parts
from k8e.core.translation import translated
from k8e.policy import NOTHING, HostList, excess

_SHOWN: Final = 10  # entries of a list, in an error


async def find_usual_hosts(parts: Parts) -> HostList:
    """The list of a session whose spec names none."""
    if parts.settings.egress.allowed_hosts is not None:
        return parts.settings.egress.allowed_hosts
    with translated("finding out the usual list of hosts"):
        return await parts.engine.default_egress()


async def check_ceiling(parts: Parts, caller: Caller, field: str, hosts: HostList, had: HostList = NOTHING) -> None:
    """`had` is what the session has already."""
    if caller.uid != REMOTE:
        return
    ceiling = parts.settings.egress.gateway_hosts
    over = excess(hosts, _join(ceiling, had))
    if over:
        over = excess(HostList(over), _join(ceiling, had, await find_usual_hosts(parts)))
    if over:
        some, more = ", ".join(map(str, over[:_SHOWN])), ", ..." if len(over) > _SHOWN else ""
        allowed = ", ".join(ceiling.texts[:_SHOWN]) or "nothing but the usual list"
        raise Fault(
            Kind.DENIED,
            "beyond_ceiling",
            f"{field}: callers from the gateway may not open {some}{more}",
            detail=f"they may open: {allowed}" + (" (* is what is public)" if "*" in ceiling.texts else ""),
            hint="Leave it out, or have the machine's administrator add it: to gateway_hosts of [egress] in k8e.toml, "
            "or to this session alone with k8e sandbox allow-hosts, on the machine itself.",
            field=field,
        )


def _join(*lists: HostList) -> HostList:
    """Of any length: it is only compared with."""
    return HostList(tuple(sorted({entry for hosts in lists for entry in hosts.entries})))

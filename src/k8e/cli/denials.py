"""Network access that was denied to a command, a line each, for people."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    Advise = Callable[[Mapping[str, Any]], str]


def list_denials(result: Mapping[str, Any], advise: Advise | None = None) -> Iterator[str]:
    """`advise` words the hint of a denial; else it is the service's."""
    for denial in result.get("denied", []):
        address = f"({denial['address']})" if denial["host"] and denial["address"] else denial["address"]
        where = " ".join(part for part in (denial["host"], address) if part)
        port = f":{denial['port']}" if denial["port"] else ""
        hint = advise(denial) if advise is not None else denial["hint"]
        yield f"denied {where}{port}: {denial['reason']}; {hint}"
    if result.get("denied_more"):
        yield f"denied {result['denied_more']} more"

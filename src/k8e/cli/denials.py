"""Network access that was denied to a command, a line each, for people."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any


def list_denials(result: Mapping[str, Any], *, once: bool = False) -> Iterator[str]:
    """`once`: the session ended with the run. Its list of hosts cannot be changed any more; the next run can ask for
    another one."""
    for denial in result.get("denied", []):
        address = f"({denial['address']})" if denial["host"] and denial["address"] else denial["address"]
        where = " ".join(part for part in (denial["host"], address) if part)
        port = f":{denial['port']}" if denial["port"] else ""
        hint = f"--allowed-hosts {denial['host']}" if once and "allow-hosts" in denial["hint"] else denial["hint"]
        yield f"denied {where}{port}: {denial['reason']}; {hint}"
    if result.get("denied_more"):
        yield f"denied {result['denied_more']} more"

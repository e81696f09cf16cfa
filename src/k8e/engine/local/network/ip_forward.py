"""Switches IP forwarding of the machine on, and back when the last engine leaves.

Linux forwards for all interfaces or for none that matters here, so this is a setting of the machine: the first engine
writes the values before it down. A machine that finds its router by advertisements would stop listening to them as soon
as it forwards (`accept_ra` 1); 2 means: listen all the same. A machine that checks whether answers come from where the
route to them leads (`rp_filter`) has to use their mark (`src_valid_mark`), because without one there is no route
(routing_rules.py).
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import INTERFACE_PREFIX

_SETTINGS = Path("/proc/sys/net")


def plan_forwarding(settings: Path = _SETTINGS) -> dict[str, str]:
    """The values to write, in order, below /proc/sys/net; none where they are so already."""
    plan: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        if _is_off(settings, "ipv6/conf/all/forwarding"):
            for folder in sorted((settings / "ipv6/conf").iterdir()):
                if folder.name in ("all", "lo") or folder.name.startswith(INTERFACE_PREFIX):
                    continue
                if (folder / "accept_ra").read_text().strip() == "1":
                    plan[f"ipv6/conf/{folder.name}/accept_ra"] = "2"
            plan["ipv6/conf/all/forwarding"] = "1"
    with contextlib.suppress(FileNotFoundError):
        if _is_off(settings, "ipv4/conf/all/src_valid_mark"):
            plan["ipv4/conf/all/src_valid_mark"] = "1"
    if _is_off(settings, "ipv4/ip_forward"):
        plan["ipv4/ip_forward"] = "1"
    return plan


def _is_off(settings: Path, name: str) -> bool:
    with open(os.path.join(settings, name), "rb") as file:
        return file.read().strip() == b"0"


def switch_on(memory: Path, settings: Path = _SETTINGS) -> None:
    """Called while the ledger is locked. `memory` is where the values before are kept."""
    plan = plan_forwarding(settings)
    if not plan:
        return
    before = _recall(memory)
    for name in plan:
        before.setdefault(name, (settings / name).read_text().strip())
    partial = memory.with_suffix(".new")
    partial.write_text(json.dumps(before))
    partial.rename(memory)
    for name, value in plan.items():
        try:
            (settings / name).write_text(value)
        except FileNotFoundError:
            continue  # an interface that has gone
        except OSError as error:
            raise EngineError(
                "network forwarding", f"/proc/sys/net/{name} cannot be written: {error}", "run the daemon as root"
            ) from error


def restore(memory: Path, settings: Path = _SETTINGS) -> None:
    """Forwarding first: while it is on, `accept_ra` 1 would mean 0."""
    before = _recall(memory)
    for name in sorted(before, key=lambda name: not name.endswith(("/forwarding", "/ip_forward"))):
        with contextlib.suppress(OSError):
            (settings / name).write_text(before[name])
    memory.unlink(missing_ok=True)


def _recall(memory: Path) -> dict[str, str]:
    try:
        found: object = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

"""`agentkernel audit`: shows the audit log and the refusal log (docs/security.md)."""

from __future__ import annotations

import json
import os
import time

from k8e.cli.agentkernel.output import show_table
from k8e.cli.process import Failure, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any


AT, EVENT, SUBJECT = "at", "event", "session"
LOGS = ("audit.log", "audit-refusals.log")


def main(parsed: argparse.Namespace) -> int:
    found = [event for event in read_events() if fits(event, parsed)]
    if parsed.last > 0:
        found = found[-parsed.last :]
    if parsed.json:
        write_all(1, "".join(json.dumps(event) + "\n" for event in found).encode())
    else:
        show_table(("TIME", "EVENT", "SANDBOX", "BY", "MORE"), [describe(event) for event in found])
    return 0


def fits(event: dict[str, Any], wanted: argparse.Namespace) -> bool:
    if wanted.sandbox and wanted.sandbox not in (event.get(SUBJECT), event.get("subject")):
        return False
    if wanted.event and event.get(EVENT) not in wanted.event:
        return False
    return wanted.since is None or event.get(AT, 0) >= time.time() - wanted.since


def read_events() -> Iterator[dict[str, Any]]:
    """Yields events oldest first, over all files of both logs. A line that a power failure cut is left out."""
    from heapq import merge

    folder = os.environ.get("K8E_STATE_DIR") or "/var/lib/k8e"
    return merge(*(read_log(folder, log) for log in LOGS), key=moment)


def moment(event: dict[str, Any]) -> float:
    at = event.get(AT, 0)
    return at if isinstance(at, int | float) else 0


def read_log(folder: str, log: str) -> Iterator[dict[str, Any]]:
    try:
        ages = {name: age for name in os.listdir(folder) if (age := find_age(name, log)) >= 0}
    except FileNotFoundError:
        ages = {}
    except PermissionError as error:
        raise forbidden(folder) from error
    for name in sorted(ages, key=lambda name: -ages[name]):
        try:
            with open(os.path.join(folder, name), encoding="ascii", errors="replace") as file:
                for line in file:
                    event = read_line(line)
                    if event is not None:
                        yield event
        except PermissionError as error:
            raise forbidden(folder) from error
        except FileNotFoundError:
            continue  # rotated away meanwhile


def find_age(name: str, log: str) -> int:
    """0: the file that the daemon writes to; -1: no file of this log."""
    if name == log:
        return 0
    number = name.removeprefix(f"{log}.")
    return int(number) if number != name and number.isdecimal() else -1


def read_line(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def forbidden(folder: str) -> Failure:
    return Failure("needs_root", "the audit log is root's", detail=folder, hint="sudo agentkernel audit")


def describe(event: dict[str, Any]) -> tuple[str, ...]:
    shown = (AT, EVENT, SUBJECT, "caller", "sandbox", "owner", "tenant")
    more = " ".join(f"{name}={write(value)}" for name, value in event.items() if name not in shown)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event.get(AT, 0))))
    return moment, str(event.get(EVENT, "")), str(event.get(SUBJECT, "")), str(event.get("caller", "")), more[:200]


def write(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)

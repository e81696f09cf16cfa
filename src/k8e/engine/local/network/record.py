"""The part of a sandbox's network that must outlive the daemon: its list, and which marks stand for which entries.

The addresses themselves are in the kernel, with the time that each has left.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from k8e.damage import Damaged, read_own
from k8e.engine import EngineError
from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.admissions import Admissions, Opening, Reason, Target
from k8e.engine.local.network.netlink.elements import Found, read_mark, read_target
from k8e.policy import HostEntry, HostList, InvalidEntry


@dataclass(frozen=True, slots=True)
class EgressRecord:
    hosts: tuple[str, ...]
    marks: tuple[tuple[int, tuple[str, ...]], ...]

    @classmethod
    def of(cls, admissions: Admissions, more: Sequence[tuple[Reason, int]] = ()) -> EgressRecord:
        """`more` are marks that it is about to have."""
        known = (*admissions.marks.items(), *more)
        marks = ((mark, tuple(sorted(map(str, reason)))) for reason, mark in known)
        return cls(admissions.hosts.texts, tuple(sorted(marks)))

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps({"hosts": self.hosts, "marks": self.marks}))
        partial.rename(path)

    @classmethod
    def load(cls, path: Path) -> EgressRecord:
        """FileNotFoundError, or Damaged when it is not what was saved."""
        try:
            content = json.loads(read_own(path))
            marks = tuple((int(mark), tuple(map(str, entries))) for mark, entries in content["marks"])
            record = cls(tuple(map(str, content["hosts"])), marks)
            HostList.parse(record.hosts)
            for _, entries in record.marks:
                _reason(entries)
            return record
        except Damaged:
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise Damaged(f"it is no list of hosts: {error}") from error


@dataclass(frozen=True, slots=True)
class Restored:
    admissions: Admissions
    unknown: tuple[Found, ...]  # addresses in the kernel that nothing of the record explains
    dead: tuple[int, ...]  # marks, likewise


def restore(wire: Wire, record: EgressRecord, names: Iterable[Found], live: Iterable[int], now: float) -> Restored:
    """The state of a daemon that was killed, as far as it is recorded and in force."""
    try:
        hosts = HostList.parse(record.hosts)
        reasons: dict[int, Reason] = {mark: _reason(texts) for mark, texts in record.marks}
    except InvalidEntry as error:
        raise EngineError("network record", str(error)) from error
    in_force = set(live)
    marks = {reason: mark for mark, reason in reasons.items() if mark in in_force}
    openings: dict[Target, Opening] = {}
    unknown = []
    for found in names:
        mark = read_mark(found.data)
        if mark in in_force and mark in reasons:
            until = now + found.remaining / 1000
            openings[read_target(found.key)] = Opening(mark, dict.fromkeys(reasons[mark], until))
        else:
            unknown.append(found)
    return Restored(
        Admissions(wire, hosts, marks, openings),
        tuple(unknown),
        tuple(sorted(in_force - set(marks.values()))),
    )


def _reason(texts: Iterable[str]) -> Reason:
    entries: set[HostEntry] = set()
    for text in texts:
        entries.update(HostList.parse([text]).entries)
    return frozenset(entries)

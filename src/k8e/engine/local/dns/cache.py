"""Answers of upstream, for as long as their TTL says. Shared by all sandboxes; which of them a sandbox may see is
decided when it asks."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace

from k8e.engine.local.dns.answers import Finding

MAX_FINDINGS = 4096

Key = tuple[str, int]


class Cache:
    def __init__(self, size: int = MAX_FINDINGS) -> None:
        self._size = size
        self._findings: OrderedDict[Key, tuple[Finding, float]] = OrderedDict()

    def get(self, key: Key, now: float) -> Finding | None:
        """With the time that is left, and in a new order each time, as a server that spreads its load would."""
        if key not in self._findings:
            return None
        finding, since = self._findings[key]
        if now - since >= finding.ttl:
            del self._findings[key]
            return None
        self._findings.move_to_end(key)
        mixed = tuple(random.sample(finding.records, len(finding.records)))
        return replace(finding.aged(now - since), records=mixed)

    def has(self, key: Key, now: float) -> bool:
        finding, since = self._findings.get(key, (None, 0.0))
        return finding is not None and now - since < finding.ttl

    def put(self, key: Key, finding: Finding, now: float) -> None:
        if finding.ttl <= 0:
            return
        self._findings[key] = (finding, now)
        self._findings.move_to_end(key)
        while len(self._findings) > self._size:
            self._findings.popitem(last=False)

    def clear(self) -> None:
        self._findings.clear()

    def __len__(self) -> int:
        return len(self._findings)

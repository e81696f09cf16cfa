"""The order in which a sandbox's addresses expire, while they come and go. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Container

from k8e.policy import Address

Target = tuple[Address, int]
_SLACK = 64


class ExpiryQueue:
    """A heap whose entries are not searched when they are replaced or removed: from then on they are void, and go when
    they come to the top, or when there are more void ones than others. All of one family."""

    def __init__(self) -> None:
        self._ends: dict[Target, float] = {}
        self._heap: list[tuple[float, int, Target]] = []  # the number, so that addresses need not be compared
        self._number = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, target: Target, end: float) -> None:
        """Or sets another time."""
        self._ends[target] = end
        self._number += 1
        heapq.heappush(self._heap, (end, self._number, target))
        if len(self._heap) > 2 * len(self._ends) + _SLACK:
            self._heap = [(each, number, target) for number, (target, each) in enumerate(self._ends.items())]
            self._number = len(self._heap)
            heapq.heapify(self._heap)

    def remove(self, target: Target) -> None:
        self._ends.pop(target, None)

    def first(self, count: int, without: Container[Target]) -> list[Target]:
        """Those that expire first; they stay in the queue."""
        seen: dict[Target, tuple[float, int, Target]] = {}
        found: list[Target] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            end, _, target = entry
            if self._ends.get(target) != end or target in seen:
                continue
            seen[target] = entry
            if target not in without:
                found.append(target)
        for entry in seen.values():
            heapq.heappush(self._heap, entry)
        return found

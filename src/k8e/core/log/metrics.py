"""Counters that a door shows as /metrics. Labels are words from our own code: no user can make a series.

Our own sixty lines rather than a library: one process, one thread, three kinds of numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

# From a warm `true` to a long download.
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def _labels(names: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in names.items()) + "}" if names else ""


class Counter:
    def __init__(self, name: str, about: str, label: str = "") -> None:
        self.name, self.about, self._label = name, about, label
        self._values: dict[str, int] = {} if label else {"": 0}

    def add(self, value: str = "", amount: int = 1) -> None:
        self._values[value] = self._values.get(value, 0) + amount

    def get(self, value: str = "") -> int:
        return self._values.get(value, 0)

    def render(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} counter"
        for value, count in sorted(self._values.items()):
            yield f"{self.name}{_labels({self._label: value} if self._label else {})} {count}"


class Gauge:
    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about
        self.value = 0

    def render(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} gauge"
        yield f"{self.name} {self.value}"


class Histogram:
    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def render(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} histogram"
        seen = 0
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], self._counts, strict=True):
            seen += count
            yield f"{self.name}_bucket{_labels({'le': bound})} {seen}"
        yield f"{self.name}_sum {self._sum:.6f}"
        yield f"{self.name}_count {seen}"


class Metrics:
    def __init__(self) -> None:
        self.sessions = Gauge("k8e_sessions", "Sessions that exist now.")
        self.creates = Counter("k8e_creates_total", "Sessions created.")
        self.destroys = Counter("k8e_destroys_total", "Sessions ended, by reason.", "reason")
        self.execs = Counter("k8e_execs_total", "Commands ended, by status.", "status")
        self.failures = Counter("k8e_failures_total", "Requests refused or failed, by code.", "code")
        self.refusals = Counter("k8e_refusals_total", "What sandboxes asked of the network and did not get.")
        self.audit_lost = Counter("k8e_audit_lost_total", "Lines of the audit log that could not be written.")
        self.create_seconds = Histogram("k8e_create_seconds", "From the request to a session that is ready.")
        self.start_seconds = Histogram("k8e_exec_start_seconds", "From the request to a command that runs.")
        self.parked = Counter(
            "k8e_parked_total", "Runs that a parked interpreter could take, by how they began.", "start"
        )
        self.exec_seconds = Histogram("k8e_exec_seconds", "Wall clock of commands.")
        self.warm = Gauge("k8e_pool_warm", "Sandboxes that are ready for a session.")
        self.claims = Counter("k8e_pool_claims_total", "Sessions that asked for a sandbox, by what they got.", "start")
        self.discards = Counter(
            "k8e_pool_discards_total", "Warm sandboxes that no session claimed, by reason.", "reason"
        )
        self.refill_seconds = Histogram("k8e_pool_refill_seconds", "From deciding to make one until it is ready.")

    def render(self) -> str:
        """In Prometheus' text format."""
        return "".join(line + "\n" for series in vars(self).values() for line in series.render())

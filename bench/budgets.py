"""The budgets of docs/design.md, judged by what was measured in this run: ratios, which hold on any machine, but for
memory and the daemon's own CPU time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.samples import Measure, percentile

ENOUGH = 30  # samples, of ours and of the baseline: fewer judge nothing


@dataclass(frozen=True, slots=True)
class Budget:
    """`most` or `least` of a measure's p50: as a ratio to its baseline, of the difference to it (`over`), or as it is
    (`plain`)."""

    measure: str
    says: str
    most: float | None = None
    least: float | None = None
    by: str = "ratio"

    def figure(self, measure: Measure, rank: float = 50) -> float:
        value = percentile(measure.samples, rank)
        if self.by == "plain":
            return value
        base = percentile(measure.baseline, rank)
        return value - base if self.by == "over" else value / base

    def judge(self, measures: Sequence[Measure]) -> tuple[str, str, str]:
        """(verdict, p50, p99)"""
        found = next((measure for measure in measures if measure.name == self.measure), None)
        if found is None or (self.by != "plain" and not found.baseline):
            return "not measured", "", ""
        value = self.figure(found)
        kept = (self.most is None or value <= self.most) and (self.least is None or value >= self.least)
        few = min(len(found.samples), len(found.baseline) if self.by != "plain" else ENOUGH) < ENOUGH
        verdict = ("met" if kept else "missed") + (", few samples" if few else "")
        return verdict, f"{value:.3g}", f"{self.figure(found, 99):.3g}"


def for_both(
    name: str, says: str, native: dict[str, float], gvisor: dict[str, float], by: str = "ratio"
) -> list[Budget]:
    return [
        Budget(f"{runtime}: {name}", says, by=by, **bounds)
        for runtime, bounds in (("native", native), ("gvisor", gvisor))
    ]


def same(name: str, says: str, by: str = "ratio", **bounds: float) -> list[Budget]:
    return for_both(name, says, bounds, bounds, by)


BUDGETS = [
    *same("k8e sandbox run true", "at most 2.5 times `/usr/bin/python3 -c pass`", most=2.5),
    *same("run print(1), python, SDK", "faster than `/usr/bin/python3 -c 'print(1)'` on the host", most=1.0),
    *same("run print(1), python, SDK, back to back, one caller", "at most 1.5 times the paused figure", most=1.5),
    *same("run print(1), python, SDK, back to back, 4 callers", "at most 1.5 times the paused figure", most=1.5),
    *for_both(
        "create + first command, from the pool",
        "at most 1.5 times bare bwrap natively, 2.0 under gVisor",
        {"most": 1.5},
        {"most": 2.0},
    ),
    *same("create + first command, cold", "at most 1.3 times the bare runtime, same bundle", most=1.3),
    *same("create + first command, 20 at once", "at most 1.3 times as many bare starts", most=1.3),
    *same("create + first command, 100 at once", "at most 1.3 times as many bare starts", most=1.3),
    *same("exec true over gRPC and TLS", "at most 2 ms over fork and exec inside", by="over", most=2.0),
    *same("daemon's CPU per true, the unix socket", "at most 1 ms", by="plain", most=1.0),
    *same("daemon's CPU per true, gRPC and TLS", "at most 1.5 ms", by="plain", most=1.5),
    Budget("agentkernel run true, cold, and its sandbox gone", "at most podman's, same runtime and content", most=1.0),
    *same("stdout over HTTP", "at least half of the same pipe without us; under gVisor of a pipe inside", least=0.5),
    *for_both(
        "memory of a warm sandbox",
        "at most 8 MiB natively, 40 MiB under gVisor",
        {"most": 8.0},
        {"most": 40.0},
        by="plain",
    ),
]


def render_budgets(measures: Sequence[Measure]) -> str:
    lines = ["| budget | of | p50 | p99 | verdict |", "|---|---|---|---|---|"]
    for budget in BUDGETS:
        verdict, p50, p99 = budget.judge(measures)
        lines.append(f"| {budget.says} | {budget.measure} | {p50} | {p99} | {verdict} |")
    return "\n".join([*lines, ""])

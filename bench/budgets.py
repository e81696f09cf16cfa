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
    (`plain`). `longest`: of its largest sample, as a ratio to its own p50."""

    measure: str
    says: str
    most: float | None = None
    least: float | None = None
    by: str = "ratio"

    @property
    def compares(self) -> bool:
        """Whether there has to be a baseline."""
        return self.by in ("ratio", "over")

    def figure(self, measure: Measure, rank: float = 50) -> float:
        value = percentile(measure.samples, rank)
        if self.by == "plain":
            return value
        if self.by == "longest":
            return (max(measure.samples) if rank == 50 else value) / measure.p50
        base = percentile(measure.baseline, rank)
        return value - base if self.by == "over" else value / base

    def judge(self, measures: Sequence[Measure]) -> tuple[str, str, str]:
        """(verdict, p50, p99)"""
        found = next((measure for measure in measures if measure.name == self.measure), None)
        if found is None or (self.compares and not found.baseline):
            return "not measured", "", ""
        value = self.figure(found)
        kept = (self.most is None or value <= self.most) and (self.least is None or value >= self.least)
        few = min(len(found.samples), len(found.baseline) if self.compares else ENOUGH) < ENOUGH
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
    *[
        budget
        for code, language in (("print(1)", "python"), ("console.log(1)", "node"), ("true", "bash"))
        for callers, says in (
            ("one caller", "at most 1.5 times the paused figure"),
            ("4 callers", "at most 1.5 times the paused figure of one caller"),
            ("4 beside 4", "at most 1.5 times the paused figure of four at once"),
        )
        for budget in same(f"run {code}, {language}, SDK, back to back, {callers}", says, most=1.5)
    ],
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
    *(
        budget
        for clients in ("1 client", "10 clients", "50 clients")
        for way, most in (("the unix socket", 1.0), ("gRPC and TLS", 1.5))
        for budget in same(f"daemon's CPU per true, {clients}, {way}", f"at most {most:g} ms", by="plain", most=most)
    ),
    *(
        budget
        for way in ("the unix socket", "gRPC and TLS")
        for budget in for_both(
            f"true per second, 50 clients, {way}",
            "three times the 330 natively and 127 under gVisor of 2026-11-16",
            {"least": 990.0},
            {"least": 381.0},
            by="plain",
        )
    ),
    *same(
        "true in a quiet session beside floods, refills and expiries",
        "the longest of 1,000 at most 5 times the median",
        by="longest",
        most=5.0,
    ),
    Budget("native: daemon's memory, second half of many commands", "flat: 1.02 of the first half", most=1.02),
    Budget("native: daemon's memory, second half of many sessions", "flat: 1.02 of the first half", most=1.02),
    *same("daemon's memory for an idle session", "at most 100 KiB", by="plain", most=100.0),
    *same("daemon's CPU per create and destroy, cold", "at most 12 ms", by="plain", most=12.0),
    Budget("agentkernel run true, warm", "at most 2.5 times `/usr/bin/python3 -c pass`", most=2.5),
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

"""The budgets of docs/design.md, judged by what was measured in this run. Ratios only: they hold on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.samples import Measure, percentile


@dataclass(frozen=True, slots=True)
class Budget:
    """`most` or `least` of a measure's p50: as a ratio to its baseline, or of the difference in its own unit."""

    measure: str
    says: str
    most: float | None = None
    least: float | None = None
    difference: bool = False

    def judge(self, measures: Sequence[Measure]) -> tuple[str, str]:
        """(verdict, figure)"""
        found = next((measure for measure in measures if measure.name == self.measure), None)
        if found is None:
            return "not measured", ""
        value = percentile(found.samples, 50)
        if self.difference:
            value -= percentile(found.baseline, 50) if found.baseline else 0
        elif found.ratio is not None:
            value = found.ratio
        kept = (self.most is None or value <= self.most) and (self.least is None or value >= self.least)
        return ("pass" if kept else "miss"), f"{value:.3g}"


BUDGETS = [
    *(
        Budget(f"{runtime}: k8e sandbox run true", "at most 2.5 x `python3 -c pass`", most=2.5)
        for runtime in ("native", "gvisor")
    ),
    *(
        Budget(f"{runtime}: run print(1), python, SDK", "faster than `python3 -c 'print(1)'` on the host", most=1.0)
        for runtime in ("native", "gvisor")
    ),
    *(
        Budget(f"{runtime}: create + true, from the pool", "at most 1.5 x `bwrap ... true`", most=1.5)
        for runtime in ("native", "gvisor")
    ),
    *(
        Budget(f"{runtime}: create + true, cold", "at most 1.3 x the bare runtime, same bundle", most=1.3)
        for runtime in ("native", "gvisor")
    ),
    *(
        Budget(
            f"{runtime}: exec true over gRPC and TLS", "at most 2 ms over the runtime's own", most=2.0, difference=True
        )
        for runtime in ("native", "gvisor")
    ),
    *(
        Budget(f"{runtime}: stdout over HTTP", "at least half of the same pipe without us", least=0.5)
        for runtime in ("native", "gvisor")
    ),
    *(
        Budget(
            f"{runtime}: idle memory of a warm sandbox",
            "at most 2 MiB over the runtime's own",
            most=2.0,
            difference=True,
        )
        for runtime in ("native", "gvisor")
    ),
]


def render_budgets(measures: Sequence[Measure]) -> str:
    lines = ["| budget | of | measured | verdict |", "|---|---|---|---|"]
    for budget in BUDGETS:
        verdict, figure = budget.judge(measures)
        lines.append(f"| {budget.says} | {budget.measure} | {figure} | {verdict} |")
    return "\n".join([*lines, ""])

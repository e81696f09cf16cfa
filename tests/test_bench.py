"""The bench judges what it measures, and says what it did not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from bench.budgets import BUDGETS, ENOUGH, Budget, render_budgets
from bench.curves import draw_plots, read_plots
from bench.plot import draw, read_panels
from bench.publish import PAGE, put
from bench.samples import Measure
from bench.tables import render_measures, render_plan

BENCH = Path(__file__).resolve().parent.parent / "bench"
MANY = tuple(float(number) for number in range(1, ENOUGH + 1))


def find_names() -> list[re.Pattern[str]]:
    """What measures can be called: every formatted string of the bench, with anything in its gaps."""
    found = []
    for path in BENCH.glob("*.py"):
        if path.name == "budgets.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
                if sum(len(str(part)) for part in parts if part) >= 8:
                    found.append(re.compile("".join(".+" if part is None else re.escape(str(part)) for part in parts)))
    return found


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.measure)
def test_every_budget_is_of_something_that_is_measured(budget: Budget) -> None:
    assert any(pattern.fullmatch(budget.measure) for pattern in find_names())


def test_a_budget_is_met_missed_or_not_measured() -> None:
    twice = Measure("x", "ms", tuple(2 * value for value in MANY), "other", MANY)
    assert Budget("x", "", most=2.0).judge([twice])[0] == "met"
    assert Budget("x", "", most=1.9).judge([twice])[0] == "missed"
    assert Budget("x", "", least=2.1).judge([twice])[0] == "missed"
    assert Budget("x", "", most=15.0, by="over").judge([twice]) == ("met", "15", "30")
    assert Budget("x", "", most=29.0, by="plain").judge([twice])[0] == "missed"
    assert Budget("y", "", most=1.0).judge([twice])[0] == "not measured"
    assert Budget("x", "", most=1.0).judge([Measure("x", "ms", MANY)])[0] == "not measured"


def test_the_longest_is_compared_with_the_median() -> None:
    steady = Measure("x", "ms", (*MANY[:-1], 100.0))
    assert Budget("x", "", most=5.0, by="longest").judge([steady]) == ("missed", "6.67", "6.67")
    assert Budget("x", "", most=7.0, by="longest").judge([steady])[0] == "met"


def test_few_samples_are_said() -> None:
    few = Measure("x", "ms", MANY[:5], "other", MANY)
    assert Budget("x", "", most=2.0).judge([few])[0] == "met, few samples"


def test_misses_are_in_the_table() -> None:
    slow = Measure("native: memory of a warm sandbox", "MiB", (100.0,) * ENOUGH)
    (row,) = [line for line in render_budgets([slow]).splitlines() if "native: memory" in line]
    assert row.endswith("| 100 | 100 | missed |")
    assert render_budgets([slow]).count("not measured") == len(BUDGETS) - 1


def test_the_page_has_a_place_for_each_table() -> None:
    text = PAGE.read_text()
    for name in ("run", "measures", "budgets", "agentkernel", "plan"):
        assert "new content" in put(text, name, "new content")
    with pytest.raises(ValueError, match="no place"):
        put(text, "other", "")


def test_the_picture_keeps_sessions_that_exist_apart_from_fresh_sandboxes() -> None:
    def measure(name: str) -> dict[str, object]:
        return {"name": name, "percentiles": {"p50": 5.0}, "baseline_percentiles": {"p50": 4.0}}

    names = ["native: k8e sandbox run true", "bwrap ... true", "podman run true (runc)", "native: run print(1), python"]
    names += [f"agentkernel run true, {how}, and its sandbox gone" for how in ("warm", "cold")]
    panels = read_panels({"measures": [measure(name) for name in names]})
    for panel in panels:
        labels = {bar.label for bar in panel.bars}
        assert not ({"bwrap ... true", "podman run true (runc)"} & labels and "k8e sandbox run true (native)" in labels)
        assert "exists already" in panel.title or "fresh" in panel.title or "new" in panel.title
    assert draw(panels, "footer").count("<rect") == sum(len(panel.bars) for panel in panels) + 1


def test_there_is_a_plot_each_for_sessions_clients_output_and_rules() -> None:
    names = [f"native: exec true, {count} sessions" for count in (1, 10)]
    names += [f"gvisor: true per second, {count}, gRPC and TLS" for count in ("1 client", "10 clients")]
    names += [f"native: head with {count} KiB of stdout" for count in (1, 64)]
    names += [f"egress: change of a list of {count}" for count in (1, 10)]
    measures = [{"name": name, "percentiles": {"p50": 5.0}, "baseline_percentiles": {}} for name in names]
    plots = read_plots({"measures": measures})
    assert [plot.x for plot in plots] == ["sessions", "clients", "KiB of stdout", "entries of the list"]
    assert draw_plots(plots, "footer").count("<polyline") == 4
    assert all(any(pattern.fullmatch(name) for pattern in find_names()) for name in names), "none that is not measured"


def test_runtimes_are_beside_each_other_with_their_baselines() -> None:
    name = "memory of a warm sandbox"
    both = [Measure(f"{runtime}: {name}", "MiB", MANY, "bare", (1.0,)) for runtime in ("native", "gvisor")]
    table = render_measures([*both, Measure("egress: other", "ms", MANY)])
    assert table.splitlines()[2:] == [f"| {name}, MiB | 15 (30) | 15 (30) | bare | 1 (1) | 1 (1) |"]


def test_a_plan_says_what_bounds_it() -> None:
    about = "per true, 50 clients, gRPC and TLS"
    measures = [
        Measure(f"native: {what}", "", (value,) * ENOUGH)
        for what, value in ((f"machine's CPU {about}", 4.0), (f"daemon's CPU {about}", 1.0))
    ]
    measures.append(Measure("native: memory of a warm sandbox", "MiB", (8.0,) * ENOUGH))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in render_plan(measures).splitlines()[2:]]
    assert rows[0] == ["2", "8 GiB", "", "768", "", "500 (processors)"]
    assert rows[2] == ["64", "256 GiB", "", "24,576", "", "1,000 (the daemon)"]

"""The bench judges what it measures, and says what it did not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from bench.budgets import BUDGETS, ENOUGH, Budget, render_budgets
from bench.plot import draw, read_panels
from bench.publish import PAGE, put
from bench.samples import Measure

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
    for name in ("run", "budgets", "agentkernel"):
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

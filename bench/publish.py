"""Writes what README and docs/performance.md show of a run: the picture, and the tables between their marks. Used by
the run itself, so that they are of one run, misses included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.budgets import render_budgets
from bench.curves import draw_growth
from bench.plot import draw_record
from bench.samples import Measure, percentile
from bench.tables import render_measures, render_plan

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
COMMANDS = (
    ("true", "`true`"),
    ("python3 -c print(1)", "`python3 -c 'print(1)'`"),
    ("--compatibility-mode claude true", "`true` with the project, mode claude"),
    ("--image busybox true", "`true` in an image with busybox"),
)
RIVALS = ("true", "python3 -c print(1)", "true with a folder", "true in localhost/k8e-bench:1")


def publish(record: dict[str, Any], measures: Sequence[Measure], page: Path = PAGE) -> None:
    draw_record(record, page.with_suffix(".svg"))
    draw_growth(record, page.with_name("growth.svg"))
    text = page.read_text()
    for name, content in (
        ("run", describe(record["machine"])),
        ("measures", render_measures(measures)),
        ("plan", render_plan(measures)),
        ("budgets", render_budgets(measures)),
        ("agentkernel", render_agentkernel(measures)),
    ):
        text = put(text, name, content)
    page.write_text(text)


def put(text: str, name: str, content: str) -> str:
    """Between `<!-- bench NAME -->` and `<!-- end -->`."""
    marked = re.compile(rf"(<!-- bench {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marked.search(text):
        raise ValueError(f"there is no place for {name}")
    return marked.sub(lambda match: f"{match[1]}\n{content.strip()}\n\n{match[2]}", text)


def describe(facts: dict[str, Any]) -> str:
    machine = f"{facts['cpus']} cores, {facts['cpu']}, kernel {facts['kernel']}"
    return (
        f"From one {facts['mode']} run of {facts['date']} at commit {facts['commit']}, in {facts['minutes']:.0f} "
        f"minutes, on a machine with {machine}, load {facts['load']:.1f} at its start. "
        "All of it is in [bench/results/latest.md](../bench/results/latest.md)."
    )


def render_agentkernel(measures: Sequence[Measure]) -> str:
    found = {measure.name: measure for measure in measures}

    def show(name: str) -> str:
        if name not in found:
            return ""
        samples = found[name].samples
        return f"{percentile(samples, 50):.0f} ({percentile(samples, 99):.0f})"

    lines = [
        "| p50 (p99) in ms | warm | warm, gone | cold | cold, gone | podman, runsc | podman, runc |",
        "|---|---|---|---|---|---|---|",
    ]
    for (command, words), rival in zip(COMMANDS, RIVALS, strict=True):
        ours = [f"agentkernel run {command}, {how}" for how in ("warm", "cold")]
        cells = [show(each) for name in ours for each in (name, f"{name}, and its sandbox gone")]
        cells += [show(f"podman run {rival} ({runtime})") for runtime in ("runsc", "runc")]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)

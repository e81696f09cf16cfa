"""`python -m bench [--quick] [--only GROUP ...] [--publish]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from bench.agent import measure_agent
from bench.agentkernel import measure_agentkernel
from bench.budgets import render_budgets
from bench.bystander import measure_bystander
from bench.creates import measure_creates
from bench.crowd import measure_densities
from bench.egress import measure_egress
from bench.footprint import measure_footprint
from bench.gateway import measure_gateway
from bench.hostile import measure_hostile
from bench.idle import measure_idle
from bench.machines import measure_machines
from bench.mcp import measure_mcp
from bench.oneshot import measure_oneshots
from bench.publish import publish
from bench.runs import measure_runs
from bench.samples import Measure, machine_facts, render
from bench.stream import measure_streams
from bench.throughput import measure_throughput

RESULTS = Path(__file__).resolve().parent / "results"

Group = Callable[[bool, Path], AsyncIterator[Measure]]
GROUPS: dict[str, Group] = {
    "oneshot": measure_oneshots,
    "agentkernel": measure_agentkernel,
    "runs": measure_runs,
    "creates": measure_creates,
    "gateway": measure_gateway,
    "throughput": measure_throughput,
    "bystander": measure_bystander,
    "footprint": measure_footprint,
    "idle": measure_idle,
    "mcp": measure_mcp,
    "stream": measure_streams,
    "density": measure_densities,
    "egress": measure_egress,
    "hostile": measure_hostile,
    "agent": measure_agent,
    "machines": measure_machines,
}


async def collect(quick: bool, names: list[str]) -> tuple[list[Measure], list[str]]:
    """Measures each group; returns the measurements and the groups that failed."""
    measures, failures = list[Measure](), list[str]()
    for name in names:
        began = time.monotonic()
        scratch = Path(tempfile.mkdtemp(prefix="k8e-bench-"))
        os.chmod(scratch, 0o711)
        try:
            async for measure in GROUPS[name](quick, scratch):
                ratio = f"{measure.ratio:.2f} of {measure.baseline_name}" if measure.ratio is not None else ""
                print(f"{measure.name}: {measure.p50:.3g} {measure.unit} {ratio}", file=sys.stderr, flush=True)
                measures.append(measure)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this group's
            traceback.print_exc()
            failures.append(f"{name} failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return measures, failures


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description="Measure k8e against baselines of the same run.")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), metavar="GROUP")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "latest", metavar="STEM", help="STEM.json and STEM.md"
    )
    parser.add_argument(
        "--publish", action="store_true", help="also draw the picture and write the tables of docs/performance.md"
    )
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("sandboxes need root")
    facts = machine_facts()
    facts["mode"] = "quick" if options.quick else "full"
    began = time.monotonic()
    measures, failures = asyncio.run(collect(options.quick, options.only))
    facts["minutes"] = round((time.monotonic() - began) / 60, 1)
    page = "\n".join([render(facts, measures), render_budgets(measures), *(f"- {each}" for each in failures)])
    options.results.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": facts, "measures": [measure.as_dict() for measure in measures], "failures": failures}
    options.results.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    options.results.with_suffix(".md").write_text(page)
    print(page)
    if options.publish:
        publish(record, measures)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

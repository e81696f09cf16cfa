"""`python -m bench [--quick] [--json FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from bench.agent import measure_agent
from bench.product import measure_product
from bench.samples import Measure, machine_facts, render
from devel.sandboxes import find_runsc

RESULTS = Path(__file__).resolve().parent / "results"


async def collect(quick: bool) -> list[Measure]:
    measures = []
    for group in (measure_agent(quick, find_runsc() is not None), measure_product(quick)):
        async for measure in group:
            ratio = f"{measure.ratio:.2f} of {measure.baseline_name}" if measure.ratio is not None else ""
            print(f"{measure.name}: {measure.samples[0]:.3g} {measure.unit} {ratio}", file=sys.stderr, flush=True)
            measures.append(measure)
    return measures


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description="Measure k8e against baselines of the same run.")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--json", type=Path, default=RESULTS / "latest.json", metavar="FILE")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("sandboxes need root")
    facts = machine_facts()
    measures = asyncio.run(collect(options.quick))
    table = render(facts, measures)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"machine": facts, "measures": [m.as_dict() for m in measures]}, indent=1) + "\n"
    )
    options.json.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()

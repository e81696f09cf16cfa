"""Samples with their percentiles, compared with a named baseline of the same run."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e.engine.local.runtime.runtime import OWN_BINARIES

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Measure:
    """`better` says which way is good; a ratio above 1 always means more than the baseline."""

    name: str
    unit: str
    samples: tuple[float, ...]
    baseline_name: str = ""
    baseline: tuple[float, ...] = ()
    better: str = "less"

    @property
    def p50(self) -> float:
        return percentile(self.samples, 50)

    @property
    def ratio(self) -> float | None:
        return self.p50 / percentile(self.baseline, 50) if self.baseline else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "better": self.better,
            "count": len(self.samples),
            "percentiles": percentiles(self.samples),
            "baseline": self.baseline_name,
            "baseline_count": len(self.baseline),
            "baseline_percentiles": percentiles(self.baseline),
            "ratio": self.ratio,
        }


def percentile(samples: Sequence[float], rank: float) -> float:
    """The nearest rank: a value that was measured, never one between two."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(rank / 100 * len(ordered)) - 1)]


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    if not samples:
        return {}
    return {f"p{rank}": percentile(samples, rank) for rank in (50, 90, 99)} | {"max": max(samples)}


async def measure_pairs(
    count: int,
    ours: Callable[[], Awaitable[object]],
    baseline: Callable[[], Awaitable[object]],
    *,
    pause: float = 0,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Milliseconds of both, taken in turn so that a noisy moment hits both alike. The first of each does not count.

    `pause` is seconds between rounds: an agent that calls a thousand times an hour leaves more than three, in which
    the next interpreter gets ready.
    """
    taken: tuple[list[float], list[float]] = ([], [])
    for round_number in range(count + 1):
        await asyncio.sleep(pause)
        for into, action in zip(taken, (ours, baseline), strict=True):
            started = time.perf_counter()
            await action()
            if round_number:
                into.append((time.perf_counter() - started) * 1000)
    return tuple(taken[0]), tuple(taken[1])


def machine_facts() -> dict[str, Any]:
    def version(*argv: str) -> str:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10)
        except FileNotFoundError:
            return "not installed"
        return (done.stdout or done.stderr).partition("\n")[0]

    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": version("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "bwrap": version("bwrap", "--version"),
        "runc": version("runc", "--version"),
        "runsc": version(str(own) if (own := OWN_BINARIES / "runsc").exists() else "runsc", "--version"),
    }


def render(facts: dict[str, Any], measures: Sequence[Measure]) -> str:
    lines = [
        "| measure | p50 | p90 | p99 | max | unit | n | baseline | its p50 | its p99 | its n | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for measure in measures:
        ours, other = percentiles(measure.samples), percentiles(measure.baseline)
        numbers = " | ".join(f"{ours[rank]:.3g}" for rank in ("p50", "p90", "p99", "max"))
        compared = " | | | | "
        if other:
            both = f"{other['p50']:.3g} | {other['p99']:.3g} | {len(measure.baseline)}"
            compared = f"{measure.baseline_name} | {both} | {measure.ratio:.2f}"
        lines.append(f"| {measure.name} | {numbers} | {measure.unit} | {len(measure.samples)} | {compared} |")
    about = ", ".join(f"{key} {value}" for key, value in facts.items())
    return "\n".join([*lines, "", f"Measured on: {about}.", ""])

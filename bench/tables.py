"""The tables of docs/performance.md that are made of one run: what was measured by runtime, beside its baseline; and
how much to plan for on machines of other sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bench.samples import Measure, percentile

RUNTIMES = ("gvisor", "native")
# In this order; each matches names without their runtime.
ROWS = (
    r"run .*, SDK",
    r"run .*, back to back, .*",
    r"create \+ first command, .*",
    r"daemon's CPU per create and destroy.*",
    r"true per second, .*",
    r"daemon's CPU per true, .*",
    r"memory of a warm sandbox",
    r"stdout over HTTP",
    r"true in a quiet session .*",
    r"daemon's memory.*",
)
CORES = (2, 8, 64)
MEMORY_OF_A_CORE = 4096  # MiB: what machines are usually sold with
FOR_SESSIONS = 0.75  # of it; the rest is the system's, the page cache's, and what programs use at the moment
MOST_SESSIONS = 1 << 15  # wires of one machine, with the default pool of addresses


def show(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def render_measures(measures: Sequence[Measure]) -> str:
    """Both runtimes beside each other; the baseline in the same form."""
    found = {measure.name: measure for measure in measures}
    lines = ["| p50 (p99) | gVisor | native | baseline | gVisor | native |", "|---|---|---|---|---|---|"]
    for name in list_names(measures):
        both = [found.get(f"{runtime}: {name}") for runtime in RUNTIMES]
        there = next(each for each in both if each is not None)
        samples = [_cell(each.samples if each else ()) for each in both]
        baselines = [_cell(each.baseline if each else ()) for each in both]
        compared = dict.fromkeys(each.baseline_name for each in both if each and each.baseline_name)
        lines.append(
            f"| {name}, {there.unit} | {' | '.join(samples)} | {'; '.join(compared)} | {' | '.join(baselines)} |"
        )
    return "\n".join(lines)


def list_names(measures: Sequence[Measure]) -> Iterable[str]:
    """Without their runtime, each once, in the order of ROWS."""
    names = dict.fromkeys(measure.name.partition(": ")[2] for measure in measures if _runtime(measure) in RUNTIMES)
    taken: dict[str, None] = {}
    for row in ROWS:
        taken |= dict.fromkeys(name for name in names if re.fullmatch(row, name))
    return taken


def _runtime(measure: Measure) -> str:
    return measure.name.partition(": ")[0]


def _cell(samples: Sequence[float]) -> str:
    return f"{show(percentile(samples, 50))} ({show(percentile(samples, 99))})" if samples else ""


def render_plan(measures: Sequence[Measure]) -> str:
    """Sessions by memory; commands by whichever ends first: the processors, or the one that the daemon has."""
    found = {measure.name: measure.p50 for measure in measures}
    lines = [
        "| cores | memory | sessions, gVisor | sessions, native | commands a second, gVisor | native |",
        "|---|---|---|---|---|---|",
    ]
    for cores in CORES:
        memory = cores * MEMORY_OF_A_CORE
        cells = [_plan_sessions(found, runtime, memory) for runtime in RUNTIMES]
        cells += [_plan_commands(found, runtime, cores) for runtime in RUNTIMES]
        lines.append(f"| {cores} | {memory >> 10} GiB | {' | '.join(cells)} |")
    return "\n".join(lines)


def _plan_sessions(found: dict[str, float], runtime: str, memory: float) -> str:
    each = found.get(f"{runtime}: memory of a warm sandbox")
    return show(min(MOST_SESSIONS, int(memory * FOR_SESSIONS / each))) if each else ""


def _plan_commands(found: dict[str, float], runtime: str, cores: int) -> str:
    about = "per true, 50 clients, gRPC and TLS"
    whole, daemon = found.get(f"{runtime}: machine's CPU {about}"), found.get(f"{runtime}: daemon's CPU {about}")
    if not whole or not daemon:
        return ""
    by_machine, by_daemon = cores * 1000 / whole, 1000 / daemon
    return f"{show(int(min(by_machine, by_daemon)))} ({'processors' if by_machine < by_daemon else 'the daemon'})"

"""How cost grows, as a picture (docs/growth.svg, .png) with a plot each for sessions, clients, output and rules, from
what one run has measured. Both axes are logarithmic: a straight rising line is a cost in proportion."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plot import FONT, OURS, describe_run, render_png, text

WIDTH, HEIGHT, LEFT, BOTTOM = 440, 300, 62, 46  # of one plot
COLOURS = (OURS, "#c2571a", "#4a5a9c", "#8a8f94")


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]


def read_plots(record: dict[str, Any]) -> list[Plot]:
    found = {measure["name"]: measure for measure in record["measures"]}

    def line(label: str, pattern: str, *, of: str = "percentiles", each: float = 1.0) -> list[Line]:
        """The p50 of each measure whose name has a number where the pattern has one."""
        points = []
        for name, measure in found.items():
            match = re.fullmatch(pattern, name)
            if match and measure[of]:
                points.append((float(match[1]) * each, measure[of]["p50"]))
        return [Line(label, tuple(sorted(points)))] if len(points) > 1 else []

    def of_both(label: str, pattern: str) -> list[Line]:
        return [
            each
            for runtime, shown in (("native", "native"), ("gvisor", "gVisor"))
            for each in line(f"{label}{shown}", f"{runtime}: {pattern}")
        ]

    plots = [
        Plot(
            "`true`, beside sessions that are there",
            "sessions",
            "ms",
            tuple(of_both("", r"exec true, (\d+) sessions?")),
        ),
        Plot(
            "Commands a second, by how many clients ask",
            "clients",
            "per second",
            tuple(
                each
                for way, short in (("the unix socket", "socket"), ("gRPC and TLS", "gRPC"))
                for each in of_both(f"{short}, ", rf"true per second, (\d+) clients?, {way}")
            ),
        ),
        Plot(
            "A command with output, streamed to its end",
            "KiB of stdout",
            "ms",
            (
                *of_both("", r"head with (\d+) KiB of stdout"),
                *line("no sandbox", r"native: head with (\d+) KiB of stdout", of="baseline_percentiles"),
            ),
        ),
        Plot(
            "A list of hosts",
            "entries of the list",
            "ms",
            (
                *line("changing an entry", r"egress: change of a list of (\d+)"),
                *line("a TCP connection", r"egress: TCP connection with a list of (\d+)"),
            ),
        ),
    ]
    return [plot for plot in plots if plot.lines]


def draw_plots(plots: Sequence[Plot], footer: str) -> str:
    width, rows = 2 * (WIDTH + 10), math.ceil(len(plots) / 2)
    height = rows * (HEIGHT + 10) + 30
    parts = [
        f"<g transform='translate({number % 2 * (WIDTH + 10)},{number // 2 * (HEIGHT + 10)})'>\n{draw_one(plot)}\n</g>"
        for number, plot in enumerate(plots)
    ]
    parts.append(text(16, height - 10, footer, size=11))
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>"
    body = "\n".join(parts)
    return f"{head}\n<rect width='100%' height='100%' fill='white'/>\n{body}\n</svg>\n"


def draw_one(plot: Plot) -> str:
    everything = [point for line in plot.lines for point in line.points]
    across = _Scale([x for x, _ in everything], LEFT, WIDTH - 16)
    upwards = _Scale([y for _, y in everything], HEIGHT - BOTTOM, 46)
    parts = [text(16, 24, plot.title, size=14, weight="bold")]
    for value in across.marks():
        x = across.place(value)
        parts.append(f"<line x1='{x:.0f}' y1='46' x2='{x:.0f}' y2='{HEIGHT - BOTTOM}' stroke='#e4e7ea'/>")
        parts.append(text(x, HEIGHT - BOTTOM + 16, f"{value:,.10g}", size=11, anchor="middle"))
    for value in upwards.marks():
        y = upwards.place(value)
        parts.append(f"<line x1='{LEFT}' y1='{y:.0f}' x2='{WIDTH - 16}' y2='{y:.0f}' stroke='#e4e7ea'/>")
        parts.append(text(LEFT - 6, y + 4, f"{value:,.10g}", size=11, anchor="end"))
    parts.append(text((LEFT + WIDTH) / 2, HEIGHT - 10, f"{plot.x} (upwards: {plot.y}, p50)", size=11, anchor="middle"))
    for number, (line, colour) in enumerate(zip(plot.lines, COLOURS, strict=False)):
        places = [(across.place(x), upwards.place(y)) for x, y in line.points]
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f"<polyline points='{way}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in places]
        x, y = LEFT + 10 + number % 2 * 180, 58 + number // 2 * 15
        key = f"x='{x}' y='{y}' font-size='11' fill='{colour}'"
        parts.append(f"<text {key} {FONT}>{line.label}</text>")
    return "\n".join(parts)


class _Scale:
    """Places values between two edges, by their logarithms; the ends are powers of ten."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        positive = [value for value in values if value > 0]
        self._low = math.floor(math.log10(min(positive)))
        self._high = max(math.ceil(math.log10(max(positive))), self._low + 1)
        self._begin, self._end = begin, end

    def marks(self) -> list[float]:
        step = 1 if self._high - self._low <= 5 else 2
        return [10.0**power for power in range(self._low, self._high + 1, step)]

    def place(self, value: float) -> float:
        share = (math.log10(max(value, 1e-9)) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)


def draw_growth(record: dict[str, Any], target: Path) -> None:
    """Writes the picture as SVG and as PNG."""
    target.write_text(draw_plots(read_plots(record), describe_run(record["machine"])))
    render_png(target)

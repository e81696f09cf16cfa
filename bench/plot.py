"""The comparison as a picture (docs/performance.svg, .png), from what one run has measured."""

from __future__ import annotations

import html
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, LABELS, ROW, GAP = 900, 330, 26, 46
OURS, OTHERS = "#0b7a75", "#b9c0c7"
FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    ours: bool


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    bars: tuple[Bar, ...]


def read_panels(record: dict[str, Any]) -> list[Panel]:
    found = {measure["name"]: measure for measure in record["measures"]}

    def ours(name: str, label: str) -> list[Bar]:
        return [Bar(label, found[name]["percentiles"]["p50"], True)] if name in found else []

    def baseline(name: str, label: str) -> list[Bar]:
        return [Bar(label, found[name]["baseline_percentiles"]["p50"], False)] if name in found else []

    def other(name: str) -> list[Bar]:
        return [Bar(name, found[name]["percentiles"]["p50"], False)] if name in found else []

    cli = "{}: k8e sandbox run true"
    python = "{}: run print(1), python"
    pool = "{}: create + first command, from the pool"
    cold = "{}: create + first command, cold"
    panels = [
        Panel(
            "One command in a session that exists already, whole process",
            (
                *baseline(cli.format("native"), "/usr/bin/python3 -c pass, no sandbox"),
                *ours(cli.format("native"), "k8e sandbox run true (native)"),
                *ours(cli.format("gvisor"), "k8e sandbox run true (gVisor)"),
            ),
        ),
        Panel(
            "One command in a fresh sandbox, whole process, until the sandbox is gone again",
            (
                *other("bwrap ... true"),
                *other("sandbox-runtime true"),
                *ours("agentkernel run true, warm, and its sandbox gone", "agentkernel run true, from a pool (gVisor)"),
                *ours("agentkernel run true, cold, and its sandbox gone", "agentkernel run true, cold (gVisor)"),
                *other("podman run true (runc)"),
                *other("podman run true (runsc)"),
            ),
        ),
        Panel(
            "print(1) in Python, in a session that exists already",
            (
                *baseline(python.format("native"), "/usr/bin/python3 -c 'print(1)', no sandbox"),
                *ours(python.format("native"), "k8e (native)"),
                *ours(python.format("gvisor"), "k8e (gVisor)"),
            ),
        ),
        Panel(
            "A new sandbox, until its first command has answered (its end not counted, of none)",
            (
                *baseline(pool.format("native"), "bwrap ... echo"),
                *ours(pool.format("native"), "k8e, from the pool (native)"),
                *ours(pool.format("gvisor"), "k8e, from the pool (gVisor)"),
                *ours(cold.format("native"), "k8e, cold (native)"),
                *baseline(cold.format("native"), "runc run"),
                *ours(cold.format("gvisor"), "k8e, cold (gVisor)"),
                *baseline(cold.format("gvisor"), "runsc run"),
            ),
        ),
    ]
    return [panel for panel in panels if panel.bars]


def text(x: float, y: float, content: str, *, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    shape = f"x='{x:.0f}' y='{y:.0f}' font-size='{size}' text-anchor='{anchor}' font-weight='{weight}'"
    return f"<text {shape} {FONT} fill='#1d2429'>{html.escape(content, quote=False)}</text>"


def draw(panels: Sequence[Panel], footer: str) -> str:
    parts = []
    y = 30
    for panel in panels:
        parts.append(text(16, y, panel.title, size=15, weight="bold"))
        y += 12
        most = max(bar.value for bar in panel.bars)
        for bar in panel.bars:
            length = max(2.0, bar.value / most * (WIDTH - LABELS - 110))
            fill = OURS if bar.ours else OTHERS
            parts.append(text(LABELS - 10, y + 17, bar.label, anchor="end"))
            shape = f"x='{LABELS}' y='{y + 4}' width='{length:.1f}' height='{ROW - 8}' rx='2'"
            parts.append(f"<rect {shape} fill='{fill}'/>")
            parts.append(text(LABELS + length + 8, y + 17, f"{bar.value:.3g} ms"))
            y += ROW
        y += GAP
    parts.append(text(16, y - 10, footer, size=11))
    body = "\n".join(parts)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{y + 6}' viewBox='0 0 {WIDTH} {y + 6}'>"
    return f"{head}\n<rect width='100%' height='100%' fill='white'/>\n{body}\n</svg>\n"


def describe_run(facts: dict[str, Any]) -> str:
    run = f"{facts['mode']} run of {facts['date']}, commit {facts['commit']}"
    return f"{run}, {facts['cpus']} cores, {facts['cpu']}, kernel {facts['kernel']}."


def draw_record(record: dict[str, Any], target: Path) -> None:
    """Writes the picture as SVG and as PNG."""
    target.write_text(draw(read_panels(record), f"p50, less is better. {describe_run(record['machine'])}"))
    render_png(target)


def render_png(target: Path) -> None:
    if not shutil.which("rsvg-convert"):
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "librsvg2-bin", "fonts-dejavu-core"],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    subprocess.run(["rsvg-convert", "-o", str(target.with_suffix(".png")), str(target)], check=True)

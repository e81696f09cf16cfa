"""`k8e top`: sessions, load, pool and refusals, anew every few seconds until it is ended; in a pipe one JSON object."""

from __future__ import annotations

import os
import select
import time

from k8e.cli.client import LocalClient, open_client
from k8e.cli.process import is_for_person, print_json, write_all
from k8e.cli.view.shapes import COLOURS
from k8e.cli.view.table import draw_table, paint, show_age, show_size, uses_colour

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Any

    from k8e.cli.client.service import Service

HOME, CLEAR_LINE, CLEAR_BELOW = "\033[H", "\033[K", "\033[J"
SCREEN, NO_SCREEN = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
HEADS = ("SESSION", "PHASE", "RUNTIME", "TENANT", "CPU", "MEMORY", "RUNS", "DENIED", "LAST USED")


def top(options: argparse.Namespace) -> int:
    client = open_client()
    if not is_for_person():
        print_json(look(client))
        return 0
    previous: dict[str, Any] | None = None
    write_all(1, SCREEN.encode())
    try:
        while True:
            seen = look(client)
            rows, columns = measure_screen()
            lines = draw(seen, previous, uses_colour()).splitlines()[: rows - 1]
            text = "".join(f"{cut(line, columns)}{CLEAR_LINE}\n" for line in lines)
            write_all(1, f"{HOME}{text}{CLEAR_BELOW}".encode("utf-8", "backslashreplace"))
            previous = seen
            if wait_for_end(options.every):
                return 0
    finally:
        write_all(1, NO_SCREEN.encode())


def look(client: Service) -> dict[str, Any]:
    """All that is shown, at one moment."""
    status = client.status().parse()
    seen = {
        "at": time.time(),
        **{name: status[name] for name in ("available", "runtime", "warm", "version")},
        "sessions": client.list_sessions("active", load=True).parse()["sessions"],
    }
    if isinstance(client, LocalClient):
        seen["machine_load"] = list(os.getloadavg())
    return seen


def draw(seen: Mapping[str, Any], previous: Mapping[str, Any] | None, colour: bool) -> str:
    sessions: Sequence[Mapping[str, Any]] = seen["sessions"]
    loads = [session["load"] for session in sessions if session.get("load")]
    head = [
        f"{len(sessions)} sessions",
        f"{sum(load['commands'] for load in loads)} commands",
        f"{show_size(sum(load['memory'] for load in loads))} in use",
        f"{seen['warm']} warm",
        f"{sum(load['denied'] for load in loads)} denied",
    ]
    if "machine_load" in seen:
        head.append("load " + " ".join(f"{value:.2f}" for value in seen["machine_load"]))
    before = {session["session_id"]: session for session in previous["sessions"]} if previous else {}
    span = seen["at"] - previous["at"] if previous else 0.0
    rows = [show_row(session, before.get(session["session_id"]), span) for session in sessions]
    rows.sort(key=lambda row: (-row[0], row[1]))
    title = paint(f"k8e {seen['version']}  {time.strftime('%H:%M:%S')}", "bold", colour)
    table = draw_table(HEADS, [row[1] for row in rows], COLOURS, colour) if rows else "no sessions\n"
    return f"{title}  (q ends this)\n{', '.join(head)}\n\n{table}"


def show_row(
    session: Mapping[str, Any], before: Mapping[str, Any] | None, span: float
) -> tuple[float, tuple[str, ...]]:
    """The CPUs that the session used since the last look, by which rows are sorted, and its cells."""
    load, earlier = session.get("load"), (before or {}).get("load")
    used = -1.0
    if load and earlier and span > 0:
        used = max(load["cpu_seconds"] - earlier["cpu_seconds"], 0.0) / span
    cells = (
        session["session_id"],
        session["phase"],
        session["runtime"],
        session["tenant_id"],
        f"{used * 100:.0f}%" if used >= 0 else "-",
        show_size(load["memory"]) if load else "-",
        str(load["commands"]) if load else "-",
        str(load["denied"]) if load else "-",
        show_age(session["last_used"]),
    )
    return used, cells


def measure_screen() -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(1)
    except OSError:
        return 24, 80
    return rows or 24, columns or 80


def cut(line: str, columns: int) -> str:
    """The part that fits; colours take no room."""
    shown, at, visible = "", 0, 0
    while at < len(line) and visible < columns:
        if line[at] == "\033":
            end = line.index("m", at) + 1
            shown, at = shown + line[at:end], end
            continue
        shown, at, visible = shown + line[at], at + 1, visible + 1
    return shown + ("\033[0m" if "\033" in shown else "")


def wait_for_end(seconds: float) -> bool:
    """Whether the person typed q, or closed the input, within that time."""
    from k8e.cli.terminal import Terminal

    if not os.isatty(0):
        time.sleep(seconds)
        return False
    terminal = Terminal()
    terminal.hand_over()
    try:
        ready, _, _ = select.select([0], [], [], seconds)
        return bool(ready) and os.read(0, 16)[:1] in (b"q", b"Q", b"\x03", b"")
    finally:
        terminal.take_back()

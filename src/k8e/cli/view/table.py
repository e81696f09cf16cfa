"""Tables, colours, and amounts that can be read. Cells may come from anywhere: nothing in them acts on a terminal."""

from __future__ import annotations

import os
import time
import unicodedata

from k8e.profiles.text import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

COLOURS = {"red": "31", "green": "32", "yellow": "33", "grey": "90", "bold": "1"}
GAP = "  "
SPANS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def uses_colour(descriptor: int = 1) -> bool:
    """As https://no-color.org asks: any value of NO_COLOR but the empty one turns colours off."""
    return os.isatty(descriptor) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, wanted: bool) -> str:
    return f"\033[{COLOURS[colour]}m{text}\033[0m" if wanted and colour and text else text


def measure_width(text: str) -> int:
    """The columns that it takes: letters of East Asian scripts take two, marks above a letter none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def draw_table(heads: Sequence[str], rows: Sequence[Sequence[str]], colours: dict[str, str], wanted: bool) -> str:
    """The lines of a table. `colours` has a colour for each cell that is one of these words."""
    table = [tuple(heads), *(tuple(clean(cell) for cell in row) for row in rows)]
    widths = [max(measure_width(row[column]) for row in table) for column in range(len(heads))]
    lines = []
    for number, row in enumerate(table):
        cells = []
        for cell, width in zip(row, widths, strict=True):
            colour = "bold" if number == 0 else colours.get(cell, "")
            cells.append(paint(cell, colour, wanted) + " " * (width - measure_width(cell)))
        lines.append(GAP.join(cells).rstrip())
    return "".join(f"{line}\n" for line in lines)


def show_size(number: float) -> str:
    """1536 is 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" or number % 1 == 0 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def show_span(seconds: float) -> str:
    """The two greatest units: 90 is 1m30s, 90,061 is 1d1h."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f}ms"
    left = int(seconds)
    parts: list[str] = []
    for length, unit in SPANS:
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
        if len(parts) == 2:
            break
    return "".join(parts)


def show_age(moment: float | None) -> str:
    """How long ago a unix time was."""
    return "never" if not moment else f"{show_span(max(time.time() - moment, 1))} ago"


def show_until(moment: float | None) -> str:
    if moment is None:
        return "never"
    left = moment - time.time()
    return f"in {show_span(left)}" if left > 0 else f"{show_span(-left)} ago"

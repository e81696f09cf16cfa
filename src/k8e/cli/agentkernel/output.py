"""Messages for people, on stderr, and tables, on stdout. Names and errors may come from anywhere, so nothing in them
acts on a terminal."""

from __future__ import annotations

from k8e.cli.process import OutputLost, write_all
from k8e.profiles.text import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def say(line: str) -> None:
    """A message that cannot be shown changes nothing of what was done; the command's own output is another matter."""
    try:
        write_all(2, f"agentkernel: {clean(line)}\n".encode("utf-8", "backslashreplace"))
    except OutputLost:
        pass


def tell(body: Mapping[str, str]) -> None:
    """Says an error, its detail and hint, and the code that programs look for."""
    say(f"{body['error']} [{body['code']}]")
    for name in ("detail", "hint"):
        if body.get(name):
            say(f"  {name}: {body[name]}")


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """For people; programs ask for JSON."""
    table = [tuple(heads), *(tuple(clean(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    write_all(1, "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))

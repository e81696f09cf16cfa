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
    from k8e.cli.view.shapes import COLOURS
    from k8e.cli.view.table import draw_table, uses_colour

    write_all(1, draw_table(heads, rows, COLOURS, uses_colour()).encode("utf-8", "backslashreplace"))

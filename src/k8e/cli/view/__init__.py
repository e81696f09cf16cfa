"""Prints answers: JSON for programs (in a pipe, and with --json), tables and colours for a person at a terminal.

Everything but the decision is imported when a person is there: a program pays nothing for tables.
"""

from __future__ import annotations

from k8e.cli.process import is_for_person, print_json, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from k8e.cli.client import Answer


def show(answer: Answer, noun: str = "") -> int:
    """Prints an answer of the daemon or the gateway. `noun` says which table fits it (shapes.py)."""
    if not is_for_person():
        write_all(1, answer.text)
        return 0
    show_value(answer.parse(), noun)
    return 0


def show_value(value: Mapping[str, Any], noun: str = "") -> None:
    """Prints what a command has put together itself."""
    if not is_for_person():
        return print_json(value)
    from k8e.cli.view.shapes import draw

    return write_all(1, draw(value, noun).encode("utf-8", "backslashreplace"))


def show_error(body: Mapping[str, Any], descriptor: int = 1) -> None:
    """An error: one JSON object on that stream, or for a person lines on stderr."""
    if not is_for_person(descriptor):
        return print_json(body, descriptor)
    from k8e.cli.view.table import paint, uses_colour
    from k8e.profiles.text import clean

    lines = [f"k8e: {paint(clean(body['error']), 'red', uses_colour(2))} [{clean(body['code'])}]\n"]
    lines += [f"  {name}: {clean(str(body[name]))}\n" for name in ("detail", "hint") if body.get(name)]
    return write_all(2, "".join(lines).encode("utf-8", "backslashreplace"))

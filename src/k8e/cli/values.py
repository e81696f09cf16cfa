"""Values of options as people write them: sizes, spans of time, assignments, lists of hosts."""

from __future__ import annotations

from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
SPANS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def read_size(text: str) -> int:
    """512m, 2g, 1.5G, 1GiB; plain numbers are bytes."""
    try:
        return int(multiply(text.lower().removesuffix("ib").removesuffix("b"), SIZES))
    except OverflowError:
        raise ValueError(text) from None


def read_span(text: str) -> float:
    """90, 90s, 15m, 1h, 2d."""
    return multiply(text.lower(), SPANS)


def read_life(text: str) -> float | None:
    """30d, or never."""
    return None if text == "never" else read_span(text)


def read_range(text: str) -> tuple[int, int | None]:
    """0-99, or 100- for all from there on: the offset, and the length or None."""
    first, dash, last = text.partition("-")
    if not dash or not first.isdecimal() or not (last.isdecimal() or not last):
        raise ValueError(text)
    if last and int(last) < int(first):
        raise ValueError(text)
    return int(first), int(last) - int(first) + 1 if last else None


def read_count(text: str) -> int:
    if (count := int(text)) < 0:
        raise ValueError(text)
    return count


def multiply(text: str, units: Mapping[str, int]) -> float:
    unit = text.lstrip("0123456789.")
    if unit not in units:
        raise ValueError(text)
    return float(text.removesuffix(unit)) * units[unit]


def read_env(assignments: list[str]) -> dict[str, str]:
    """Of two assignments to one name the last counts."""
    env = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise Failure("usage", "--env takes NAME=VALUE", hint="--env DEBUG=1")
        env[name] = value
    return env


def split_hosts(values: list[str]) -> list[str]:
    """a,b and repeated options; an empty word is no host, so that '' is an empty list."""
    return [host.strip() for value in values for host in value.split(",") if host.strip()]

"""Sizes and spans of time as people write them."""

from __future__ import annotations

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


def multiply(text: str, units: Mapping[str, int]) -> float:
    unit = text.lstrip("0123456789.")
    if unit not in units:
        raise ValueError(text)
    return float(text.removesuffix(unit)) * units[unit]

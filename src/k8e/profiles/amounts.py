"""Limits as people write them, for messages: 16m and not 1.67772e+07. Imports nothing (see k8e.profiles)."""

from __future__ import annotations

BYTES = ("memory", "disk")
UNITS = (("t", 1 << 40), ("g", 1 << 30), ("m", 1 << 20), ("k", 1 << 10))


def describe_amount(name: str, value: float) -> str:
    """`name` is the limit's, which says whether it is counted in bytes. Two that differ never look the same."""
    if name in BYTES and value % 1024 == 0:
        for unit, size in UNITS:
            if value >= size and value * 1024 % size == 0:
                return f"{value / size:.12g}{unit}"
    return str(int(value)) if value == int(value) else repr(value)

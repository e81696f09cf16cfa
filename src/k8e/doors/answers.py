"""Reads values out of core's answers, for the answers of all doors."""

from __future__ import annotations

from typing import Any


def pick(value: object, *names: str) -> dict[str, Any]:
    """Returns the attributes that are called the same in core and in the answer."""
    return {name: getattr(value, name) for name in names}

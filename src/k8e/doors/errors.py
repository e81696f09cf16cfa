"""Errors that every door tells alike."""

from __future__ import annotations

from typing import Final

from k8e.core.errors import Fault, Kind, correct

# The cause is in the daemon log only, for the daemon's administrator.
INTERNAL_ERROR: Final = "the daemon met an error of its own"
INTERNAL_HINT: Final = "the daemon's log has the details"


def invalid(field: str, error: str, hint: str = "") -> Fault:
    return Fault(Kind.INVALID, "invalid_argument", error, hint=hint or correct(field), field=field)

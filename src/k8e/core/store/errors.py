"""The store's error, and the error for a damaged file that SQLite itself would not notice."""

from __future__ import annotations

import sqlite3

from k8e.core.errors import Fault, Kind


class StoreFailed(Fault):
    def __init__(self, cause: object, hint: str = "") -> None:
        if not hint and type(cause) is sqlite3.DatabaseError:  # not one of its kinds: the file is not what it should be
            hint = "It is damaged, or no database: put a copy of it back, or move it away to begin with nothing."
        hint = hint or "Is the disk with the state directory full, or does another process hold the database?"
        super().__init__(
            Kind.UNAVAILABLE, "state_unavailable", "the daemon's database does not answer", detail=str(cause), hint=hint
        )


def corrupt(cause: object) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(str(cause))
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error

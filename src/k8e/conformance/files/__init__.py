"""Checks of files, directories and sockets inside the sandbox. Importing the modules fills the registry."""

from k8e.conformance.files import (
    directories,
    moves,
    permissions,
    reads,
    sockets,
    watches,
    writes,
)

__all__ = [
    "directories",
    "moves",
    "permissions",
    "reads",
    "sockets",
    "watches",
    "writes",
]

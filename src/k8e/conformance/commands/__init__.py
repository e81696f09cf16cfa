"""Checks of commands: how they start, run, are signalled and end. Importing the modules fills the registry."""

from k8e.conformance.commands import (
    background,
    control,
    environment,
    output,
    parked,
    reconnection,
    scale,
    start,
    status,
    stdin,
    terminal,
    trees,
)

__all__ = [
    "background",
    "control",
    "environment",
    "output",
    "parked",
    "reconnection",
    "scale",
    "start",
    "status",
    "stdin",
    "terminal",
    "trees",
]

"""Judges a virtual machine that was started and did not answer: its guest hangs, or the machine had no time for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final

from k8e.engine import EngineError

_STARVED: Final = 0.5  # of the time: a thread that waited for a processor for longer had no fair chance


class Hung(EngineError):
    """It had its time and did not answer. It can be booted again: no command has run."""


def judge_silence(pids: Iterable[int], seconds: float, said: str) -> EngineError:
    """Blocks for a moment. `pids`: those of the VMM, which still runs. `said`: by it and its guest, for people."""
    ran, waited = _read_times(pids)
    cause = f"no answer from the virtual machine in {seconds:.0f} s{f' ({said})' if said else ''}"
    if waited < seconds * _STARVED:
        return Hung("agent", f"{cause}; it had {ran:.0f} s of processor time")
    cause = f"{cause}; it had {ran:.0f} s of processor time and waited {waited:.0f} s for more: the machine is too busy"
    return EngineError("agent", cause, "try again when less runs on the machine; a boot needs about 4 s when emulated")


def _read_times(pids: Iterable[int]) -> tuple[float, float]:
    """Returns for how long all threads ran, and for how long one waited at most, in seconds."""
    ran, waited = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it ends at this moment
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                    times = list(map(int, file.read().split()))
                ran += times[0]
                waited = max(waited, times[1])
    return ran / 1e9, waited / 1e9

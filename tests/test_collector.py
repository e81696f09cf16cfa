"""The daemon's garbage collector does not search again and again what is loaded for good.

In interpreters of their own: other tests leave threads behind that load modules and let go of things."""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import gc, sys, types
from k8e.daemon.collector import Collector
Collector().begin()
gc.collect()
"""
LOADED = """
loaded = gc.get_freeze_count()
assert loaded > 1000, loaded
kept = [[number] for number in range(1000)]
gc.collect()
assert gc.get_freeze_count() == loaded, "no module was loaded since"
sys.modules["k8e_a_new_module"] = types.ModuleType("k8e_a_new_module")
gc.collect()
assert gc.get_freeze_count() >= loaded + len(kept)
"""
CYCLE = """
class Node: pass
one, two = Node(), Node()
one.other, two.other = two, one
del one, two
assert gc.collect() >= 2
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_loaded_is_set_aside_before_a_full_search() -> None:
    run(LOADED)


def test_cycles_that_are_made_later_are_found() -> None:
    run(CYCLE)

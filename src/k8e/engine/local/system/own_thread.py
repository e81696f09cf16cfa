"""Work that changes the thread that does it: its namespaces, its ids, its filter."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(work: Callable[[], T]) -> T:
    """Runs it in a thread that ends with it: nothing has to be set back, and no other work meets the change. Blocks
    until it has ended, and raises what it raised."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="k8e-own") as thread:
        return thread.submit(work).result()

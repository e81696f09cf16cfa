"""Work that changes the thread that does it: its namespaces, its ids. A thread of a pool that got stuck there would be
a trap for the work that it does next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(work: Callable[[], T]) -> T:
    """Blocks until it is done, or has failed in the same way."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            failures.append(error)

    thread = threading.Thread(target=run, name="k8e-own")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]

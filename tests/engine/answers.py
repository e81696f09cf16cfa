"""The answers of pip, npm and Node of this machine, asked once in a test run and not by each of its hundred
engines and daemons: that is a second of a core each time, and the answer is the same.

It is put where an engine keeps it, with the engine's own fingerprint: one that finds anything else on its machine, such
as a configuration file in a home of the test's, asks again.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from k8e.engine.local.toolchain.package_clients import Answers, ask_clients, choose_variables, remember_answers

TOOLS = Path("/var/lib/k8e/tools")  # the engine's own place for them


def plant_answers(state: Path, home: Path | None = None) -> None:
    """For a daemon whose home is empty; without one, for an engine in this process."""
    if os.geteuid() != 0:
        return  # no engine will come
    if home is None:
        env = choose_variables(os.environ)
        remember_answers(state / "clients.json", TOOLS, env, _ask(tuple(sorted(env.items()))))
    else:
        empty, answers = _ask_in_an_empty_home()
        answers = replace(answers, made_from=tuple(path.replace(empty, str(home)) for path in answers.made_from))
        remember_answers(state / "clients.json", TOOLS, {"HOME": str(home)}, answers)


@functools.cache
def _ask_in_an_empty_home() -> tuple[str, Answers]:
    with tempfile.TemporaryDirectory(prefix="k8e-home-") as home:
        return home, _ask((("HOME", home),))


@functools.cache
def _ask(variables: tuple[tuple[str, str], ...]) -> Answers:
    """In a thread, because fixtures that want it are asynchronous as well."""
    found: list[Answers] = []
    asking = threading.Thread(target=lambda: found.append(asyncio.run(ask_clients(TOOLS, None, dict(variables)))))
    asking.start()
    asking.join()
    return found[0]

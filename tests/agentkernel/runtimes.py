"""A machine on which commands run under one runtime, whichever it would choose by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.agentkernel.house import House
from tests.cli.machine import Machine, make_folder
from tests.engine.answers import plant_answers
from tests.runtimes import do_without
from tests.scenarios.user import clear_machine, start_without_gvisor, stop_daemon


@contextlib.contextmanager
def open_machine(runtime: str, settings: str = "", pool: str = "enabled = false") -> Iterator[Machine]:
    """With a home beside the daemon's own directories."""
    with make_folder() as folder:
        (folder / "k8e.toml").write_text(f'[pool]\n{pool}\n[gateway]\nlisten = ""\n{settings}')
        home = folder / "home"
        home.mkdir()
        plant_answers(folder / "s", home)
        machine = Machine(folder, home)
        try:
            if runtime == "native":
                start_without_gvisor(machine)
            started = House(folder, home).object("daemon", "start")
            if started["runtime"] != runtime:
                do_without(runtime, started)
            yield machine
        finally:
            if "enabled = false" not in pool:  # what was made ahead goes with the next daemon
                (folder / "k8e.toml").write_text("[pool]\nenabled = false\n")
                stop_daemon(machine)
            clear_machine(machine)

"""A machine for each runtime: the real daemon, the real command line, one shell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.machine import Machine, make_folder
from tests.engine.answers import plant_answers
from tests.runtimes import do_without
from tests.scenarios.user import User, clear_machine, start_without_gvisor


@pytest.fixture(scope="module", params=["gvisor", "native"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with make_folder() as folder:
        plant_answers(folder / "s", folder)
        with (folder / "k8e.toml").open("a") as settings:
            settings.write('[gateway]\nlisten = "127.0.0.1:0"\n')
        machine = Machine(folder, folder)
        try:
            if request.param == "native":
                start_without_gvisor(machine)
            status = machine.k8e("sandbox", "status").json
            if status["runtime"] != request.param:
                do_without(request.param, status)
            yield request.param, folder
        finally:
            clear_machine(machine)


@pytest.fixture
def user(place: tuple[str, Path], tmp_path: Path) -> Iterator[User]:
    """Somebody with a home of their own, at a shell."""
    runtime, folder = place
    user = User(folder, tmp_path, runtime=runtime)
    yield user
    user.bring_the_daemon_back()
    for session in user.live_sessions():
        user.k8e("sandbox", "destroy", session)

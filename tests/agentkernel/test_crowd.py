"""A hundred at once on the real engine, and what is left of them: nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.engine.local.layout import Layout
from tests.agentkernel.machine import AGENTKERNEL, PLAIN, Kernel
from tests.cli.machine import make_folder, wait_until
from tests.engine.traces import Trace, find_traces
from tests.sandboxes import needs_root

pytestmark = needs_root

CROWD = 100
SETTINGS = "[pool]\nenabled = false\n"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """Its daemon is started by the command that comes first."""
    with make_folder() as folder:
        (folder / "k8e.toml").write_text(SETTINGS)
        kernel = Kernel(folder, tmp_path)
        try:
            yield kernel
        finally:
            kernel.call("daemon", "stop")


def traces(kernel: Kernel) -> list[Trace]:
    """But for the daemon and its own files."""
    layout = Layout(kernel.folder / "s", kernel.folder / "r")
    own = [f"{kernel.daemon_pid} ", "k8e.daemon", "/r/k8e.", "/r/start.lock"]
    return [trace for trace in find_traces(layout) if not any(mark in trace.what for mark in own)]


def test_a_hundred_at_once_leave_nothing_behind(kernel: Kernel) -> None:
    assert kernel.run("true").code == 0  # there is a daemon now, and what it makes once
    words = [str(AGENTKERNEL), "run", *PLAIN, "true"]
    processes = [
        subprocess.Popen(words, env=kernel.env, cwd=kernel.home, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(CROWD)
    ]
    said = {(process.communicate()[1], process.returncode) for process in processes}
    assert said == {(b"", 0)}
    wait_until(lambda: not kernel.live_sessions() and not traces(kernel))

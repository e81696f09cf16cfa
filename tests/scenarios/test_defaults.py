"""The documents' own example with the limits that a session has by default: it ends within the default timeout, with
room to spare. CPU time is compared, and not the clock: a loaded machine takes longer and uses as much."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from k8e.core.model import DEFAULT_TIMEOUT
from k8e.engine.local.layout import Layout
from k8e.engine.local.runtime.cgroup import hierarchies
from tests.cli.machine import K8E
from tests.scenarios.user import User

PANDAS = "pandas==2.2.3"


def read_cpu_seconds(folder: Path) -> float:
    """Used by all sandboxes of the daemon, since they began."""
    group = Layout(folder / "s", folder / "r").cgroup
    for hierarchy in hierarchies():
        usage, stat = hierarchy / group / "cpuacct.usage", hierarchy / group / "cpu.stat"
        if usage.exists():
            return int(usage.read_text()) / 1e9
        if stat.exists() and "usage_usec" in (text := stat.read_text()):
            return int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6
    raise AssertionError(f"no group {group} counts CPU time")


def run(user: User, session: str, code: str, *words: str) -> Any:
    """The result, however long a busy machine takes."""
    command = [str(K8E), "sandbox", "run", code, *words, "--timeout", "15m", "--session-id", session]
    done = subprocess.run(command, env=user.env, cwd=user.home, capture_output=True, timeout=900)
    return json.loads(done.stdout)


@pytest.mark.timeout(1800)
def test_installing_pandas_takes_two_thirds_of_its_time_at_most(user: User) -> None:
    session = user.k8e("sandbox", "create").json["session_id"]
    cpus = user.k8e("sandbox", "get", session).json["limits"]["cpus"]
    before = read_cpu_seconds(user.folder)
    result = run(user, session, f"pip install {PANDAS}")
    used = read_cpu_seconds(user.folder) - before
    assert (result["exit_code"], result["status"]) == (0, "completed"), result
    assert "Successfully installed" in result["stdout"]
    assert 0 < used < cpus * DEFAULT_TIMEOUT * 2 / 3, f"{used:.1f} s of CPU time, {cpus} processors"
    tried = run(user, session, "import pandas; print(pandas.DataFrame([1]).sum()[0])", "--lang", "python")
    assert tried["stdout"] == "1\n", tried

"""Tools never outlive the process that runs them; also where there is no `setpriv` and no shell, as in the image of a
node's helper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from k8e.engine.local.system import tool
from k8e.engine.local.system.tool import bound_to

# Starts a tool, says its process id, and waits.
PARENT = """
import os, subprocess, sys
from k8e.engine.local.system import tool
if sys.argv[1] == "bare":
    tool.find_tool = lambda name: None
child = subprocess.Popen(tool.bound_to(os.getpid(), ["/bin/sh", "-c", "echo $$; exec sleep 1000"]))
child.wait()
"""

WAYS = pytest.mark.parametrize("way", ["usual", "bare"])


@pytest.fixture
def bare(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "bare":
        monkeypatch.setattr(tool, "find_tool", lambda name: None)


@WAYS
@pytest.mark.usefixtures("bare")
def test_arguments_input_and_status_are_the_tools(way: str) -> None:
    script = 'printf "%s|" "$@"; cat; exit 7'
    words = bound_to(os.getpid(), ["/bin/sh", "-c", script, "sh", "a b", "$HOME", "", "-c"])
    assert (words[0] == "setpriv") == (way == "usual")
    done = subprocess.run(words, input=b"given", capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"a b|$HOME||-c|given", b"")


@WAYS
@pytest.mark.usefixtures("bare")
def test_one_whose_parent_is_gone_already_does_not_start(way: str) -> None:
    done = subprocess.run(bound_to(os.getppid(), ["/bin/sh", "-c", "echo started"]), capture_output=True)
    assert (done.returncode != 0, done.stdout) == (True, b"")


@WAYS
def test_it_is_killed_with_its_parent(way: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, way], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == b"", "the output ends with its last writer"

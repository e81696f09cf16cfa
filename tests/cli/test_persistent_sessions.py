"""Sessions that last, as people type them, over the real engine: files and configuration outlive the daemon."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.cli.machine import Machine, wait_until


def kill_daemon(machine: Machine) -> None:
    pid = machine.daemon_pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_stopped_and_started_with_the_daemon_killed_in_between(lone_machine: Machine) -> None:
    machine = lone_machine
    token = {"TOKEN": "s3cr3t-value"}
    try:
        made = machine.k8e(
            *(
                "sandbox",
                "create",
                "--session-id",
                "lasting",
                "--persistent",
                "--env",
                "WORD=kept",
                "--secret",
                "TOKEN",
            ),
            env=token,
        )
        assert made.code == 0, made
        script = "echo one > file; echo $WORD $TOKEN"
        done = machine.run(script, "--session-id", "lasting", "--raw")
        assert done.stdout == b"kept s3cr3t-value\n", done
        assert machine.k8e("sandbox", "stop", "lasting").json["phase"] == "stopped"
        kill_daemon(machine)
        (listed,) = machine.k8e("sandbox", "sessions").json["sessions"]
        assert (listed["phase"], listed["persistent"], listed["secret_keys"]) == ("stopped", True, ["TOKEN"])
        refused = machine.run("true", "--session-id", "lasting")
        assert (refused.code, refused.json["code"]) == (1, "session_stopped")
        assert "k8e sandbox start lasting" in refused.json["hint"]
        assert machine.k8e("sandbox", "start", "lasting").json["code"] == "secrets_missing"
        unset = machine.k8e("sandbox", "start", "lasting", "--secret", "TOKEN")
        assert (unset.code, unset.json["code"]) == (1, "secret_not_set")
        started = machine.k8e("sandbox", "start", "lasting", "--secret", "TOKEN", "--env", "MORE=x", env=token)
        assert started.json["phase"] == "active"
        done = machine.run("cat file; echo $WORD $MORE $TOKEN", "--session-id", "lasting", "--raw")
        assert done.stdout == b"one\nkept x s3cr3t-value\n", done
        assert machine.k8e("sandbox", "stop", "lasting").code == 0
        state = machine.folder / "s"
        kept = [path for path in (*state.iterdir(), *(state / "environments").iterdir()) if path.is_file()]
        assert len(kept) > 3
        assert not [path for path in kept if b"s3cr3t-value" in path.read_bytes()]
        assert machine.k8e("sandbox", "destroy", "lasting").json == {"ok": True}
        assert list((machine.folder / "s/sandboxes").iterdir()) == []
    finally:
        with contextlib.suppress(OSError):
            machine.k8e("sandbox", "destroy", "lasting")
            os.kill(machine.daemon_pid, signal.SIGTERM)

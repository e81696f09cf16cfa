"""The daemon as systemd's service, where systemd runs."""

from __future__ import annotations

import os
import subprocess

from k8e.cli.process import Failure

UNIT = "k8e.service"
DEADLINE = 120.0


def runs() -> bool:
    """As sd_booted(3) has it."""
    return os.path.isdir("/run/systemd/system")


def is_active() -> bool:
    return runs() and ask("is-active", "--quiet", UNIT) == 0


def enable(*, start: bool) -> None:
    call("daemon-reload")
    call("enable", *(["--now"] if start else []), UNIT)


def disable() -> None:
    """Stops it, too; sandboxes live on."""
    call("disable", "--now", UNIT)


def reload() -> None:
    call("daemon-reload")


def ask(*words: str) -> int:
    return run(*words).returncode


def call(*words: str) -> None:
    done = run(*words)
    if done.returncode != 0:
        error = f"systemctl {' '.join(words)} failed"
        hint = "`systemctl status k8e` and `journalctl -u k8e` say more"
        raise Failure("systemd_failed", error, detail=done.stderr.strip(), hint=hint)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["systemctl", "--no-ask-password", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = "`systemctl status k8e` and `journalctl -u k8e` say more"
        raise Failure("systemd_failed", "systemctl cannot be used", detail=str(error), hint=hint) from error

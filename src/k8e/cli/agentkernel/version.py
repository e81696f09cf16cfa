"""`agentkernel version`: which version this is, and which one the daemon is, if it runs."""

from __future__ import annotations

from importlib.metadata import version

from k8e.cli.process import Failure, print_json, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def main(parsed: argparse.Namespace) -> int:
    from k8e.cli.client.daemon_process import is_running

    daemon = ask_daemon() if is_running() else ""
    if parsed.json:
        print_json({"version": version("k8e"), "daemon": daemon or None})
        return 0
    return show(f"daemon {daemon}\n" if daemon else "")


def show(more: str = "") -> int:
    write_all(1, f"agentkernel (k8e) {version('k8e')}\n{more}".encode())
    return 0


def ask_daemon() -> str:
    from k8e.cli.client import LocalClient

    try:
        return str(LocalClient().status().parse()["version"])
    except Failure:
        return ""  # it is not for this user, or does not answer; other commands say why

"""`k8e server` and `k8e doctor`, which also is `agentkernel doctor`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def serve(options: argparse.Namespace) -> int:
    from k8e.daemon.server import run_in_foreground

    run_in_foreground()
    return 0


def examine(options: argparse.Namespace) -> int:
    from k8e.daemon.doctor import run_doctor

    return run_doctor(as_json=options.json, fix=options.fix)

"""What a command leads to where it is more than one request: loaded only when it is asked for."""

from __future__ import annotations

import argparse
import os

from k8e.cli.arguments import take_over
from k8e.cli.client.http import quieten_grpc
from k8e.cli.options import RunOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.arguments import Handler


def run_parsed(parsed: argparse.Namespace) -> int:
    from k8e.cli.run import run

    options = RunOptions()
    take_over(parsed, options)
    return run(options)


def run_confirm(parsed: argparse.Namespace) -> int:
    from k8e.cli.approvals import confirm

    return confirm(parsed)


def run_approve(parsed: argparse.Namespace) -> int:
    from k8e.cli.approvals import approve

    return approve(parsed)


def run_approvals(parsed: argparse.Namespace) -> int:
    from k8e.cli.approvals import approvals

    return approvals(parsed)


def install_skill(parsed: argparse.Namespace) -> int:
    from k8e.cli.skill.install import install_skill

    return install_skill(parsed)


def run_connect(parsed: argparse.Namespace) -> int:
    quieten_grpc()
    from k8e.cli.remote.connect import connect

    return connect(parsed)


def run_login(parsed: argparse.Namespace) -> int:
    quieten_grpc()
    from k8e.cli.remote.connect import login

    return login(parsed)


def run_mcp(parsed: argparse.Namespace) -> int:
    from k8e.cli.mcp import bridge, listen

    for name, value in (("CERT", parsed.tls_cert), ("KEY", parsed.tls_key)):
        if value:
            os.environ[f"K8E_SANDBOX_{name}"] = value
    return listen(parsed.http_addr, parsed.tenant_id) if parsed.http else bridge(parsed.tenant_id)


def serve(parsed: argparse.Namespace) -> int:
    from k8e.daemon.server import run_in_foreground

    run_in_foreground()
    return 0


def examine(parsed: argparse.Namespace) -> int:
    from k8e.daemon.doctor import run_doctor

    return run_doctor(as_json=parsed.json, fix=parsed.fix)


def run_image(function: str, parsed: argparse.Namespace) -> int:
    from k8e.cli import images

    handler: Handler = getattr(images, function)
    return handler(parsed)

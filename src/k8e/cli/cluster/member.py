"""`k8e server --cluster` and `k8e agent`: a member of a cluster in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from importlib.util import find_spec
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING

from k8e.cli.cluster.place import find_layout, require_root
from k8e.cli.process import Failure, write_all
from k8e.cluster.member.member import Options, find_address, name_node, run_server, run_worker
from k8e.cluster.programs import USUAL, open_programs
from k8e.cluster.trust.join_token import JoinToken

if TYPE_CHECKING:
    import argparse


def serve(options: argparse.Namespace) -> int:
    if options.engine != "local" or options.tenant_namespaces:
        hint = "its settings are in /etc/k8e/k8e.toml, as those of every daemon"
        raise Failure("usage", "--cluster has an engine of its own", hint=hint)
    require_root("k8e server --cluster")
    asyncio.run(run_server(read_options(options, sandboxes=not options.disable_sandbox_matrix), say))
    return 0


def work(options: argparse.Namespace) -> int:
    require_root("K8E_URL=... K8E_TOKEN=... k8e agent")
    asyncio.run(run_worker(read_options(options), say))
    return 0


def read_options(options: argparse.Namespace, *, sandboxes: bool = False) -> Options:
    require_libraries()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return Options(
        layout=find_layout(),
        components=open_programs(Path(options.bin_dir or USUAL).absolute()),
        node=options.node_name.lower() or name_node(),
        address=read_address(options.node_ip) if options.node_ip else find_address(),
        url=os.environ.get("K8E_URL", ""),
        token=read_token(),
        sandboxes=sandboxes,
        program=describe_self(),
    )


def require_libraries() -> None:
    """The gateway and the helper of the node need those of the Kubernetes engine."""
    if missing := [name for name in ("lightkube", "msgspec") if find_spec(name) is None]:
        error = "the libraries for Kubernetes are not installed"
        raise Failure("engine_unusable", error, detail=", ".join(missing), hint="pip install 'k8e[kubernetes]'")


def read_token() -> JoinToken | None:
    text = os.environ.pop("K8E_TOKEN", "")  # no program of the member gets it
    if named := os.environ.get("K8E_TOKEN_FILE"):
        try:
            text = text or Path(named).read_text()
        except (OSError, UnicodeDecodeError) as error:
            hint = "K8E_TOKEN_FILE names a file with one token"
            raise Failure("bad_join_token", f"{named} cannot be read", detail=str(error), hint=hint) from error
    return JoinToken.parse(text) if text.strip() else None


def read_address(text: str) -> IPv4Address:
    try:
        return IPv4Address(text)
    except AddressValueError:
        raise Failure("usage", f"--node-ip: {text!r} is no IPv4 address", hint="--node-ip 192.0.2.10") from None


def describe_self() -> tuple[str, ...]:
    """The command that is this program, for the gateway and the helper of the node."""
    script = Path(sys.argv[0]).resolve()
    if script.is_file() and os.access(script, os.X_OK):
        return (str(script),)
    return (sys.executable, "-P", "-c", "from k8e.cli import main; main()")


def say(text: str) -> None:
    write_all(1, f"{text}\n".encode())

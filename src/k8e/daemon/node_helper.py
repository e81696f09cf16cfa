"""`k8e node-helper`: runs the helper of a Kubernetes node until it is told to end (docs/kubernetes-egress.md)."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from k8e.daemon.paths import StartRefused


@dataclass(frozen=True, slots=True)
class HelperArguments:
    node: str
    namespace: str
    address: str
    port: int
    state: str
    kubeconfig: str = ""
    nameservers: Sequence[str] = ()


def run_node_helper(arguments: HelperArguments) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    asyncio.run(_run(arguments))


async def _run(arguments: HelperArguments) -> None:
    from k8e.engine import EngineError
    from k8e.engine.kubernetes.api import Api
    from k8e.engine.kubernetes.node.helper import HelperOptions, NodeHelper

    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        options = HelperOptions(
            node=arguments.node,
            namespace=arguments.namespace,
            address=str(ip_address(arguments.address)),
            port=arguments.port,
            state=Path(arguments.state),
            nameservers=[ip_address(each) for each in arguments.nameservers],
        )
        api = Api(options.namespace, Path(arguments.kubeconfig) if arguments.kubeconfig else None)
        helper = NodeHelper(options, api)
    except (EngineError, ValueError, OSError) as error:
        hint = getattr(error, "hint", "") or "docs/kubernetes-egress.md has what the helper needs"
        raise StartRefused("engine_unusable", str(error), hint=hint) from error
    try:
        await helper.start()
        await ended.wait()
    finally:
        await helper.close()
        await api.close()

"""Removes the rules of a node's helper for good, with those of pods that are gone: the node leaves its cluster. The
helper does not run."""

from __future__ import annotations

import contextlib
import shutil
from ipaddress import IPv4Address
from pathlib import Path

from k8e.damage import Damages
from k8e.engine.kubernetes.node.helper import name_rules
from k8e.engine.kubernetes.node.machine import NodeMachine
from k8e.engine.kubernetes.options import RESOLVER
from k8e.engine.local.network.addresses import Pool
from k8e.engine.local.network.leases import LEDGERS
from k8e.engine.local.network.network import Network
from k8e.link.noise import AGENT_PORT


async def remove_rules(state: Path) -> None:
    """Removes them with the helper's state."""
    tag = name_rules(state)
    machine = NodeMachine(tag, state, IPv4Address(RESOLVER), AGENT_PORT)
    network = Network(
        tag, machine.record_of, pool=Pool(v6=None), nameservers=(), damages=Damages(state), machine=machine
    )
    for uid in network.sandboxes():
        await network.remove(uid)
    await network.close()
    shutil.rmtree(state)
    with contextlib.suppress(OSError):  # another engine's ledger may be there
        LEDGERS.rmdir()

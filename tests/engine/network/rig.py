"""An engine's network on a machine of the tests' own, and programs in the namespace of a wire, which have there all the
power of root that no sandbox has."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from k8e.damage import Damages
from k8e.engine.local.network.addresses import Pool, Wire
from k8e.engine.local.network.network import Network
from k8e.policy import HostList
from tests.egress.internet import NAME_SERVER

TAG = "cafe0123"
INSIDE = """
import json, socket, sys
def attempt(kind, address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as s:
        s.settimeout(20)
        try:
            s.connect((address, port))
            if kind == "udp":
                s.send(b"x")
                s.recv(9)
            return "reached"
        except OSError as error:
            return type(error).__name__
print(json.dumps([attempt(*each) for each in json.loads(sys.argv[1])]))
"""


@dataclass(slots=True)
class Place:
    """Where sandboxes' records are, and the engines that there were."""

    folder: Path

    def network(self) -> Network:
        return Network(
            TAG,
            lambda sandbox: self.folder / f"{sandbox}.json",
            pool=Pool(),
            nameservers=[ip_address(NAME_SERVER)],
            damages=Damages(self.folder),
        )


def nft(*words: str) -> str:
    done = subprocess.run(["nft", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def routing_rules() -> list[str]:
    words = (["ip", "rule"], ["ip", "-6", "rule"])
    return [line for each in words for line in subprocess.run(each, capture_output=True, text=True).stdout.splitlines()]


async def run_inside(namespace: str, *argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "nsenter", f"--net={namespace}", *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def attempt(namespace: str, *attempts: tuple[str, str, int]) -> list[str]:
    told: list[str] = json.loads(await run_inside(namespace, sys.executable, "-c", INSIDE, json.dumps(attempts)))
    return told


async def open_with(network: Network, sandbox: str, *hosts: str) -> tuple[Wire, str]:
    return await network.open(sandbox, HostList.parse(hosts), "sandbox")

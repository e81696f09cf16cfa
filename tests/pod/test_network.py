"""The agent of a pod in a network namespace of its own, as the kubelet starts it: with an address and a port, next to
processes that would have its place."""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from devel.sandboxes import POD_AGENT, Variation, launch_bare
from k8e.link import AgentLink
from k8e.link.model import ExecSpec
from k8e.link.noise import AGENT_PORT, GatewayKey, PodDialer, pod_arguments
from tests.egress.namespaces import private_machine, run_ip
from tests.sandboxes import PATH, needs_root

pytestmark = needs_root
ADDRESSES = {"IPv4": "10.88.0.2", "IPv6": "fd88::2"}
# Takes the agent's port if it can, then connects to it and talks nonsense.
INTRUDER = f"""
import socket, sys
address = sys.argv[1]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    taker = socket.socket(family)
    taker.setsockopt(socket.SOL_SOCKET, option, 1)
    for place in (address, "::" if ":" in address else "0.0.0.0"):
        try:
            taker.bind((place, {AGENT_PORT}))
            taker.listen()
            sys.exit("took the port")
        except OSError as error:
            assert error.errno == 98, error
for content in (b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(100), b"\\x20\\0" + bytes(range(32)) + bytes(400)):
    peer = socket.create_connection((address, {AGENT_PORT}))
    try:
        peer.sendall(content)
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        pass
print("refused")
"""


@pytest.fixture(scope="module")
def pod_network() -> Iterator[int]:
    """A namespace behind a veth pair; the process in it."""
    with private_machine(), contextlib.ExitStack() as stack:
        holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        assert holder.stdout is not None
        stack.callback(holder.stdout.close)
        holder.stdout.readline()
        run_ip("link", "add", "gateway", "type", "veth", "peer", "name", "pod", "netns", str(holder.pid))
        for name, inside, number in (("gateway", None, 1), ("pod", holder.pid, 2)):
            run_ip("address", "add", f"10.88.0.{number}/24", "dev", name, inside=inside)
            run_ip("address", "add", f"fd88::{number}/64", "dev", name, "nodad", inside=inside)
            run_ip("link", "set", name, "up", inside=inside)
        run_ip("link", "set", "lo", "up", inside=holder.pid)
        yield holder.pid


@contextlib.asynccontextmanager
async def linked(inside: int, address: str) -> AsyncIterator[AgentLink]:
    key = GatewayKey.generate()
    variation = Variation(
        agent=POD_AGENT,
        gateway=key.public,
        listen=pod_arguments(key.public, address=address)[:4],
        prefix=("nsenter", f"--net=/proc/{inside}/ns/net"),
    )
    with launch_bare(variation) as launched:
        dialer = PodDialer(address, AGENT_PORT, uid=str(uuid.UUID(bytes=launched.instance)), key=key)
        async with await AgentLink.open(dialer, instance=dialer.instance, deadline=20) as link:
            yield link


@pytest.mark.parametrize("family", ADDRESSES)
async def test_only_the_agent_has_its_port(pod_network: int, family: str) -> None:
    """A process of the sandbox neither takes the port nor is let in by it, and the gateway goes on."""
    address = ADDRESSES[family]
    async with linked(pod_network, address) as link:
        argv = (b"/usr/bin/python3", b"-c", INTRUDER.encode(), address.encode())
        done = await link.run(ExecSpec(argv, env=(PATH,), stdin=False, timeout=60))
        assert (done.stdout, done.stderr) == (b"refused\n", b"")
        done = await link.run(ExecSpec((b"cat", b"/proc/1/environ", b"/proc/1/mem"), env=(PATH,), stdin=False))
        assert done.stdout == b""


async def test_no_other_address_is_listened_on(pod_network: int) -> None:
    async with linked(pod_network, ADDRESSES["IPv4"]) as link:
        probe = f"import socket; print(socket.socket().connect_ex(('127.0.0.1', {AGENT_PORT})))"
        done = await link.run(ExecSpec((b"/usr/bin/python3", b"-c", probe.encode()), env=(PATH,), stdin=False))
        assert done.stdout == b"111\n"

"""Controls of the network: a sandbox reaches the hosts that are listed, and no others; least of all the machine."""

from __future__ import annotations

import asyncio
import json
import subprocess

from k8e.engine.local.doctor.controls.control import SEARCH_DEADLINE, Broken, Untested
from k8e.engine.local.doctor.remote_host import BANNER, RemoteHost
from k8e.engine.local.doctor.subject import CommandResult, Subject
from k8e.engine.local.network.addresses import INNER_INTERFACE
from k8e.engine.local.system.tool import find_tool
from k8e.link.errors import AgentError
from k8e.link.model import Cause
from k8e.policy import NOTHING, HostList


async def list_interfaces(subject: Subject) -> str:
    table = (await subject.sandbox.read_file(b"/proc/net/dev")).decode(errors="replace")
    names = {line.partition(":")[0].strip() for line in table.splitlines()[2:]}
    if others := sorted(names - {"lo", INNER_INTERFACE}):
        raise Broken(f"there are {', '.join(others)}")
    return "only loopback and a wire of its own"


async def reach_host_loopback(subject: Subject) -> str:
    try:
        connection = await subject.sandbox.connect(port=subject.decoys.port)
    except AgentError as error:
        return f"a listener of the machine is out of reach: {error}"
    await connection.close()
    raise Broken(f"port {subject.decoys.port} of the machine's loopback can be reached")


async def reach_remote_host(subject: Subject) -> str:
    """Connects by name, which works only while it is listed. The address is private, so the list has it as well."""
    remote = _remote_host(subject)
    await subject.set_egress(HostList.parse([f"{remote.name}:{remote.port}", f"{remote.address}:{remote.port}"]))
    try:
        reached = await _greeting(subject, remote.name, remote.port)
        if reached.stdout.encode() != BANNER:
            chains = await asyncio.to_thread(find_foreign_drops)
            why = f"; others drop what is forwarded: {', '.join(chains)}" if chains else ""
            raise Broken(f"a listed name cannot be reached: {reached.stderr.strip()[-200:]}{why}")
        elsewhere = await _greeting(subject, str(remote.address), remote.port + 1)
        if "refused" not in elsewhere.stderr:
            raise Broken(f"another port is not refused: {elsewhere.stderr.strip()[-200:]}")
    finally:
        await subject.set_egress(NOTHING)
    after = await _greeting(subject, str(remote.address), remote.port)
    if after.stdout or "refused" not in after.stderr:
        raise Broken("what is not listed any more can be reached")
    return "a listed name is reached while it is listed, on its port"


async def ask_for_unlisted_name(subject: Subject) -> str:
    remote = _remote_host(subject)
    asked = await subject.run("getent", "hosts", remote.name, seconds=SEARCH_DEADLINE)
    if asked.exit_code == 0 or asked.cause is Cause.TIMEOUT:
        raise Broken(f"a name that is not listed is {'answered' if asked.exit_code == 0 else 'not refused at once'}")
    if remote.name not in {refusal.host for refusal in (await subject.observe()).refusals}:
        raise Broken("the refusal is not told")
    return "a name that is not listed is refused at once, and told"


async def reach_metadata(subject: Subject) -> str:
    tried = await _greeting(subject, "169.254.169.254", 80)
    if tried.stdout or "refused" not in tried.stderr:
        raise Broken(f"169.254.169.254 is not refused: {(tried.stdout or tried.stderr).strip()[-200:]}")
    return "refused at once"


async def reach_machine(subject: Subject) -> str:
    remote = _remote_host(subject)
    tried = await _greeting(subject, str(remote.machine), remote.machine_port)
    if "refused" not in tried.stderr:
        raise Broken(f"a listener of the machine is not refused: {tried.stderr.strip()[-200:]}")
    return "a listener on an address of the machine is refused"


def _remote_host(subject: Subject) -> RemoteHost:
    if subject.remote is None:
        raise Untested("there is no host to reach")
    return subject.remote


async def _greeting(subject: Subject, host: str, port: int) -> CommandResult:
    """Connects and returns what the host sends."""
    return await subject.run(
        "bash", "-c", 'exec 3<>"/dev/tcp/$0/$1" && cat <&3', host, str(port), seconds=SEARCH_DEADLINE
    )


def find_foreign_drops() -> list[str]:
    """Lists chains of other programs that drop forwarded packets by default."""
    nft = find_tool("nft")
    if nft is None:
        return []
    listed = subprocess.run([nft, "-j", "list", "chains"], capture_output=True, timeout=SEARCH_DEADLINE).stdout
    chains = [each["chain"] for each in json.loads(listed or b"{}").get("nftables", ()) if "chain" in each]
    return [
        f"{each['family']} {each['table']} {each['name']}"
        for each in chains
        if each.get("hook") == "forward" and each.get("policy") == "drop"
    ]

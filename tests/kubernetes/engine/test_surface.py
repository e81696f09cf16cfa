"""What kernels and nodes offer and pods of sandboxes must not have: the attempts of one machine's sandboxes, made in
restricted pods, where the filter is the node's runtime's own."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from k8e.engine import Runtime
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine
from k8e.link import AgentLink
from k8e.link.errors import LinkError
from tests.engine.kernel_probe import ATTEMPTS
from tests.engine.rig import Room
from tests.engine.test_kernel_surface import MAY_DIE, SIGSYS, Results, allowed_errnos, run_probe
from tests.kubernetes.engine.rig import Site, new_name, open_engine, spec_of

# Of the node, and of the agent: /k8e is the agent's own program, read-only.
HOST_PATHS = (
    *("/etc/kubernetes", "/etc/cni", "/var/lib/kubelet", "/var/lib/containerd", "/var/lib/etcd", "/var/lib/k8e-node"),
    *("/run/containerd", "/run/containerd/containerd.sock", "/var/run/docker.sock", "/run/k8e", "/run/k8e-network"),
    *("/var/run/secrets", "/root/.kube", "/root/.ssh", "/host", "/proc/1/root/etc/kubernetes"),
)


# Denied in other words than on one machine.
ALSO = {"release_agent": frozenset({"EROFS"}), "process_mrelease-agent": frozenset({"EINVAL"})}
# By the beginnings of their names. Natively the filter is the node's RuntimeDefault, which knows no protocols of
# netlink; nothing can be changed there without a capability. Under gVisor all of it is the pod's own kernel.
LEFT_OPEN: dict[Runtime, tuple[str, ...]] = {
    Runtime.NATIVE: (
        *("NETLINK_", "sockets-of-other-protocols", "socketpair-of-other-families"),
        *("TIOCSTI", "core-dumps", "memfd_secret", "modify_ldt"),
    ),
    Runtime.GVISOR: (
        *("NETLINK_KOBJECT_UEVENT", "sockets-of-other-protocols", "socketpair-of-other-families"),
        *("clone-", "clone3-", "unshare-", "user-namespace-", "replace-", "keyctl-", "syslog-", "core-dumps"),
        "write-/proc/self/oom_score_adj",
    ),
}


@pytest.fixture(scope="module", params=[Runtime.NATIVE, Runtime.GVISOR], ids=lambda runtime: str(runtime.value))
def runtime(request: pytest.FixtureRequest) -> Runtime:
    found: Runtime = request.param
    return found


@pytest.fixture(scope="module")
async def engine(site: Site) -> AsyncIterator[KubernetesEngine]:
    async with open_engine(site, claims=False) as engine:
        yield engine


@pytest.fixture(scope="module")
async def room(engine: KubernetesEngine, runtime: Runtime) -> AsyncIterator[Room]:
    name = new_name()
    await engine.create(name, spec_of(runtime))
    link, place = await engine.attach(name)
    assert isinstance(link, AgentLink)
    yield Room(name, link, place, cast("Any", None))
    await engine.destroy(name)


@pytest.fixture(scope="module")
async def tried(room: Room) -> AsyncIterator[Results]:
    """All attempts, made once; the pod must be well afterwards."""
    yield await run_probe(room, "user")
    assert await room.output("echo", "well") == "well\n"


async def test_all_is_denied_but_what_the_documents_name(runtime: Runtime, tried: Results) -> None:
    """docs/kubernetes.md has what each runtime leaves open, and why it reaches nothing beyond the pod."""
    assert tried.keys() == ATTEMPTS.keys()
    left_open = LEFT_OPEN[runtime]
    got = {
        name: result
        for name, result in tried.items()
        if result.get("errno") not in allowed_errnos(name) | ALSO.get(name, frozenset())
        and not name.startswith(left_open)
        and not (name in MAY_DIE and result.get("signal") == SIGSYS)
    }
    assert got == {}


async def test_nothing_of_the_node_is_there(room: Room) -> None:
    there = await room.python(
        "import os, sys; print([path for path in sys.argv[1:] if os.path.lexists(path)])", *HOST_PATHS
    )
    assert there.stdout == b"[]\n"


async def test_no_privilege_can_be_had(room: Room) -> None:
    status = await room.output("cat", "/proc/self/status")
    values = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert (values["CapBnd"], values["Uid"]) == (f"{0:016x}", "1000\t1000\t1000\t1000")
    assert values.get("NoNewPrivs", "1") == "1"  # which gVisor does not show


async def test_the_agent_is_closed_to_commands(room: Room) -> None:
    script = (
        "for each in mem environ maps; do head -c 1 /proc/1/$each > /dev/null 2>&1 && echo read $each; done; "
        "echo x 2> /dev/null > /k8e/k8e-agent-pod && echo written; echo well"
    )
    done = await room.run("/usr/bin/bash", "-c", script)
    assert done.stdout == b"well\n"


async def test_a_command_that_kills_the_agent_ends_no_session_but_its_own(
    engine: KubernetesEngine, room: Room, runtime: Runtime
) -> None:
    """Natively the kernel lets no process of the pod end process 1. gVisor's does, and the session is over, as it is
    after any end of its pod."""
    name = new_name()
    await engine.create(name, spec_of(runtime))
    try:
        link, place = await engine.attach(name)
        if runtime is Runtime.NATIVE:
            assert (await run_script(link, place, "kill -STOP 1; kill -KILL 1; echo well"))[1] == b"well\n"
        else:
            with pytest.raises(LinkError, match="exit code 137"):
                await run_script(link, place, "kill -KILL 1; sleep 60")
        assert await room.output("echo", "well") == "well\n"
    finally:
        await engine.destroy(name)


async def test_another_sandbox_is_not_to_be_seen(engine: KubernetesEngine, room: Room, runtime: Runtime) -> None:
    name = new_name()
    await engine.create(name, spec_of(runtime))
    try:
        link, place = await engine.attach(name)
        await run_script(link, place, "echo secret-of-a-neighbour > /workspace/file; echo x > /tmp/neighbour")
        look = "grep -rls secret-of-a-neighbour /workspace /tmp /home /var /run; ls /tmp/neighbour; true"
        assert await room.output("/usr/bin/bash", "-c", f"({look}) 2> /dev/null") == ""
        uid = await room.output(
            "/usr/bin/bash", "-c", "tr '\\0' '\\n' < /proc/1/cmdline | grep -A1 -- --instance | tail -n 1"
        )
        everything = await room.output("/usr/bin/bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
        others = re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", everything)
        assert set(others) == {uid.strip()}
    finally:
        await engine.destroy(name)

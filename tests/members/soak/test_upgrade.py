"""The programs of the next version: a new supervisor takes the machine over, ends every program of the last one and
starts its own; pods do not notice.

The next version is made of the same programs in another folder: for the supervisor each of them is another one."""

from __future__ import annotations

from tests.members.conftest import Member, until
from tests.members.test_members import get, make_pod

NEXT = "/run/next"
COUNT = "n=0; while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.2; done"


def describe(server: Member, pod: str) -> tuple[str, int]:
    status = get(server, f"pod/{pod}")["status"]["containerStatuses"][0]
    return status["containerID"], status["restartCount"]


def read_count(server: Member, pod: str) -> int:
    """0 when the kubelet does not answer."""
    text = server.kubectl("exec", pod, "--", "cat", "/tmp/n", check=False).strip()
    return int(text) if text.isdecimal() else 0


def test_pods_live_on_when_all_programs_are_replaced(server: Member, worker: Member) -> None:
    pods = {"steady-one": ("one", "native"), "steady-two": ("two", "native"), "steady-sandbox": ("two", "gvisor")}
    for name, (node, runtime) in pods.items():
        server.kubectl("apply", "--filename=-", given=make_pod(name, node, runtime, COUNT))
    server.kubectl("wait", "--for=condition=Ready", *(f"pod/{name}" for name in pods), "--timeout=150s")
    before = {name: describe(server, name) for name in pods}
    until(lambda: all(read_count(server, name) for name in pods))
    counted = {name: read_count(server, name) for name in pods}
    for member in (server, worker):
        programs = member.list_processes()
        member.machine.run("mkdir", NEXT)
        member.machine.run("mount", "--bind", "/run/binaries", NEXT)
        member.kill()
        member.start(K8E_TEST_BINARIES=NEXT)
        member.wait_ready()
        now = member.list_processes()
        assert set(now) == set(programs)
        changed = {name for name in now if now[name] != programs[name]}
        assert changed == set(now) - {"forwarder"}  # k8e's own, which is the same in both
        assert {name: describe(server, name) for name in pods} == before
    for name in pods:
        # A kubelet serves a moment after its node is known to be ready. The same process counts on.
        until(lambda name=name: read_count(server, name) > counted[name])  # type: ignore[misc]
    assert {name: describe(server, name) for name in pods} == before

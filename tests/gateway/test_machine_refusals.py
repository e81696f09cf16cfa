"""Refusals of what a session in a virtual machine cannot have yet, a directory of the machine and a sub-agent on its
workspace: at every door a stable code, the reason, and a next step that works. The engine is the tests' own and
refuses as the real one does (tests/engine/vm/test_machines.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import grpc
import pytest

from k8e.doors.grpc import sandbox_pb2 as pb
from sandbox_client import SandboxClient, SandboxError
from tests.agentkernel.house import House as Project
from tests.gateway.house import House, open_house
from tests.mcp.agents import pipes

REASON = "a sandbox of the runtime kata cannot share another's workspace yet"
STEP = "make the parent with --runtime gvisor or native; or make a session of its own and copy the files with cp"


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K8E_TEST_MACHINES", "1")
        with open_house() as house:
            yield house


def test_sub_agents_by_the_command_line_here_and_over_the_gateway(house: House) -> None:
    key = house.make_key("far")
    for far in ([], ["--endpoint", house.endpoint, "--apikey", key]):
        made = house.machine.k8e(*far, "sandbox", "create", "--runtime", "kata").json
        done = house.machine.k8e(*far, "sandbox", "subagent", made["session_id"])
        assert done.code == 1
        assert done.json["code"] == "sharing_refused"
        assert REASON in done.json["detail"]
        assert done.json["hint"] == STEP
        listed = house.machine.k8e(*far, "sandbox", "sessions").json["sessions"]
        assert made["session_id"] in [each["session_id"] for each in listed]
        assert not [each for each in listed if each.get("parent")], "nothing is left of it"
        # The second of the steps that it names.
        own = house.machine.k8e(*far, "sandbox", "create").json["session_id"]
        (house.machine.home / "note").write_text("copied")
        assert (
            house.machine.k8e(*far, "sandbox", "cp", str(house.machine.home / "note"), f"{own}:/workspace/").code == 0
        )
        assert house.machine.k8e(*far, "sandbox", "run", "cat note", "--session-id", own).json["stdout"] == "copied"


def test_sub_agents_over_http(house: House) -> None:
    _, made = house.ask("POST", "/v1/sessions", {"runtime": "kata"})
    status, answer = house.ask("POST", f"/v1/sessions/{made['session_id']}/subagents", {})
    assert (status, answer["code"], answer["hint"]) == (403, "sharing_refused", STEP)


def test_sub_agents_over_grpc(house: House) -> None:
    guest = house.tenant("machines")
    session = guest.create(runtime_class="kata")
    code, detail = guest.refused("RunSubAgent", pb.RunSubAgentRequest(parent_session_id=session))
    assert detail is not None
    assert (code, detail.code, detail.hint) == (grpc.StatusCode.PERMISSION_DENIED, "sharing_refused", STEP)


def test_sub_agents_to_the_python_sdk(house: House) -> None:
    with SandboxClient(house.endpoint, api_key=house.make_key("python")) as client:
        session = client.create_session(runtime_class="kata")
        with pytest.raises(SandboxError) as raised:
            client.run_subagent(session)
        assert raised.value.code == "sharing_refused"


def test_sub_agents_to_mcp(house: House) -> None:
    with pipes(house.machine) as agent:
        agent.start()
        number = agent.begin_call("sandbox_run_subagent")
        while "id" not in (message := agent.read()):
            pass
    assert (message["id"], message["result"]["isError"]) == (number, True)
    answer = json.loads(message["result"]["content"][0]["text"])
    assert (answer["code"], answer["hint"]) == ("sharing_refused", STEP)


def test_a_project_by_agentkernel(house: House) -> None:
    project = Project(house.machine.folder, house.machine.home)
    project.write("beside.py", "x = 1")
    said = project.refusal("run", "--image", "host", "--compatibility-mode", "claude", "true")
    assert "[mount_refused]" in said
    assert "a sandbox of the runtime kata cannot have directories of the machine yet" in said
    assert "--profile restrictive" in said
    # The step that it names.
    assert project.ok("run", "--image", "host", "--profile", "restrictive", "echo", "well") == "well\n"


def test_a_project_over_http(house: House) -> None:
    folder = house.machine.home / "project"
    folder.mkdir()
    mounts = [{"source": str(folder), "target": "/workspace"}]
    status, answer = house.ask("POST", "/v1/sessions", {"runtime": "kata", "mounts": mounts})
    assert (status, answer["code"]) == (403, "mount_refused")
    assert "use gvisor or native" in answer["hint"]

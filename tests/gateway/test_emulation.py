"""A sandbox that is emulated says so in every answer: to every client, of sessions and of runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from k8e.doors.grpc import sandbox_pb2 as pb
from sandbox_client import SandboxClient
from tests.gateway.house import House, collect, open_house
from tests.mcp.agents import pipes
from tests.sdk.conftest import TYPESCRIPT, built  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K8E_TEST_EMULATED", "1")
        with open_house() as house:
            yield house


def test_to_the_command_line_here_and_over_the_gateway(house: House) -> None:
    key = house.make_key("far")
    for far in ([], ["--endpoint", house.endpoint, "--apikey", key]):
        made = house.machine.k8e(*far, "sandbox", "create").json
        session = made["session_id"]
        run = house.machine.k8e(*far, "sandbox", "run", "true", "--session-id", session).json
        later = house.machine.k8e(*far, "sandbox", "run", "true", "--session-id", session, "--background").json
        polled = house.machine.k8e(*far, "sandbox", "poll", later["run_id"]).json
        shown = house.machine.k8e(*far, "sandbox", "get", session).json
        runs = house.machine.k8e(*far, "sandbox", "log", session).json["runs"]
        listed = house.machine.k8e(*far, "sandbox", "sessions").json["sessions"]
        answers = [made, run, later, polled, shown, *runs, *listed]
        assert len(runs) == 2
        assert [answer.get("emulated") for answer in answers] == [True] * len(answers), answers
        runtimes = house.machine.k8e(*far, "sandbox", "status").json["runtimes"]
        assert {each["runtime"]: each.get("emulated") for each in runtimes} == {"gvisor": None, "native": True}


def test_over_grpc(house: House) -> None:
    guest = house.tenant("emulated")
    session = guest.create()
    assert guest.call("GetSession", pb.GetSessionRequest(session_id=session)).session.emulated
    assert guest.run(session, "true").emulated
    *_, result = collect(guest.begin("ExecStream", pb.ExecRequest(session_id=session, command="true")))
    assert result.emulated
    assert [each.emulated for each in guest.call("Status", pb.StatusRequest()).runtimes] == [False, True]


def test_to_mcp(house: House) -> None:
    with pipes(house.machine) as agent:
        agent.start()
        for tool, given in (("sandbox_run", {"code": "true"}), ("sandbox_create_session", {})):
            assert agent.read_answer(agent.begin_call(tool, **given))["emulated"] is True


def test_to_the_python_sdk(house: House) -> None:
    with SandboxClient(house.endpoint, api_key=house.make_key("python")) as client:
        session = client.create_session(runtime_class="native")
        assert client.exec(session, "true").emulated
        assert client.get_session(session).emulated


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")
@pytest.mark.usefixtures("built")
def test_to_the_typescript_sdk(house: House) -> None:
    program = """
        const { SandboxClient } = require("./dist/cjs/index.js");
        (async () => {
            const client = new SandboxClient({ endpoint: process.argv[1], apiKey: process.argv[2] });
            const session = await client.createSession({ runtimeClass: "native" });
            const run = await client.exec(session, "true");
            console.log(run.emulated, (await client.getSession(session)).emulated);
            client.close();
        })();
    """
    words = ["node", "-e", program, house.endpoint, house.make_key("typescript")]
    done = subprocess.run(words, cwd=TYPESCRIPT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("true true\n", "")

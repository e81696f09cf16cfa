"""Who asks does not answer, with the settings that a machine has by itself: every way in which an agent's shell could
be another user, and the ways that people have. Agent and person are both root, where nothing else is said.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from k8e.doors.grpc import sandbox_pb2 as pb
from tests.agentkernel.house import AGENTKERNEL
from tests.cli.machine import K8E, ROOT, Machine, wait_until
from tests.cli.terminal import open_terminal
from tests.gateway.house import House, open_house

ACTION = "delete /workspace/production-data"
NOBODY = 65534


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with open_house() as house:
        yield house


@pytest.fixture
def machine(house: House, tmp_path: Path) -> Machine:
    return Machine(house.machine.folder, tmp_path)


@pytest.fixture
def approval(machine: Machine) -> Iterator[str]:
    """Asked by root, from a shell of its own, as an agent's."""
    session = machine.k8e("sandbox", "create").json["session_id"]
    yield str(json.loads(machine.k8e("sandbox", "confirm", session, ACTION, "--no-wait").stdout)["approval_id"])
    machine.k8e("sandbox", "destroy", session)


def look(machine: Machine, approval: str) -> Any:
    return machine.k8e("sandbox", "approvals", approval).json


# What an agent's shell runs so that nothing connects it with the process that answers: two forks with a new session in
# between, the parents gone, a new terminal as controlling terminal, "yes" typed into it.
STRANGER = """
import os, pty, sys, time
if os.fork():
    os._exit(0)
os.setsid()
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
child, keyboard = pty.fork()
if not child:
    with open(sys.argv[1] + ".part", "wb", 0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.execvp(sys.argv[2], sys.argv[2:])
screen = b""
try:
    while piece := os.read(keyboard, 4096):
        screen += piece
        if b"Type yes" in screen:
            os.write(keyboard, b"yes\\n")
            screen = b""
except OSError:
    pass
os.waitpid(child, 0)
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


def act_as_stranger(machine: Machine, *command: str) -> dict[str, Any]:
    """The output that it got."""
    place = machine.home / "said"
    script = machine.home / "stranger.py"
    script.write_text(STRANGER)
    words = [sys.executable, str(script), str(place), *command]
    subprocess.run(words, env=machine.env, timeout=60, check=True, stdin=subprocess.DEVNULL)
    wait_until(place.exists)
    text = place.read_bytes()
    return dict(json.loads(text[text.index(b"{") :]))


class TestAnAgentsShell:
    def test_that_leaves_its_parents_and_makes_itself_a_terminal(self, machine: Machine, approval: str) -> None:
        """The attack that was seen to work."""
        for flags in ([], ["--reject"], ["--reason", "a person says so"]):
            said = act_as_stranger(machine, str(K8E), "sandbox", "approve", approval, *flags)
            assert said["code"] == "same_user"
            assert "--key" in said["hint"]
        assert look(machine, approval)["status"] == "pending"

    @pytest.mark.parametrize(
        "command",
        [
            "k8e sandbox approve ID --reject",
            "setsid --wait k8e sandbox approve ID --reject",
            "(setsid k8e sandbox approve ID --reject &); sleep 1",
            "while echo yes; do sleep 0.1; done | script -qec 'k8e sandbox approve ID' /dev/null",
            "setsid --wait script -qec 'k8e sandbox approve ID --reject' /dev/null",
        ],
    )
    def test_in_other_processes_and_sessions(self, machine: Machine, approval: str, command: str) -> None:
        done = machine.shell(command.replace("ID", approval))
        assert b'"same_user"' in done.stdout or b"[same_user]" in done.stdout, done  # `script` is a terminal
        assert look(machine, approval)["status"] == "pending"

    def test_is_told_before_anything_is_typed(self, machine: Machine, approval: str) -> None:
        with open_terminal(machine, K8E, "sandbox", "approve", approval) as person:
            done = person.finish()
        assert (done.code, done.json["code"], b"Type yes" in person.screen) == (1, "same_user", False)

    def test_that_asks_in_one_life_and_answers_in_another(self, machine: Machine) -> None:
        session = machine.k8e("sandbox", "create").json["session_id"]
        asked = act_as_stranger(machine, str(K8E), "sandbox", "confirm", session, ACTION, "--no-wait")
        (machine.home / "said").unlink()
        said = act_as_stranger(machine, str(K8E), "sandbox", "approve", asked["approval_id"])
        assert said["code"] == "same_user"
        machine.k8e("sandbox", "destroy", session)

    def test_that_speaks_to_the_socket(self, machine: Machine, approval: str) -> None:
        body = json.dumps({"approved": True})
        socket = f"{machine.folder}/r/k8e.sock"
        curl = ["curl", "-s", "--unix-socket", socket, f"http://localhost/v1/approvals/{approval}", "--json", body]
        assert act_as_stranger(machine, *curl)["code"] == "same_user"
        assert json.loads(machine.shell(shlex.join(curl)).stdout)["code"] == "same_user"
        assert look(machine, approval)["status"] == "pending"

    def test_that_speaks_to_the_gateway(self, house: House, machine: Machine, approval: str) -> None:
        """With the certificate that a user of the machine gets without a key."""
        request = pb.ApproveActionRequest(approval_id=approval, approved=True)
        code, detail = house.root().refused("ApproveAction", request)
        assert (code, detail and detail.code) == (grpc.StatusCode.PERMISSION_DENIED, "same_user")
        there = {"K8E_SANDBOX_ENDPOINT": house.endpoint}
        said = machine.k8e("sandbox", "approve", approval, env=there)
        assert (said.code, said.json["code"]) == (1, "same_user")

    def test_that_uses_the_library(self, machine: Machine, approval: str) -> None:
        machine.overrides["PYTHONPATH"] = str(ROOT / "sdk" / "python")
        script = machine.home / "library.py"
        script.write_text(
            "import sys, json\nfrom sandbox_client import SandboxClient, SandboxError\n"
            "try:\n    with SandboxClient() as client:\n        client.approve_action(sys.argv[1])\n"
            "except SandboxError as error:\n    print(json.dumps({'code': error.code}))\n"
        )
        assert act_as_stranger(machine, sys.executable, str(script), approval)["code"] == "same_user"
        assert look(machine, approval)["status"] == "pending"

    def test_that_clicks_in_a_dialogue_of_its_own(self, machine: Machine, approval: str) -> None:
        """MCP in its newest form, in which the answer comes with the call."""
        call = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {
                "name": "sandbox_confirm_action",
                "arguments": {"approval_id": approval, "timeout": 0},
                "inputResponses": {"approve": {"action": "accept", "content": {"approve": True}}},
                "requestState": approval,
            },
        }
        for program in ([str(K8E), "sandbox-mcp"], [str(AGENTKERNEL), "mcp", "server"]):
            subprocess.run(
                program, input=json.dumps(call).encode() + b"\n", env=machine.env, capture_output=True, timeout=60
            )
        assert look(machine, approval)["status"] == "pending"

    def test_of_a_user_who_is_not_root(self, machine: Machine) -> None:
        """Root answers for a user; no other user does, and not the same user in another session."""
        socket = f"{machine.folder}/r/k8e.sock"
        before = os.stat(socket).st_mode
        os.chmod(socket, 0o666)  # as if the user were in the group
        os.chmod(machine.home, 0o777)
        try:
            as_user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
            curl = [*as_user, "curl", "-s", "--unix-socket", socket, "--json"]
            sessions = "http://localhost/v1/sessions"
            session = json.loads(machine.shell(shlex.join([*curl, "{}", sessions])).stdout)["session_id"]
            asking = [*curl, json.dumps({"action": ACTION}), f"{sessions}/{session}/approvals"]
            with open_terminal(machine, *asking) as agent:
                asked = json.loads(agent.finish().stdout)
            assert asked["asked_by"] == f"uid:{NOBODY}"
            place = f"http://localhost/v1/approvals/{asked['approval_id']}"
            said = act_as_stranger(machine, *curl, json.dumps({"approved": True}), place)
            assert said["code"] == "same_user"
            assert "sudo k8e sandbox approve" in said["hint"]
            with open_terminal(machine, K8E, "sandbox", "approve", asked["approval_id"]) as root:
                done = root.finish()
            assert (done.code, json.loads(done.stdout)["answered_by"]) == (0, "uid:0")
            machine.k8e("sandbox", "destroy", session, "--owner", str(NOBODY))
        finally:
            os.chmod(socket, before)


class TestPeople:
    @contextlib.contextmanager
    def asking(self, machine: Machine, session: str) -> Iterator[tuple[Any, str]]:
        with open_terminal(machine, K8E, "sandbox", "confirm", session, ACTION, "--timeout", "300") as agent:
            text = agent.wait_for_stderr(b"--reject\n").decode()
            command = next(line.strip() for line in text.splitlines() if "sandbox approve" in line)
            yield agent, command

    def test_who_are_root_answer_with_the_key_they_keep(self, house: House, machine: Machine) -> None:
        key = house.make_key("person", scope="admin")
        session = machine.k8e("sandbox", "create").json["session_id"]
        with self.asking(machine, session) as (agent, command):
            with open_terminal(machine, "bash", "-c", command) as person:
                person.type(f"{key}\n", after=b"API key: ")
                person.type("yes\n", after=b"Type yes")
                done = person.finish()
            assert (done.code, done.json["ok"], done.json["answered_by"]) == (0, True, "key:person")
            assert ACTION.encode() in person.screen
            assert key.encode() not in person.screen
            told = agent.finish()
        assert (told.code, json.loads(told.stdout)["approved"]) == (0, True)
        machine.k8e("sandbox", "destroy", session)
        left = [file for file in machine.home.rglob("*") if file.is_file() and b"PRIVATE KEY" in file.read_bytes()]
        assert left == [], "what lies in the user's files is the agent's to use"

    def test_whose_key_is_of_another_kind_are_told(self, house: House, machine: Machine) -> None:
        session = machine.k8e("sandbox", "create").json["session_id"]
        for key in (house.make_key("mere", tenant_ids=["acme"]), "k8e_nonsense"):
            with self.asking(machine, session) as (agent, command):
                with open_terminal(machine, "bash", "-c", f"{command} --reject") as person:
                    person.type(f"{key}\n", after=b"API key: ")
                    done = person.finish()
                assert (done.code, "code" in done.json) == (1, True)
                assert agent.process.poll() is None
        machine.k8e("sandbox", "destroy", session)

    def test_need_a_terminal_to_type_a_key(self, machine: Machine, approval: str) -> None:
        done = machine.shell(f"setsid --wait k8e sandbox approve --key {approval}")
        assert (done.code, done.json["code"]) == (1, "terminal_needed")

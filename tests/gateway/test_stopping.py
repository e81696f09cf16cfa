"""A daemon that is stopped, or killed, while commands run: every client is told, and so is the record."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox_client import OutcomeUnknown, RunLost, SandboxClient, Unavailable
from tests.cli.machine import Machine, run_launcher, wait_until
from tests.gateway.house import House, make_machine
from tests.gateway.test_silence import Remote, clear_up, remote  # noqa: F401 - a fixture

STOPPED = "the daemon was stopped, and ends foreground runs with itself"


@pytest.fixture
def machine() -> Iterator[Machine]:
    with make_machine() as machine:
        try:
            yield machine
        finally:
            clear_up(machine)


def test_a_stop_is_told_as_what_ended_the_command(machine: Machine, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool, run_launcher(machine):
            house = House(machine)
            session = machine.run("true").json["session_id"]
            words = ("sandbox", "run", "--timeout", "1000", "--session-id", session)
            whole = stack.enter_context(machine.start(*words, "echo out; touch whole; sleep 1000"))
            raw = stack.enter_context(machine.start(*words, "echo out; touch raw; sleep 1000", "--raw"))
            far = Machine(tmp_path, tmp_path)
            key = house.make_key("far", scope="admin")
            far.overrides.update(K8E_SANDBOX_ENDPOINT=house.endpoint, K8E_SANDBOX_APIKEY=key)
            remote_raw = stack.enter_context(far.start(*words, "touch far; sleep 1000", "--raw"))
            client = SandboxClient(house.endpoint, api_key=key)
            running = pool.submit(client.exec, session, "echo out; touch library; sleep 1000", 1000)
            own = pool.submit(client.exec, session, "kill -TERM $$")
            assert (own.result().status, own.result().exit_code, own.result().reason) == ("killed", 143, "")
            started = {"whole", "raw", "far", "library"}
            wait_until(lambda: started <= set(machine.run("ls", "--session-id", session).json["stdout"].split()))
        said, _ = whole.communicate(timeout=60)
        answer = json.loads(said)
        assert (whole.returncode, answer["status"], answer["exit_code"]) == (143, "killed", 143)
        assert (answer["reason"], answer["stdout"]) == (STOPPED, "out\n")
        said, told = raw.communicate(timeout=60)
        assert (raw.returncode, said, told) == (143, b"out\n", f"k8e: {STOPPED}\n".encode())
        _, told = remote_raw.communicate(timeout=60)
        assert (remote_raw.returncode, told) == (143, f"k8e: {STOPPED}\n".encode())
        result = running.result()
        assert (result.status, result.exit_code, result.reason, result.stdout) == ("killed", 143, STOPPED, "out\n")
        client.close()
    with run_launcher(machine):
        runs = machine.k8e("sandbox", "log", session).json["runs"]
        reasons = sorted(run.get("reason", "") for run in runs if run["exit_code"] == 143)
        assert reasons == ["", *[STOPPED] * 4]


def test_what_a_killed_daemon_ran_has_that_reason_on_record(machine: Machine) -> None:
    """The next daemon ends it; the id that the caller was told leads to it."""
    with run_launcher(machine) as daemon:
        house = House(machine)
        session = machine.run("true").json["session_id"]
        with SandboxClient(house.endpoint, api_key=house.make_key("far", scope="admin")) as client:
            stream = client.exec_stream(session, "echo ready; sleep 1000", 1000)
            chunks = iter(stream)
            assert next(chunks) == "ready\n"
            daemon.kill()
            daemon.wait()
            daemon.returncode = 0  # as expected
            with pytest.raises(RunLost) as lost:
                list(chunks)
    with run_launcher(machine):
        run = machine.k8e("sandbox", "poll", lost.value.run_id).json
        assert (run["run_id"], run["status"] in ("killed", "lost")) == (stream.run_id, True)
        assert run["reason"].startswith("the daemon that ran it ended without stopping")


def find_code(client: SandboxClient) -> str:
    with pytest.raises(Unavailable) as caught:
        client.status()
    return caught.value.code


def test_the_library_says_what_may_have_been_done(remote: Remote) -> None:  # noqa: F811
    """A change whose answer is lost, a run with its id, and a question that is lost without harm."""
    with SandboxClient(remote.house.endpoint, "acme", api_key=remote.key) as client, ThreadPoolExecutor(2) as pool:
        stream = client.exec_stream(remote.session, "echo ready; sleep 1000", 1000)
        chunks = iter(stream)
        assert next(chunks) == "ready\n"
        assert stream.run_id
        change = pool.submit(client.confirm_action, remote.session, "delete the data", 60)
        wait_until(lambda: bool(client.list_approvals()))
        (approval,) = client.list_approvals()
        question = pool.submit(client.await_approval, approval.approval_id, 60)
        remote.kill()
        with pytest.raises(OutcomeUnknown) as unknown:
            change.result()
        assert (unknown.value.code, isinstance(unknown.value, RunLost)) == ("connection_lost", False)
        with pytest.raises(RunLost) as lost:
            list(chunks)
        assert (lost.value.code, lost.value.run_id) == ("run_lost", stream.run_id)
        with pytest.raises(Unavailable):
            question.result()
        wait_until(lambda: find_code(client) == "unreachable")  # by a question, which may be lost
        with pytest.raises(Unavailable) as unreachable:
            client.write_file(remote.session, "x", "x")
        assert unreachable.value.code == "unreachable"
        assert all("k8e sandbox" not in error.value.hint for error in (unknown, lost, unreachable))


def test_a_command_over_a_gateway_ends_without_pythons_own_end(remote: Remote, tmp_path: Path) -> None:  # noqa: F811
    """In which gRPC's threads can hang it. What it printed is whole."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\natexit.register(lambda: open(os.environ['WITNESS'], 'w').close())\n"
    )
    for machine, expected in ((remote.machine, True), (remote.far, False)):
        witness = tmp_path / f"witness-{expected}"
        env = {"PYTHONPATH": str(tmp_path), "WITNESS": str(witness)}
        done = machine.k8e("sandbox", "sessions", env=env)
        assert done.json["sessions"]
        assert (done.code, witness.exists()) == (0, expected)

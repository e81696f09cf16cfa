"""Lists of hosts of sessions, as a person types them: the real daemon on a machine whose only way out leads to a small
internet of the tests' own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k8e.engine.local.layout import Layout
from k8e.engine.local.runtime.cgroup import Cgroups
from tests.cli.machine import DEADLINE, ROOT, Machine, make_folder, wait_until
from tests.egress.internet import NAME_SERVER, Internet, small_internet
from tests.egress.namespaces import private_machine
from tests.engine.answers import plant_answers
from tests.runtimes import do_without
from tests.sandboxes import needs_root

pytestmark = needs_root

ZONE = {
    "allowed.com": {"A": ["45.90.31.1"], "AAAA": ["2a0b:4340:9::1"]},
    "other.com": {"A": ["45.90.31.2"]},
    "inside.com": {"A": ["10.9.8.7"]},
    "code.com": {"A": ["45.90.31.3"]},
}
GET = """
import json, urllib.request
try:
    answer = urllib.request.urlopen("http://{}/", timeout=20)
    print(json.load(answer)["address"])
except OSError as error:
    print("failed")
"""


class Daemon:
    """As the command line starts it, killed and started again at will."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ours, theirs = os.pipe()
        with (self.machine.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "k8e.daemon", "--ready-fd", str(theirs)],
                cwd=ROOT, env=self.machine.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs,),
            )  # fmt: skip
        os.close(theirs)
        with os.fdopen(ours, "rb") as ready:
            assert ready.read() == b"ready\n", self.read_log()

    def end(self, number: int = signal.SIGTERM) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        assert self._process.wait(DEADLINE) in (0, -number), self.read_log()

    def read_log(self) -> str:
        return (self.machine.folder / "log").read_text()


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with private_machine(), small_internet() as internet:
        internet.publish(ZONE)
        yield internet


@pytest.fixture(scope="module")
def daemon(internet: Internet) -> Iterator[Daemon]:
    with make_folder() as folder:
        config = folder / "k8e.toml"
        config.write_text(f'[egress]\nnameservers = ["{NAME_SERVER}"]\n[pool]\nenabled = false\n')
        plant_answers(folder / "s", folder)
        machine = Machine(folder, folder, {"K8E_CONFIG": str(config)})
        daemon = Daemon(machine)
        daemon.start()
        try:
            yield daemon
        finally:
            with contextlib.suppress(AssertionError):
                for session in machine.live_sessions():
                    machine.k8e("sandbox", "destroy", session)
            daemon.end()
            Cgroups(Layout(folder / "s", folder / "r").cgroup).remove_all()
        assert "Traceback" not in daemon.read_log(), daemon.read_log()


@pytest.fixture
def machine(daemon: Daemon, tmp_path: Path) -> Machine:
    return Machine(daemon.machine.folder, tmp_path)


@pytest.fixture
def session(machine: Machine) -> Iterator[str]:
    yield from make_session(machine)


def make_session(machine: Machine, *words: str) -> Iterator[str]:
    done = machine.k8e("sandbox", "create", "--runtime", "native", "--allowed-hosts", "allowed.com", *words)
    assert done.code == 0, done.stdout
    yield str(done.json["session_id"])
    machine.k8e("sandbox", "destroy", done.json["session_id"])


def get(machine: Machine, session: str, host: str) -> tuple[str, list[dict[str, Any]]]:
    """Which address answered, and what was denied meanwhile."""
    result = machine.run(GET.format(host), "--lang", "python", "--session-id", session).json
    assert result["exit_code"] == 0, result
    return result["stdout"].strip(), result["denied"]


def test_what_is_listed_works_and_what_is_not_says_what_to_ask_for(machine: Machine, session: str) -> None:
    address, denied = get(machine, session, "allowed.com")
    assert (address in ("45.90.31.1", "2a0b:4340:9::1"), denied) == (True, [])
    address, denied = get(machine, session, "other.com")
    assert (address, [(each["host"], each["reason"]) for each in denied]) == (
        "failed",
        [("other.com", "name_not_listed")],
    )
    assert get(machine, session, "allowed.com")[1] == []
    command = denied[0]["hint"].partition(": ")[2]
    done = machine.shell(command)
    assert done.json["policy"]["allowed_hosts"] == ["allowed.com", "other.com"], command
    assert get(machine, session, "other.com") == ("45.90.31.2", [])


def test_an_address_and_a_port_are_asked_for_by_what_they_are(machine: Machine, session: str) -> None:
    for target in ("45.90.31.9", "allowed.com:8080"):
        address, denied = get(machine, session, target)
        assert address == "failed", target
        assert denied[0]["hint"].endswith(f"--add {target}"), denied
        for refused in denied:  # one for each family
            assert machine.shell(refused["hint"].partition(": ")[2]).code == 0
        assert get(machine, session, target)[0] != "failed"


def test_what_no_list_opens_is_said_so(machine: Machine, session: str) -> None:
    for target, reason in (("169.254.169.254", "metadata"), ("45.90.28.2", "machine")):
        address, denied = get(machine, session, target)
        assert (address, [each["reason"] for each in denied]) == ("failed", [reason])
        assert "No list opens" in denied[0]["hint"]
    done = machine.k8e("sandbox", "allow-hosts", session, "--add", "169.254.169.254")
    assert (done.code, done.json["code"], done.json["field"]) == (1, "invalid_argument", "add")


def test_an_empty_list_is_no_network(machine: Machine) -> None:
    for session in make_session(machine, "--allowed-hosts", ""):
        machine.k8e("sandbox", "allow-hosts", session, "--clear")
        for target in ("allowed.com", "45.90.31.1"):
            address, denied = get(machine, session, target)
            assert (address, len(denied)) == ("failed", 1)


def test_raw_output_ends_with_what_was_denied(machine: Machine, session: str) -> None:
    done = machine.run(GET.format("other.com"), "--lang", "python", "--session-id", session, "--raw")
    assert (done.code, done.stdout) == (0, b"failed\n")
    ask = f"Ask for it: k8e sandbox allow-hosts {session} --add other.com"
    assert done.stderr.decode() == f"k8e: denied other.com: name_not_listed; {ask}\n"


def test_a_connection_is_cut_when_its_host_is_taken_off(machine: Machine, session: str) -> None:
    code = """
import urllib.request
answer = urllib.request.urlopen("http://allowed.com/ticks", timeout=20)
print(answer.readline().decode().strip(), flush=True)
try:
    while answer.readline():
        pass
    print("ended")
except OSError as error:
    print("cut")
"""
    with machine.start("sandbox", "run", code, "--lang", "python", "--session-id", session, "--raw") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"tick\n"
        assert machine.k8e("sandbox", "allow-hosts", session, "--add", "other.com").code == 0
        assert get(machine, session, "other.com")[0] == "45.90.31.2"
        assert process.poll() is None, "a change that leaves it on the list does not touch it"
        assert machine.k8e("sandbox", "allow-hosts", session, "--remove", "allowed.com").code == 0
        assert process.stdout.read() in (b"cut\n", b"ended\n")
        assert process.wait(DEADLINE) == 0
    assert get(machine, session, "allowed.com")[0] == "failed"


def test_the_list_survives_the_daemon(machine: Machine, daemon: Daemon, session: str) -> None:
    machine.k8e("sandbox", "allow-hosts", session, "--add", "other.com", "--remove", "allowed.com")
    code = "until test -e go; do sleep 0.01; done" + GET.format("code.com").join(("\npython3 - <<'end'\n", "end\n"))
    run_id = machine.run(code, "--session-id", session, "--background", "--timeout", "60").json["run_id"]
    daemon.end(signal.SIGKILL)
    daemon.start()
    shown = machine.k8e("sandbox", "allow-hosts", session).json
    assert shown["policy"]["allowed_hosts"] == ["other.com"]
    assert get(machine, session, "other.com")[0] == "45.90.31.2"
    assert get(machine, session, "allowed.com")[0] == "failed"
    machine.run("touch go", "--session-id", session)
    wait_until(lambda: machine.k8e("sandbox", "poll", run_id).json["status"] == "completed")
    ended = machine.k8e("sandbox", "poll", run_id).json
    assert ended["stdout"] == "failed\n"
    assert "code.com" in [each["host"] for each in ended["denied"]]


def test_a_repository_of_a_host_that_is_not_listed_is_not_cloned(machine: Machine, internet: Internet) -> None:
    before = machine.live_sessions()
    internet.clear()
    words = ["--allowed-hosts", "allowed.com", "--git-repo", "https://code.com/app.git", "--runtime", "native"]
    done = machine.k8e("sandbox", "create", *words)
    assert (done.code, done.json["code"], done.json["field"]) == (1, "manifest_failed", "manifest[0]")
    assert [(each["host"], each["reason"]) for each in done.json["denied"]] == [("code.com", "name_not_listed")]
    assert "code.com (name_not_listed)" in done.json["detail"]
    assert "--allowed-hosts code.com" in done.json["hint"]
    assert machine.live_sessions() == before
    assert "code.com" not in internet.notes().names, "no server outside was asked"


def test_the_audit_log_has_all_of_it(machine: Machine, session: str) -> None:
    get(machine, session, "other.com")
    machine.k8e("sandbox", "allow-hosts", session, "--add", "other.com")

    def read(event: str) -> list[dict[str, Any]]:
        files = [machine.folder / "s" / name for name in ("audit.log", "audit-refusals.log")]
        lines = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
        return [line for line in lines if line["event"] == event and line["session"] == session]

    wait_until(lambda: bool(read("hosts_changed") and read("refused")))
    # On a busy machine the resolver asks again, which is refused and logged again.
    (created,), (refused, *_), (changing,) = read("session_created"), read("refused"), read("hosts_changing")
    assert (created["allowed_hosts"], created["caller"]) == (["allowed.com"], "uid:0")
    assert (refused["host"], refused["reason"]) == ("other.com", "name_not_listed")
    assert (changing["before"], changing["after"]) == (["allowed.com"], ["allowed.com", "other.com"])


def test_gvisor_is_told_the_same(machine: Machine) -> None:
    created = machine.k8e("sandbox", "create", "--runtime", "gvisor", "--allowed-hosts", "allowed.com")
    if created.code != 0 and created.json["code"] == "runtime_unavailable":
        do_without("gvisor", created.json["detail"])
    session = created.json["session_id"]
    assert get(machine, session, "allowed.com")[0] != "failed"
    address, denied = get(machine, session, "other.com")
    assert (address, [each["host"] for each in denied]) == ("failed", ["other.com"])
    address, denied = get(machine, session, "45.90.31.9")
    assert (address, [each["reason"] for each in denied]) == ("failed", ["address_not_listed"])
    machine.k8e("sandbox", "destroy", session)

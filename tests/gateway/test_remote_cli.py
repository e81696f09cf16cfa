"""The command line over a gateway: the same commands, answers and exit codes as on the machine itself."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8e.cli.remote.connection import read_key
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.identity.authority import make_request
from tests.cli.machine import K8E, Done, Machine, wait_until
from tests.gateway.house import House

LARGE = os.urandom(999_999)
SID = "fix-SIDE"
# One after the other, in a session of that name.
STEPS: list[tuple[str, list[str | bytes], bytes]] = [
    (
        "create",
        ["sandbox", "create", "--session-id", SID, "--memory", "64m", "--env", "A=1", "--ttl", "9m"],
        b"",
    ),
    ("create again", ["sandbox", "create", "--session-id", SID], b""),
    ("create nonsense", ["sandbox", "create", "--session-id", "../x"], b""),
    ("get", ["sandbox", "get", SID], b""),
    ("get none", ["sandbox", "get", "none"], b""),
    ("sessions", ["sandbox", "sessions"], b""),
    ("run", ["sandbox", "run", "echo $A; echo err >&2; exit 7", "--session-id", SID], b""),
    ("run bytes", ["sandbox", "run", b"printf '\\xff\\xfe'; printf \xff", "--session-id", SID], b""),
    (
        "run env",
        ["sandbox", "run", "printf $B", "--env", b"B=\xfc", "--session-id", SID, "--workdir", "/tmp"],
        b"",
    ),
    ("run stdin", ["sandbox", "run", "cat", "--stdin", "--session-id", SID], b"\0in\xff"),
    ("run late", ["sandbox", "run", "echo a; sleep 60", "--timeout", "0.3", "--session-id", SID], b""),
    ("run killed", ["sandbox", "run", "kill -9 $$", "--session-id", SID], b""),
    ("run raw", ["sandbox", "run", "echo out; echo err >&2; exit 3", "--raw", "--session-id", SID], b""),
    (
        "run raw stdin",
        ["sandbox", "run", "cat; exit 4", "--raw", "--stdin", "--session-id", SID],
        LARGE,
    ),
    (
        "run raw late",
        ["sandbox", "run", "echo a; sleep 60", "--raw", "--timeout", "0.3", "--session-id", SID],
        b"",
    ),
    ("run raw nowhere", ["sandbox", "run", "true", "--raw", "--session-id", "none"], b""),
    ("run nowhere", ["sandbox", "run", "true", "--session-id", "none"], b""),
    ("run badly", ["sandbox", "run", "true", "--workdir", "/none", "--session-id", SID], b""),
    ("write", ["sandbox", "write", SID, b"d/\xff.bin"], b"\0\xff"),
    ("read", ["sandbox", "read", SID, b"d/\xff.bin"], b""),
    ("read raw", ["sandbox", "read", SID, b"d/\xff.bin", "--raw"], b""),
    ("read none", ["sandbox", "read", SID, "none"], b""),
    ("read none raw", ["sandbox", "read", SID, "none", "--raw"], b""),
    ("write more", ["sandbox", "write", SID, "/tmp/more", "--mode", "a"], LARGE * 5),
    ("write yet more", ["sandbox", "write", SID, "/tmp/more", "--mode", "a"], b"and the end"),
    ("read more", ["sandbox", "read", SID, "/tmp/more", "--raw"], b""),
    ("read a part", ["sandbox", "read", SID, "/tmp/more", "--range", "4999995-4999997"], b""),
    ("read the rest", ["sandbox", "read", SID, "/tmp/more", "--raw", "--range", "4999999-"], b""),
    ("read beyond", ["sandbox", "read", SID, "/tmp/more", "--raw", "--range", "6000000-"], b""),
    ("write to what may be read only", ["sandbox", "write", SID, "/etc/passwd"], LARGE * 5),
    ("run long", ["sandbox", "run", "--lang", "python", "--session-id", SID], b"print(__name__) #" + b"x" * 1_000_000),
    ("run too long", ["sandbox", "run", "--session-id", SID], b"#" * (17 << 20)),
    ("run as root", ["sandbox", "run", "id -u", "--user", "root", "--session-id", SID], b""),
    ("run as nobody", ["sandbox", "run", "id -u", "--user", "no_such_user", "--session-id", SID], b""),
    ("run in a pipe", ["sandbox", "run", "-i", "tr a b", "--session-id", SID], b"banana"),
    ("list", ["sandbox", "list", SID], b""),
    ("mkdir", ["sandbox", "mkdir", SID, b"made/\xff/deep"], b""),
    ("mkdir again", ["sandbox", "mkdir", SID, b"made/\xff/deep"], b""),
    ("rm what is not empty", ["sandbox", "rm", SID, "made"], b""),
    ("rm", ["sandbox", "rm", SID, "made", "--recursive"], b""),
    ("rm again", ["sandbox", "rm", SID, "made", "-r"], b""),
    ("prepare a copy", ["sandbox", "run", "mkdir -p t/e; printf 123 > t/a; ln -s a t/l", "--session-id", SID], b""),
    ("mkdir through a file", ["sandbox", "mkdir", SID, "t/a/x"], b""),
    ("cp out, with a link", ["sandbox", "cp", f"{SID}:t", "copy"], b""),
    ("rm the link", ["sandbox", "rm", SID, "t/l"], b""),
    ("cp out", ["sandbox", "cp", f"{SID}:t", "copy"], b""),
    ("cp a file out", ["sandbox", "cp", b"fix-SIDE:d/\xff.bin", "."], b""),
    ("cp in", ["sandbox", "cp", "copy", f"{SID}:again"], b""),
    ("cp nothing in", ["sandbox", "cp", "none", f"{SID}:again"], b""),
    ("cp nothing out", ["sandbox", "cp", f"{SID}:none", "."], b""),
    ("cp nowhere", ["sandbox", "cp", "copy", "none:x"], b""),
    ("cp here", ["sandbox", "cp", "copy", "other"], b""),
    ("see the copies", ["sandbox", "run", "find again | sort; cat again/t/a", "--session-id", SID], b""),
    ("logs of none", ["sandbox", "logs", "run-0", "--follow"], b""),
    ("hosts", ["sandbox", "allow-hosts", SID, "--hosts", "a.example,b.example"], b""),
    ("hosts change", ["sandbox", "allow-hosts", SID, "--add", "c.example", "--remove", "a.example"], b""),
    ("hosts show", ["sandbox", "allow-hosts", SID], b""),
    (
        "subagent",
        [
            *("sandbox", "subagent", SID, "--session-id", "sub-SIDE", "--agent-type", "reviewer", "--cpus", "0.25"),
            *("--workspace-path", "part", "--allowed-hosts", "", "--env", b"B=\xfc", "--powerless", "--ttl", "1m"),
        ],
        b"",
    ),
    ("get subagent", ["sandbox", "get", "sub-SIDE"], b""),
    ("get parent", ["sandbox", "get", SID], b""),
    ("run in subagent", ["sandbox", "run", "pwd; printf $B", "--session-id", "sub-SIDE"], b""),
    ("subagent of a subagent", ["sandbox", "subagent", "sub-SIDE"], b""),
    ("subagent beyond", ["sandbox", "subagent", SID, "--allowed-hosts", "a.example,z.example"], b""),
    ("subagent of none", ["sandbox", "subagent", "none"], b""),
    ("background", ["sandbox", "run", "sleep 66", "--background", "--session-id", SID], b""),
    ("ps", ["sandbox", "ps", SID], b""),
    ("log", ["sandbox", "log", SID], b""),
    ("poll none", ["sandbox", "poll", "run-0"], b""),
    ("run in mine", ["sandbox", "run", "echo mine > here"], b""),
    ("run in mine again", ["sandbox", "run", "cat here"], b""),
    ("run in a tenant's", ["sandbox", "run", "ls", "--tenant", "web"], b""),
    ("status", ["sandbox", "status"], b""),
    ("key", ["sandbox-apikey", "create", "made-SIDE", "--ttl", "never"], b""),
    ("key delete", ["sandbox-apikey", "delete", "made-SIDE"], b""),
    ("key delete again", ["sandbox-apikey", "delete", "made-SIDE"], b""),
    ("usage", ["sandbox", "run", "--nonsense"], b""),
    (
        "create a lasting one",
        ["sandbox", "create", "--persistent", "--session-id", "last-SIDE", "--env", b"A=\xfc", "--secret", "TOKEN"],
        b"",
    ),
    ("run in it", ["sandbox", "run", "printf $A$TOKEN; echo kept > kept", "--session-id", "last-SIDE"], b""),
    ("start what runs", ["sandbox", "start", "last-SIDE"], b""),
    ("start what runs, with more", ["sandbox", "start", "last-SIDE", "--env", "C=1"], b""),
    ("background in it", ["sandbox", "run", "sleep 66", "--background", "--session-id", "last-SIDE"], b""),
    ("stop", ["sandbox", "stop", "last-SIDE"], b""),
    ("stop again", ["sandbox", "stop", "last-SIDE"], b""),
    ("log of what is stopped", ["sandbox", "log", "last-SIDE"], b""),
    ("run in what is stopped", ["sandbox", "run", "true", "--session-id", "last-SIDE"], b""),
    ("start without its secret", ["sandbox", "start", "last-SIDE"], b""),
    ("start with another's secret", ["sandbox", "start", "last-SIDE", "--secret", "NONE_OF_US_HAS_IT"], b""),
    ("start", ["sandbox", "start", "last-SIDE", "--secret", "TOKEN", "--env", "B=2"], b""),
    ("run again", ["sandbox", "run", "printf $A$B$TOKEN; cat kept", "--session-id", "last-SIDE"], b""),
    ("get the lasting one", ["sandbox", "get", "last-SIDE"], b""),
    ("stop one that does not last", ["sandbox", "stop", SID], b""),
    ("stop none", ["sandbox", "stop", "none"], b""),
    ("start none", ["sandbox", "start", "none"], b""),
    ("images", ["image", "list"], b""),
    ("destroy the lasting one", ["sandbox", "destroy", "last-SIDE"], b""),
    ("destroy", ["sandbox", "destroy", SID], b""),
    ("destroy again", ["sandbox", "destroy", SID], b""),
]
# Different at every run, or for every owner.
VOLATILE = ("duration_ms", "created", "last_used", "modified", "started", "pid", "owner", "sessions_count", "endpoint")
IDS = re.compile(r"\b(sess|run)-[0-9a-f]{16}\b|k8e_[\w-]{102}|\b[0-9a-f]{16}\b")


@pytest.fixture(scope="module")
def remote(house: House, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Another machine, as far as it goes: a home of its own, and the way to a daemon that is not there."""
    key = house.make_key("chief", scope="admin")
    machine = Machine(tmp_path_factory.mktemp("far"), tmp_path_factory.mktemp("remote"))
    machine.overrides.update(K8E_SANDBOX_ENDPOINT=house.endpoint, K8E_SANDBOX_APIKEY=key)
    return machine


@pytest.fixture(scope="module")
def answers(house: House, remote: Machine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Done]]:
    local = Machine(house.machine.folder, tmp_path_factory.mktemp("local"))
    for machine in (local, remote):
        machine.overrides["TOKEN"] = "secret"

    def work(machine: Machine, side: str) -> dict[str, Done]:
        done = {}
        for name, words, stdin in STEPS:
            named = [
                word.replace("SIDE", side) if isinstance(word, str) else word.replace(b"SIDE", side.encode())
                for word in words
            ]
            done[name] = machine.k8e(*named, stdin=stdin)
        return done

    with ThreadPoolExecutor(2) as pool:
        sides = [pool.submit(work, local, "here"), pool.submit(work, remote, "away")]
        return dict(zip(("local", "remote"), (side.result() for side in sides), strict=True))


def settle(value: Any) -> Any:
    """The parts of two answers that have to be the same."""
    if isinstance(value, dict):
        return {key: "*" if key in VOLATILE else settle(one) for key, one in value.items()}
    if isinstance(value, list):
        return [settle(one) for one in value]
    return IDS.sub("ID", value).replace("here", "SIDE").replace("away", "SIDE") if isinstance(value, str) else value


def digest(name: str, done: Done) -> tuple[int, Any, bytes]:
    try:
        content = settle(json.loads(done.stdout))
    except ValueError:
        content = done.stdout
    if name in ("sessions", "status", "status of a tenant") and isinstance(content, dict):
        # How many there are depends on who asks.
        content["sessions"] = "*"
        content.pop("caller", None)
    return done.code, content, done.stderr


@pytest.mark.parametrize("name", [name for name, _, _ in STEPS])
def test_is_the_same_here_and_there(answers: dict[str, dict[str, Done]], name: str) -> None:
    assert digest(name, answers["remote"][name]) == digest(name, answers["local"][name])


def test_what_was_compared_was_worth_it(answers: dict[str, dict[str, Done]]) -> None:
    codes = {name: done.code for name, done in answers["remote"].items()}
    assert (codes["run"], codes["run late"], codes["run killed"], codes["run raw"]) == (7, 124, 137, 3)
    assert (codes["get none"], codes["create"], codes["status"], codes["run raw stdin"]) == (1, 0, 0, 4)
    assert answers["remote"]["read raw"].stdout == b"\0\xff"
    assert answers["remote"]["read more"].stdout == LARGE * 5 + b"and the end"
    assert answers["remote"]["read the rest"].stdout == b"the end"
    assert answers["remote"]["run long"].json["stdout"] == "__main__\n"
    assert answers["remote"]["run as root"].json["stdout"] == "0\n"
    assert answers["remote"]["run in a pipe"].stdout == b"bbnbnb"
    assert (codes["stop"], codes["start"], codes["run in what is stopped"], codes["start without its secret"]) == (
        *(0, 0, 1, 1),
    )
    again = answers["remote"]["run again"].json
    assert base64.b64decode(again["stdout_base64"]) == b"\xfc2secretkept\n"
    assert answers["remote"]["get the lasting one"].json["secret_keys"] == ["TOKEN"]


def test_sessions_of_a_gateway_are_remembered_apart(house: House, remote: Machine) -> None:
    remote.run("echo there > where")
    mine = Machine(house.machine.folder, remote.home)
    mine.run("echo here > where")
    assert remote.run("cat where").json["stdout"] == "there\n"
    assert mine.run("cat where").json["stdout"] == "here\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("flags", [[], ["--raw"]])
def test_a_signal_ends_the_command_in_the_sandbox(
    house: House, remote: Machine, number: signal.Signals, flags: list[str]
) -> None:
    root = house.root()
    session = remote.run("true").json["session_id"]
    ask = pb.PsRequest(session_id=session)
    with remote.start("sandbox", "run", "sleep 67", *flags) as process:
        wait_until(lambda: bool(root.call("Ps", ask).processes))
        process.send_signal(number)
        assert process.wait(30) == -number
    wait_until(lambda: not root.call("Ps", ask).processes)


def test_a_reader_that_has_had_enough_ends_the_command(remote: Machine) -> None:
    done = remote.shell(f"{K8E} sandbox run 'yes' --raw --timeout 60 | head -n 1")
    assert (done.code, done.stdout) == (0, b"y\n")


def test_stdin_that_never_ends_does_not_keep_a_command_that_has(remote: Machine) -> None:
    with remote.start("sandbox", "run", "head -c 2", "--raw", "--stdin") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"abc")
        process.stdin.flush()
        assert process.stdout.read() == b"ab"
        assert process.wait(30) == 0


def read_renewed(home: Path) -> Any:
    (path,) = (home / ".k8e" / "sandbox" / "certificates").iterdir()
    return json.loads(path.read_text())


class TestProfiles:
    @pytest.fixture
    def laptop(self, house: House, tmp_path: Path) -> Iterator[tuple[Machine, str]]:
        """No daemon, and a key."""
        (tmp_path / "home").mkdir()
        key = house.make_key(f"laptop-{tmp_path.name}"[:63], tenant_ids=["laptop"])
        yield Machine(tmp_path, tmp_path / "home"), key
        house.delete_key(f"laptop-{tmp_path.name}"[:63])

    def test_are_made_once_and_used_from_then_on(self, house: House, laptop: tuple[Machine, str]) -> None:
        machine, key = laptop
        answer = machine.k8e("connect", f"https://{house.endpoint}/", "--name", "work", stdin=key.encode()).json
        assert (answer["profile"], answer["tenant_id"], answer["scope"]) == ("work", "laptop", "run")
        path = machine.home / ".k8e" / "sandbox" / "profiles.yaml"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert key not in path.read_text()
        assert machine.run("echo $((6*7))").json["stdout"] == "42\n"
        assert machine.k8e("--profile", "work", "sandbox", "status").json["available"]
        again = machine.k8e("login").json
        assert again["expires_at"] >= answer["expires_at"]
        done = machine.k8e("--profile", "none", "sandbox", "status")
        assert (done.code, done.json["code"]) == (1, "no_such_profile")

    def test_are_private(self, house: House, laptop: tuple[Machine, str]) -> None:
        machine, key = laptop
        machine.k8e("connect", house.endpoint, stdin=key.encode())
        path = machine.home / ".k8e" / "sandbox" / "profiles.yaml"
        path.chmod(0o644)
        done = machine.k8e("--profile", "default", "sandbox", "sessions")
        assert (done.code, done.json["code"]) == (1, "profile_unusable")

    def test_are_renewed_when_a_third_is_left(self, house: House, laptop: tuple[Machine, str]) -> None:
        machine, key = laptop
        machine.k8e("connect", house.endpoint, stdin=key.encode())
        path = machine.home / ".k8e" / "sandbox" / "profiles.yaml"
        content = yaml.safe_load(path.read_text())
        profile = content["profiles"]["default"]
        before, now = profile["certificate"], time.time()
        profile.update(issued_at=now - 100, expires_at=now + 40)
        path.write_text(yaml.safe_dump(content))
        assert machine.k8e("--profile", "default", "sandbox", "sessions").code == 0
        kept = yaml.safe_load(path.read_text())["profiles"]["default"]
        assert kept == profile
        after = read_renewed(machine.home)
        assert after["certificate"] != before
        assert after["expires_at"] > now + 86_400
        # A login goes on from there, and is what `k8e connect` would have written.
        assert machine.k8e("login").code == 0
        assert yaml.safe_load(path.read_text())["profiles"]["default"]["expires_at"] > now + 86_400

    @pytest.mark.parametrize("nearby", [True, False])
    def test_of_local_users_are_renewed_at_the_socket(self, house: House, tmp_path: Path, nearby: bool) -> None:
        """And nowhere else: who has lost the socket is told what to do."""
        key, request = make_request()
        _, login = house.ask("POST", "/v1/login", {"csr": request})
        now = time.time()
        times = {"issued_at": now - 100, "expires_at": now + 40 if nearby else now - 1}
        profile = {"endpoint": house.endpoint, "key": key.decode(), "certificate": login["certificate"], **times}
        profile["ca_certificate"] = login["ca_certificate"]
        path = tmp_path / ".k8e" / "sandbox" / "profiles.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump({"current": "here", "profiles": {"here": profile}}))
        path.chmod(0o600)
        folder = house.machine.folder if nearby else tmp_path
        machine = Machine(folder, tmp_path)
        done = machine.k8e("--profile", "here", "sandbox", "sessions")
        if nearby:
            after = read_renewed(tmp_path)
            assert (done.code, after["certificate"] == login["certificate"]) == (0, False)
            assert now + 86_000 < after["expires_at"] <= time.time() + 86_400
        else:
            assert (done.code, done.json["code"]) == (1, "renewed_at_socket")
            assert "unix socket" in done.json["hint"]

    def test_a_key_from_the_environment_is_exchanged_once(self, house: House, laptop: tuple[Machine, str]) -> None:
        machine, key = laptop
        env = {"K8E_SANDBOX_ENDPOINT": house.endpoint, "K8E_SANDBOX_APIKEY": key}
        for _ in range(2):
            assert machine.k8e("sandbox", "sessions", env=env).code == 0
        (path,) = (machine.home / ".k8e" / "sandbox" / "certificates").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        log = (house.machine.folder / "s" / "daemon.log").read_text()
        assert log.count(f"certificate_issued identity=k8e:key:{read_key(key).key_id.hex()}") == 1

    def test_files_say_who_we_are(self, house: House, laptop: tuple[Machine, str]) -> None:
        machine, key = laptop
        found = house.log_in(key)
        (machine.folder / "c.pem").write_text(found.certificate + found.ca_certificate)
        (machine.folder / "k.pem").write_text(found.key)
        (machine.folder / "ca.pem").write_text(found.ca_certificate)
        env = {"K8E_SANDBOX_ENDPOINT": house.endpoint, "K8E_SANDBOX_CERT": str(machine.folder / "c.pem")}
        done = machine.k8e("sandbox", "sessions", env={**env, "K8E_SANDBOX_KEY": str(machine.folder / "k.pem")})
        assert done.code == 0
        # Whom to trust, and nothing about who we are.
        done = machine.k8e("sandbox", "sessions", env={**env, "K8E_SANDBOX_CERT": str(machine.folder / "ca.pem")})
        assert (done.code, done.json["code"]) == (1, "not_logged_in")

    @pytest.mark.parametrize("source", ["own files", "kubeconfig"])
    def test_the_gateways_ca_is_found(self, house: House, laptop: tuple[Machine, str], source: str) -> None:
        machine, _ = laptop
        env = {"K8E_SANDBOX_ENDPOINT": house.endpoint}
        if source == "own files":
            env["K8E_STATE_DIR"] = str(house.machine.folder / "s")
        else:
            cluster = {"certificate-authority-data": base64.b64encode(house.authority).decode()}
            path = machine.folder / "kubeconfig"
            path.write_text(
                yaml.safe_dump(
                    {
                        "current-context": "c",
                        "contexts": [{"name": "c", "context": {"cluster": "k"}}],
                        "clusters": [{"name": "k", "cluster": cluster}],
                    }
                )
            )
            env["KUBECONFIG"] = str(path)
        done = machine.k8e("sandbox", "sessions", env=env)
        assert (done.code, done.json["code"]) == (1, "not_logged_in")
        # Without it the gateway is not known.
        done = machine.k8e("sandbox", "sessions", env={"K8E_SANDBOX_ENDPOINT": house.endpoint})
        assert (done.code, done.json["code"]) == (2, "unreachable")

    def test_a_user_of_the_machine_needs_none(self, house: House, tmp_path: Path) -> None:
        machine = Machine(house.machine.folder, tmp_path)
        done = machine.k8e("sandbox", "sessions", env={"K8E_SANDBOX_ENDPOINT": house.endpoint})
        assert done.code == 0

    def test_a_revoked_key_is_told_so(self, house: House, tmp_path: Path) -> None:
        machine = Machine(tmp_path, tmp_path)
        key = house.make_key("short")
        env = {"K8E_SANDBOX_ENDPOINT": house.endpoint, "K8E_SANDBOX_APIKEY": key}
        assert machine.k8e("sandbox", "sessions", env=env).code == 0
        house.delete_key("short")
        done = machine.k8e("sandbox", "sessions", env=env)
        assert (done.code, done.json["code"]) == (1, "key_revoked")


def test_grpc_is_not_loaded_for_the_daemon_of_this_machine(house: House) -> None:
    machine = house.machine
    command = ["python3", "-X", "importtime", str(K8E), "sandbox", "sessions"]
    done = subprocess.run([str(K8E.parent / "python"), *command[1:]], env=machine.env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "k8e.cli.sandbox.sessions" in done.stderr
    assert "grpc" not in done.stderr
    assert "cryptography" not in done.stderr

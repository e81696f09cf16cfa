"""The control plane under attack, over the socket of the real daemon with the real engine: other users, web pages, what
is no name, limits, and everybody at once. What only identities of other machines can try is in tests/gateway."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from k8e.engine.local.layout import Layout
from tests.cli.machine import Machine, make_folder, wait_until
from tests.engine.answers import plant_answers
from tests.engine.traces import find_traces, living_processes, wait_for_no_traces
from tests.runtimes import do_without
from tests.scenarios.user import clear_machine, stop_daemon

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon needs root")

JSON = {"Content-Type": "application/json"}
NOBODY, SOMEBODY = 65534, 54321  # two users who are not root, and not each other

# Requests of another uid: a program of theirs, which has nothing but a socket.
CLIENT = r"""
import http.client, json, socket, sys
path, requests = sys.argv[1], json.load(sys.stdin)
answers = []
for method, target, body, headers in requests:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    connection.request(method, target, body, headers)
    answer = connection.getresponse()
    answers.append([answer.status, answer.read().decode("utf-8", "replace")])
json.dump(answers, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def code(self) -> str:
        return str(self.json.get("code", ""))


@dataclass
class Door:
    machine: Machine

    @property
    def path(self) -> str:
        return str(self.machine.folder / "r" / "k8e.sock")

    @contextlib.contextmanager
    def connect(self) -> Iterator[http.client.HTTPConnection]:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(60)
            stream.connect(self.path)
            connection = http.client.HTTPConnection("localhost")
            connection.sock = stream
            yield connection

    def ask(
        self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None, uid: int = 0
    ) -> Answer:
        content = json.dumps(body) if isinstance(body, dict) else body
        sent = headers if headers is not None else (JSON if isinstance(body, dict) else {})
        if uid:
            return self.ask_as(uid, [(method, target, content, sent)])[0]
        with self.connect() as connection:
            with contextlib.suppress(BrokenPipeError):  # refused before all of it was sent
                connection.request(method, target, content, sent)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read().decode("utf-8", "replace"))

    def ask_as(self, uid: int, requests: list[tuple[str, str, Any, dict[str, str]]]) -> list[Answer]:
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", CLIENT, self.path],
            input=json.dumps(requests).encode(),
            capture_output=True,
            user=uid,
            group=uid,
            extra_groups=[],
            cwd="/",
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return [Answer(*answer) for answer in json.loads(done.stdout)]

    def create(self, uid: int = 0, **spec: Any) -> str:
        answer = self.ask("POST", "/v1/sessions", spec, uid=uid)
        assert answer.status == 201, answer
        return str(answer.json["session_id"])


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("no Python that others can run")
    with make_folder() as folder:
        plant_answers(folder / "s", folder)
        machine = Machine(folder, folder)
        try:
            status = machine.k8e("sandbox", "status").json
            if not status["available"]:
                do_without("native", status)
            (folder / "r" / "k8e.sock").chmod(0o666)  # as a group would allow
            yield Door(machine)
        finally:
            clear_machine(machine)


@pytest.fixture(scope="module")
def session(door: Door) -> str:
    """Root's own."""
    return door.create(session_id="mine", env={"SECRET": "hidden"})


def neutral(answer: Answer, *names: str) -> tuple[int, str]:
    text = answer.text
    for name in names:
        text = text.replace(name, "NAME")
    return answer.status, text


class TestOtherUsers:
    def test_every_verb_on_anothers_session_is_answered_as_if_it_did_not_exist(self, door: Door) -> None:
        theirs = door.create(NOBODY, session_id="theirs")
        made = {"code": "echo secret; sleep 1000", "background": True, "timeout": 300}
        run = door.ask("POST", f"/v1/sessions/{theirs}/runs", made, uid=NOBODY).json["run_id"]

        def every_verb(session: str, run: str) -> list[tuple[str, str, Any, dict[str, str]]]:
            top = f"/v1/sessions/{session}"
            code = json.dumps({"code": "echo mine"})
            stream = json.dumps({"code": "echo mine", "stream": True})
            return [
                ("GET", top, None, {}),
                ("DELETE", top, None, {}),
                ("POST", f"{top}/runs", code, JSON),
                ("POST", f"{top}/runs", stream, JSON),
                ("GET", f"{top}/runs", None, {}),
                ("GET", f"{top}/processes", None, {}),
                ("GET", f"{top}/files?path=x", None, {}),
                ("PUT", f"{top}/files?path=x", "content", {"Content-Type": "application/octet-stream"}),
                ("GET", f"{top}/entries?path=.", None, {}),
                ("GET", f"{top}/hosts", None, {}),
                ("POST", f"{top}/hosts", json.dumps({"hosts": []}), JSON),
                ("GET", f"/v1/runs/{run}", None, {}),
                ("POST", f"/v1/runs/{run}/kill", "{}", JSON),
            ]

        absent, no_run = "absent", "run-0123456789abcdef"
        got = door.ask_as(SOMEBODY, every_verb(theirs, run))
        expected = door.ask_as(SOMEBODY, every_verb(absent, no_run))
        for request, answer, reference in zip(every_verb(theirs, run), got, expected, strict=True):
            assert answer.status == 404, (request, answer)
            assert neutral(answer, theirs, run) == neutral(reference, absent, no_run), request
        # And nothing of it happened.
        assert door.ask("GET", f"/v1/sessions/{theirs}", uid=NOBODY).status == 200
        assert door.ask("GET", f"/v1/runs/{run}", uid=NOBODY).json["status"] == "running"
        door.ask("POST", f"/v1/runs/{run}/kill", {}, uid=NOBODY)
        runs = door.ask("GET", f"/v1/sessions/{theirs}/runs", uid=NOBODY).json["runs"]
        assert [each["run_id"] for each in runs] == [run]
        assert door.ask("GET", f"/v1/sessions/{theirs}/entries?path=.", uid=NOBODY).json["files"] == []
        assert door.ask("DELETE", f"/v1/sessions/{theirs}", uid=NOBODY).status == 200

    def test_lists_have_only_ones_own(self, door: Door, session: str) -> None:
        mine = door.create(SOMEBODY)
        for phase in ("active", "all"):
            listed = door.ask("GET", f"/v1/sessions?phase={phase}", uid=SOMEBODY).json["sessions"]
            assert mine in [each["session_id"] for each in listed]
            assert {each["owner"] for each in listed} == {SOMEBODY}
        assert "SECRET" not in door.ask("GET", "/v1/sessions", uid=SOMEBODY).text
        assert door.ask("DELETE", f"/v1/sessions/{mine}", uid=SOMEBODY).status == 200

    def test_the_same_id_names_two_sessions_of_two_users(self, door: Door) -> None:
        for uid in (NOBODY, SOMEBODY):
            assert door.create(uid, session_id="same") == "same"
            run = {"code": f"echo {uid} > whose; cat whose"}
            assert door.ask("POST", "/v1/sessions/same/runs", run, uid=uid).json["stdout"] == f"{uid}\n"
        assert door.ask("DELETE", "/v1/sessions/same", uid=NOBODY).status == 200
        assert door.ask("GET", "/v1/sessions/same/files?path=whose", uid=SOMEBODY).json["content"] == f"{SOMEBODY}\n"
        assert door.ask("DELETE", "/v1/sessions/same", uid=SOMEBODY).status == 200

    def test_saying_to_be_somebody_else_does_not_help(self, door: Door, session: str) -> None:
        for headers in ({"X-User": "root"}, {"Authorization": "Basic cm9vdDo="}, {"X-Forwarded-For": "127.0.0.1"}):
            assert door.ask("GET", f"/v1/sessions/{session}", headers=headers, uid=SOMEBODY).status == 404
        asked = {"session_id": "x", "owner": 0}
        assert door.ask("POST", "/v1/sessions", asked, uid=SOMEBODY).json["field"] == "owner"

    def test_a_socket_that_its_mode_keeps_from_them(self, door: Door) -> None:
        os.chmod(door.path, 0o600)
        try:
            with pytest.raises(AssertionError, match="Permission denied"):
                door.ask("GET", "/healthz", uid=SOMEBODY)
        finally:
            os.chmod(door.path, 0o666)

    def test_values_of_the_environment_are_shown_to_nobody(self, door: Door, session: str) -> None:
        shown = door.ask("GET", f"/v1/sessions/{session}")
        assert shown.json["env_keys"] == ["SECRET"]
        everywhere = shown.text + door.ask("GET", "/v1/sessions?phase=all").text + door.ask("GET", "/metrics").text
        assert "hidden" not in everywhere

    @pytest.mark.parametrize("runtime", ["gvisor", "native"])
    def test_values_of_the_environment_are_nowhere_on_the_machine(self, door: Door, runtime: str) -> None:
        """While a command that has them runs: in no file, argument or variable of a process but the sandbox's own."""
        secrets = (b"hidden-of-the-session", b"hidden-of-the-run", b"hidden-in-the-input")
        created = door.ask("POST", "/v1/sessions", {"env": {"SECRET": "hidden-of-the-session"}, "runtime": runtime})
        if created.code == "runtime_unavailable":
            pytest.skip(created.text)
        mine = created.json["session_id"]
        try:
            given = {"code": "cat > input", "stdin": "hidden-in-the-input"}
            assert door.ask("POST", f"/v1/sessions/{mine}/runs", given).status < 300
            code = "cat input > got; printenv SECRET TOKEN >> got; mv got ready; exec sleep 600"
            run = {"code": code, "env": {"TOKEN": "hidden-of-the-run"}, "background": True}
            assert door.ask("POST", f"/v1/sessions/{mine}/runs", run).status < 300
            wait_until(lambda: door.ask("GET", f"/v1/sessions/{mine}/files?path=ready").status == 200)
            got = door.ask("GET", f"/v1/sessions/{mine}/files?path=ready").text
            assert all(secret.decode() in got for secret in secrets)
            assert find_words(door.machine, (mine.encode(),)), "what is there is found"
            assert find_words(door.machine, secrets) == []
        finally:
            door.ask("DELETE", f"/v1/sessions/{mine}")

    def test_the_daemon_leaves_no_picture_of_its_memory(self, door: Door) -> None:
        limits = Path(f"/proc/{door.machine.daemon_pid}/limits").read_text().splitlines()
        assert [line.split()[4:6] for line in limits if line.startswith("Max core file size")] == [["0", "0"]]


def find_words(machine: Machine, words: tuple[bytes, ...]) -> list[str]:
    """Where they are: the daemon's files, and what every process that is not a sandbox's shows of itself. (What a
    sandbox itself wrote is on its disk.)"""
    layout = Layout(machine.folder / "s", machine.folder / "r")
    files = []
    for parent, folders, names in os.walk(machine.folder):
        folders[:] = [name for name in folders if name not in ("disk", "layers", "templates")]
        files += [Path(parent, name) for name in names if not name.endswith(".img")]
    for _, process in living_processes():
        with contextlib.suppress(OSError):
            if f"/{layout.cgroup}/" not in (process / "cgroup").read_text() or is_runtime(process):
                files += [process / "cmdline", process / "environ"]
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            if file.is_file() and any(word in file.read_bytes() for word in words):
                found.append(str(file))
    return found


def is_runtime(process: Path) -> bool:
    """gVisor's own are in the sandbox's group."""
    return os.path.basename(os.readlink(process / "exe")).startswith(("runsc", "runc", "exe"))


class TestWebPages:
    """A page that somehow gets its requests here: by a proxy, an extension, a tool that forwards the socket."""

    @pytest.mark.parametrize(
        "headers",
        [
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://localhost"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
            {"Host": "evil.example"},
            {"Host": "localhost.evil.example"},
            {"Host": "127.0.0.1:80"},
            {"Host": "[::1]"},
        ],
    )
    def test_are_refused_whatever_they_ask(self, door: Door, session: str, headers: dict[str, str]) -> None:
        before = door.ask("GET", "/v1/sessions").json
        requests = [
            ("GET", "/v1/sessions", None, headers),
            ("POST", "/v1/sessions", "{}", {**JSON, **headers}),
            ("POST", f"/v1/sessions/{session}/runs", '{"code": "touch /workspace/pwned"}', {**JSON, **headers}),
            ("DELETE", f"/v1/sessions/{session}", None, headers),
            ("GET", "/metrics", None, headers),
        ]
        for method, target, body, sent in requests:
            answer = door.ask(method, target, body, sent)
            assert (answer.status, answer.code) in ((403, "origin_refused"), (403, "host_refused"))
        after = door.ask("GET", "/v1/sessions").json
        assert [each["session_id"] for each in after["sessions"]] == [each["session_id"] for each in before["sessions"]]
        assert door.ask("GET", f"/v1/sessions/{session}/files?path=pwned").status == 404

    @pytest.mark.parametrize(
        "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
    )
    def test_a_form_makes_nothing(self, door: Door, session: str, kind: str | None) -> None:
        headers = {"Content-Type": kind} if kind else {}
        for target in ("/v1/sessions", f"/v1/sessions/{session}/runs"):
            answer = door.ask("POST", target, '{"code": "touch /workspace/pwned"}', headers)
            assert (answer.status, answer.code) == (415, "content_type")
        assert door.ask("GET", f"/v1/sessions/{session}/files?path=pwned").status == 404

    def test_a_preflight_is_told_nothing(self, door: Door) -> None:
        with door.connect() as connection:
            connection.request("OPTIONS", "/v1/sessions", headers={"Access-Control-Request-Method": "POST"})
            answer = connection.getresponse()
        assert answer.status == 405
        assert not [name for name, _ in answer.getheaders() if name.lower().startswith("access-control")]

    def test_nobody_listens_on_a_port(self, door: Door) -> None:
        """Nothing but the socket: there is no address that a page could name."""
        pid = door.machine.daemon_pid
        inodes = set()
        for entry in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes and fields[3] == "0A":
                    # The resolver listens on the host's end of a sandbox's own wire, and nowhere else.
                    assert fields[1].endswith(":0035"), line


FLAGS_AND_PATHS = ["-rf", "--help", "../up", "a/b", ".", "..", "a\0b", "a\nb", "a b", "é", "x" * 64, "$(id)", "%2e%2e"]


class TestNames:
    @pytest.mark.parametrize("name", FLAGS_AND_PATHS)
    @pytest.mark.parametrize("field", ["session_id", "tenant_id"])
    def test_that_are_none_are_refused_by_field(self, door: Door, field: str, name: str) -> None:
        answer = door.ask("POST", "/v1/sessions", {field: name})
        assert (answer.status, answer.code) == (400, "invalid_argument"), answer
        assert answer.json["field"] in (field, field.removesuffix("_id"))

    @pytest.mark.parametrize(
        ("spec", "field"),
        [
            ({"image": "../../etc"}, "image"),
            ({"image": "--privileged"}, "image"),
            ({"image": ""}, "image"),
            ({"env": {"-x": "1"}}, "env"),
            ({"env": {"A=B": "1"}}, "env"),
            ({"env": {"": "1"}}, "env"),
            ({"env": {"A": "x\0y"}}, "env"),
            ({"env": {f"K{number}": "" for number in range(65)}}, "env"),
            ({"env": {"A": "x" * 40_000}}, "env"),
            ({"limits": {"cpus": -1}}, "limits.cpus"),
            ({"limits": {"cpus": 1e9}}, "limits.cpus"),
            ({"limits": {"memory": 1}}, "limits.memory"),
            ({"limits": {"memory": 1 << 60}}, "limits.memory"),
            ({"limits": {"pids": 0}}, "limits.pids"),
            ({"limits": {"disk": 1 << 62}}, "limits.disk"),
            ({"limits": {"nonsense": 1}}, "limits.nonsense"),
            ({"ttl": 0}, "ttl"),
            ({"ttl": -5}, "ttl"),
            ({"ttl": 1e12}, "ttl"),
            ({"ttl": "1h"}, "ttl"),
            ({"runtime": "docker"}, "runtime"),
            ({"runtime": "--root=/"}, "runtime"),
            ({"allowed_hosts": ["-x.example"]}, "allowed_hosts"),
            ({"allowed_hosts": "example.com"}, "allowed_hosts"),
            ({"git_repo": "--upload-pack=touch /tmp/x"}, "manifest"),  # where it stands among what a session gets
            ({"git_ref": "main"}, "git_ref"),
            ({"unknown": 1}, "unknown"),
        ],
    )
    def test_wishes_that_cannot_be_are_refused_by_field(self, door: Door, spec: dict[str, Any], field: str) -> None:
        before = find_traces_of(door)
        answer = door.ask("POST", "/v1/sessions", {"session_id": "never", **spec})
        assert (answer.status, answer.code) == (400, "invalid_argument"), answer
        assert answer.json["field"].split("[")[0].split(".")[0] == field.split(".", maxsplit=1)[0], answer
        assert answer.json["hint"] or answer.json["error"]
        assert door.ask("GET", "/v1/sessions/never").status == 404
        assert find_traces_of(door) == before

    def test_a_repository_that_is_a_command_is_not_run(self, door: Door) -> None:
        before = find_traces_of(door)
        answer = door.ask("POST", "/v1/sessions", {"session_id": "never", "git_repo": "ext::sh -c touch% /tmp/ran"})
        assert (answer.status, answer.code) in ((400, "invalid_argument"), (502, "manifest_failed")), answer
        assert "ext" in answer.text
        assert door.ask("GET", "/v1/sessions/never").status == 404
        assert find_traces_of(door) == before

    @pytest.mark.parametrize(
        ("spec", "field"),
        [
            ({"code": "x" * ((16 << 20) + 1)}, "code"),
            ({"code": "a\0b"}, "code"),
            ({"argv": ["a\0b"]}, "argv"),
            ({"code": "x", "argv": ["y"]}, "argv"),
            ({"code": "x", "language": "perl"}, "language"),
            ({"code": "x", "timeout": 0}, "timeout"),
            ({"code": "x", "timeout": 1e9}, "timeout"),
            ({"code": "x", "workdir": "a\0b"}, "workdir"),
            ({"code": "x", "workdir": "/" + "x" * 5000}, "workdir"),
            ({"code": "x", "env": {"LD PRELOAD": ""}}, "env"),
            ({"code": "x", "stdin_base64": "!"}, "stdin_base64"),
            ({"code": "x", "user": "a\0b"}, "user"),
        ],
    )
    def test_so_are_runs(self, door: Door, session: str, spec: dict[str, Any], field: str) -> None:
        answer = door.ask("POST", f"/v1/sessions/{session}/runs", spec)
        assert (answer.status, answer.code) == (400, "invalid_argument"), answer
        assert answer.json["field"].split("[")[0] == field, answer

    @pytest.mark.parametrize("path", ["", "a%00b", "x" * 5000])
    def test_so_are_paths(self, door: Door, session: str, path: str) -> None:
        answer = door.ask("GET", f"/v1/sessions/{session}/files?path={path}")
        assert (answer.status, answer.json.get("field")) == (400, "path"), answer

    @pytest.mark.parametrize("path", ["../../../../etc/shadow", "/etc/shadow", "/proc/1/root/etc/shadow"])
    def test_a_path_that_climbs_stays_inside(self, door: Door, session: str, path: str) -> None:
        answer = door.ask("GET", f"/v1/sessions/{session}/files?path={path}")
        assert answer.status in (403, 404), answer

    @pytest.mark.parametrize("name", ["..%2f..%2fetc", "-rf", "%00", "a%2fb", "." * 300])
    @pytest.mark.parametrize("rest", ["", "/runs", "/files?path=x"])
    def test_addresses_that_are_none(self, door: Door, name: str, rest: str) -> None:
        answer = door.ask("GET", f"/v1/sessions/{name}{rest}")
        assert answer.status in (400, 404), answer
        assert answer.code in ("invalid_argument", "session_not_found", "no_such_endpoint", "malformed_request")

    def test_too_much_is_refused_before_it_is_read(self, door: Door, session: str) -> None:
        with door.connect() as connection:
            connection.putrequest("PUT", f"/v1/sessions/{session}/files?path=big")
            connection.putheader("Content-Type", "application/octet-stream")
            connection.putheader("Content-Length", str(1 << 40))
            connection.endheaders()
            assert connection.getresponse().status == 413


def find_traces_of(door: Door) -> set[str]:
    layout = Layout(door.machine.folder / "s", door.machine.folder / "r")
    return {trace.what for trace in find_traces(layout) if trace.kind in ("directory", "mount", "cgroup")}


class TestAtOnce:
    def test_two_creates_of_one_id_have_one_winner(self, door: Door) -> None:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: door.ask("POST", "/v1/sessions", {"session_id": "once"}), range(6)))
        assert sorted(answer.status for answer in answers) == [201] + [409] * 5
        assert {answer.code for answer in answers if answer.status == 409} == {"session_exists"}
        assert door.ask("POST", "/v1/sessions/once/runs", {"code": "echo alive"}).json["stdout"] == "alive\n"

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: door.ask("DELETE", "/v1/sessions/once"), range(6)))
        assert sorted(answer.status for answer in answers) == [200] + [404] * 5, "one destroyed it"
        again = door.ask("DELETE", "/v1/sessions/once")
        assert (again.status, again.code) == (404, "session_not_found")

    def test_an_id_is_free_again_only_when_its_session_is_gone(self, door: Door) -> None:
        for _ in range(3):
            door.create(session_id="again")
            with ThreadPoolExecutor(2) as pool:
                destroying = pool.submit(door.ask, "DELETE", "/v1/sessions/again")
                creating = pool.submit(door.ask, "POST", "/v1/sessions", {"session_id": "again"})
            assert destroying.result().status == 200 or creating.result().status == 409
            assert creating.result().status in (201, 409)
            door.ask("DELETE", "/v1/sessions/again")

    def test_using_one_that_is_being_destroyed_has_a_clear_answer(self, door: Door) -> None:
        for turn in range(3):
            door.create(session_id="going")
            code = {"code": "echo ran"}
            with ThreadPoolExecutor(8) as pool:
                runs = [pool.submit(door.ask, "POST", "/v1/sessions/going/runs", code) for _ in range(turn + 1)]
                destroying = pool.submit(door.ask, "DELETE", "/v1/sessions/going")
                runs += [pool.submit(door.ask, "POST", "/v1/sessions/going/runs", code) for _ in range(3)]
            assert destroying.result().status == 200
            for run in runs:
                answer = run.result()
                if answer.status == 200:
                    assert answer.json["stdout"] == "ran\n"
                else:
                    known = ("session_not_found", "session_destroying", "session_ended", "sandbox_unreachable")
                    assert answer.code in known, answer
                    assert answer.json["hint"]
            assert door.ask("GET", "/v1/sessions/going").status == 404

    def test_destroying_one_that_is_being_created_leaves_nothing(self, door: Door) -> None:
        before = find_traces_of(door)
        with ThreadPoolExecutor(2) as pool:
            creating = pool.submit(door.ask, "POST", "/v1/sessions", {"session_id": "short"})
            while (seen := door.ask("GET", "/v1/sessions/short")).status == 404 and not creating.done():
                pass
            destroyed = door.ask("DELETE", "/v1/sessions/short")
        assert destroyed.status == 200, (seen, destroyed)
        made = creating.result()
        assert made.status == 201 or made.code == "session_destroyed"
        assert door.ask("GET", "/v1/sessions/short").status == 404
        assert find_traces_of(door) <= before

    def test_killing_a_run_twice_and_at_once(self, door: Door, session: str) -> None:
        spec = {"code": "sleep 1000", "background": True, "timeout": 300}
        run = door.ask("POST", f"/v1/sessions/{session}/runs", spec).json["run_id"]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: door.ask("POST", f"/v1/runs/{run}/kill", {}), range(4)))
        assert {answer.status for answer in answers} == {200}
        assert door.ask("GET", f"/v1/runs/{run}").json["status"] == "killed"

    def test_two_hundred_clients_at_once(self, door: Door, session: str) -> None:
        def one(number: int) -> Answer:
            if number % 4:
                return door.ask("GET", f"/v1/sessions/{session}")
            return door.ask("POST", f"/v1/sessions/{session}/runs", {"code": f"echo {number}"})

        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(one, range(200)))
        assert {answer.status for answer in answers} == {200}
        assert [answers[number].json["stdout"] for number in range(0, 200, 4)] == [f"{n}\n" for n in range(0, 200, 4)]


async def test_afterwards_nothing_is_left(door: Door) -> None:
    """Runs last in this module: every session goes, the daemon stops, and nothing of it is to be found."""
    layout = await asyncio.to_thread(end_all, door)
    await wait_for_no_traces(layout)


def end_all(door: Door) -> Layout:
    for session in door.machine.live_sessions():
        door.machine.k8e("sandbox", "destroy", session)
    for uid in (NOBODY, SOMEBODY):
        assert door.ask("GET", "/v1/sessions", uid=uid).json["sessions"] == []
    stop_daemon(door.machine, signal.SIGTERM)
    log = (door.machine.folder / "s" / "daemon.log").read_text()
    assert "Traceback" not in log, log
    layout = Layout(door.machine.folder / "s", door.machine.folder / "r")
    for name in ("k8e.lock", "start.lock"):  # the daemon's and the command line's own
        (layout.run / name).unlink(missing_ok=True)
    return layout

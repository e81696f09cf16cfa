"""Every call of the service through the door, with the exact JSON that scripts see."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import h11
import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import (
    REMOTE,
    Caller,
    ChildSpec,
    Denial,
    Denials,
    HostsChange,
    ManifestDir,
    ManifestFile,
    ManifestRepo,
    RunResult,
    RunSpec,
    SessionSpec,
    Status,
)
from k8e.doors.http.errors import STATUS
from k8e.engine import Limits, Mount, Runtime, Shape
from k8e.link.model import FileType
from tests.doors.dialogue import House
from tests.doors.stand_in import make_entry

RUN = {
    "exit_code": 0,
    "session_id": "sess-1",
    "run_id": "run-1",
    "status": "completed",
    "duration_ms": 1,
    "truncated": False,
    "denied": [],
}
LIMITS = {"cpus": 1.0, "memory": 1 << 30, "pids": 512, "disk": 2 << 30, "inodes": 131_072, "open_files": 4096}


class TestService:
    async def test_says_that_it_is_there(self, house: House) -> None:
        answer = await house.ask("GET", "/healthz")
        assert (answer.status, answer.json) == (200, {"ok": True})
        assert answer.body == b'{"ok": true}\n', "one line"

    async def test_shows_metrics_as_prometheus_wants_them(self, house: House) -> None:
        answer = await house.ask("GET", "/metrics")
        assert (answer.status, answer.body) == (200, b"k8e_sessions 0\n")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")

    async def test_tells_its_status(self, house: House) -> None:
        answer = await house.ask("GET", "/v1/status")
        report = {
            "runtime": "gvisor",
            "available": True,
            "version": "release-1",
            "reason": "",
            "hint": "",
            "notes": ["own network stack"],
        }
        assert answer.json == {
            "available": True,
            "runtime": "gvisor",
            "version": "0.1.0",
            "sessions": 0,
            "warm": 3,
            "runtimes": [report],
            "caller": {"name": f"uid:{os.getuid()}", "tenant_id": None, "scope": "admin"},
        }

    async def test_knows_the_caller_from_the_kernel(self, house: House) -> None:
        await house.ask("GET", "/v1/status")
        assert house.service.callers == [Caller(os.getuid())]


class TestSessions:
    async def test_create(self, house: House) -> None:
        answer = await house.ask("POST", "/v1/sessions", {})
        policy = {"image": "host", "limits": LIMITS, "ttl": 3600, "allowed_hosts": ["usual.test"]}
        assert (answer.status, answer.json) == (201, {"session_id": "sess-1", "runtime": "gvisor", "policy": policy})
        assert house.service.specs == [SessionSpec()]

    async def test_create_with_everything(self, house: House) -> None:
        manifest = "- dir: {path: data}\n- file: {path: a, content: b, mode: 600}\n"
        body = {
            "session_id": "mine",
            "tenant_id": "web",
            "runtime": "native",
            "image": "debian",
            "env": {"KEY": "secret"},
            "limits": {"cpus": 2, "memory": 1 << 30, "pids": 9, "disk": 1 << 31, "inodes": 70, "open_files": 20},
            "ttl": 60,
            "allowed_hosts": ["*.Example.org", "192.0.2.0/24"],
            "manifest": manifest,
            "git_repo": "https://example.org/team/app.git",
            "git_ref": "v1",
            "secrets": {"TOKEN": "secret"},
            "persistent": True,
            "labels": {"profile": "moderate"},
        }
        answer = await house.ask("POST", "/v1/sessions", body)
        assert (answer.status, answer.json["session_id"]) == (201, "mine")
        assert house.service.specs == [
            SessionSpec(
                session_id="mine",
                tenant="web",
                runtime=Runtime.NATIVE,
                image="debian",
                env={"KEY": "secret"},
                limits=Limits(2.0, 1 << 30, 9, 1 << 31, 70, 20),
                ttl=60.0,
                allowed_hosts=["*.Example.org", "192.0.2.0/24"],
                manifest=(
                    ManifestDir("data"),
                    ManifestFile("a", b"b", 0o600),
                    ManifestRepo("app", "https://example.org/team/app.git", "v1"),
                ),
                secrets={"TOKEN": "secret"},
                persistent=True,
                labels={"profile": "moderate"},
            )
        ]
        shown = await house.ask("GET", "/v1/sessions/mine")
        assert shown.json == {
            "session_id": "mine",
            "tenant_id": "web",
            "phase": "active",
            "runtime": "native",
            "image": "debian",
            "limits": {**body["limits"], "cpus": 2.0},  # type: ignore[dict-item]
            "env_keys": ["KEY"],
            "owner": os.getuid(),
            "created": 1.5,
            "last_used": 2.5,
            "ttl": 60,
            "policy": {"allowed_hosts": ["*.example.org", "192.0.2.0/24"]},
            "parent_session_id": None,
            "children": [],
            "persistent": True,
            "labels": {"profile": "moderate"},
            "secret_keys": ["TOKEN"],
            "denied": [],
        }
        assert b'"secret"' not in shown.body

    async def test_create_with_a_shape(self, house: House) -> None:
        mount = {
            "source": "/p",
            "target": "/workspace",
            "writable": True,
            "kept": [".git"],
            "hidden": [],
            "private": [".git"],
        }
        shape = {"mounts": [mount], "read_only": True, "powerless": True}
        answer = await house.ask("POST", "/v1/sessions", {**shape, "more_hosts": ["more.test"]})
        expected = Shape(
            (Mount("/p", "/workspace", REMOTE, writable=True, kept=(".git",), private=(".git",)),), True, True
        )
        assert house.service.specs == [SessionSpec(shape=expected, more_hosts=["more.test"])]
        assert {key: answer.json["policy"][key] for key in shape} == shape

    async def test_a_child(self, house: House) -> None:
        parent = await house.make_session()
        answer = await house.ask("POST", f"/v1/sessions/{parent}/subagents", {})
        assert (answer.status, answer.json["parent_session_id"]) == (201, parent)
        assert set(answer.json) == {"session_id", "runtime", "policy", "parent_session_id"}
        wishes = {
            "session_id": "mine",
            "image": "debian",
            "env": {"KEY": "secret"},
            "ttl": 60,
            "allowed_hosts": [],
            "agent_type": "reviewer",
            "workspace_path": "part",
            "read_only": True,
            "powerless": False,
        }
        limits = {"cpus": 0.25, "memory": 1 << 26}
        await house.ask("POST", f"/v1/sessions/{parent}/subagents", {**wishes, "runtime": "native", "limits": limits})
        assert house.service.specs[1:] == [
            ChildSpec(),
            ChildSpec(**wishes, runtime=Runtime.NATIVE, limits=limits),  # type: ignore[arg-type]
        ]
        shown = (await house.ask("GET", f"/v1/sessions/{parent}")).json
        assert shown["children"] == ["sess-2", "mine"]
        assert (await house.ask("GET", "/v1/sessions/mine")).json["parent_session_id"] == parent

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"tenant_id": "x"}, "tenant_id"),
            ({"limits": {"memory": 1.5}}, "limits.memory"),
            ({"limits": {"cores": 1}}, "limits.cores"),
            ({"runtime": "docker"}, "runtime"),
            ({"mounts": []}, "mounts"),
            ({"read_only": "yes"}, "read_only"),
        ],
    )
    async def test_a_child_with_what_is_not_known(self, house: House, body: dict[str, Any], field: str) -> None:
        parent = await house.make_session()
        answer = await house.ask("POST", f"/v1/sessions/{parent}/subagents", body)
        assert (answer.status, answer.json["code"], answer.json["field"]) == (400, "invalid_argument", field)

    async def test_list_those_that_live_or_all(self, house: House) -> None:
        first, second = await house.make_session(), await house.make_session()
        assert (await house.ask("DELETE", f"/v1/sessions/{first}")).json == {"ok": True}

        async def names(query: str) -> list[str]:
            answer = await house.ask("GET", f"/v1/sessions{query}")
            return [session["session_id"] for session in answer.json["sessions"]]

        assert await names("") == [second]
        assert await names("?phase=active") == [second]
        assert await names("?phase=all") == [first, second]
        answer = await house.ask("GET", "/v1/sessions?phase=past")
        assert (answer.status, answer.json["field"]) == (400, "phase")

    async def test_stop_and_start(self, house: House) -> None:
        session = await house.make_session()
        target = f"/v1/sessions/{session}"
        stopped = await house.ask("POST", f"{target}/stop", {})
        assert (stopped.status, stopped.json["phase"]) == (200, "stopped")
        body = {"env": {"A": "1"}, "secrets": {"B": "2"}}
        started = await house.ask("POST", f"{target}/start", body)
        assert (started.status, started.json["phase"]) == (200, "active")
        assert house.service.starts == [({"A": "1"}, {"B": "2"})]
        for path, wrong in (("stop", {"env": {}}), ("start", {"env": []}), ("start", {"limits": {}})):
            assert (await house.ask("POST", f"{target}/{path}", wrong)).status == 400
        assert (await house.ask("POST", "/v1/sessions/nobody/stop", {})).status == 404


class TestRuns:
    async def test_text_is_text(self, house: House) -> None:
        session = await house.make_session()
        body = {"code": "printf 'grüße\\n'; printf 'e\\0' >&2; exit 3"}
        answer = await house.ask("POST", f"/v1/sessions/{session}/runs", body)
        assert answer.json == {
            **RUN,
            "stdout": "grüße\n",
            "stderr": "e\0",
            "exit_code": 3,
            "stdout_bytes": 8,
            "stderr_bytes": 2,
        }
        assert answer.headers["k8e-exit-code"] == "3"
        assert "grüße".encode() in answer.body, "readable as it is"

    async def test_other_bytes_are_readable_and_exact(self, house: House) -> None:
        session = await house.make_session()
        answer = await house.ask("POST", f"/v1/sessions/{session}/runs", {"code": "printf 'a\\377b'"})
        assert (answer.json["stdout"], answer.json["stderr"]) == ("a\ufffdb", "")
        assert base64.b64decode(answer.json["stdout_base64"]) == b"a\xffb"
        assert "stderr_base64" not in answer.json

    async def test_everything_reaches_the_service(self, house: House) -> None:
        session = await house.make_session()
        body = {
            "code": 'cat; printf "$A"',
            "language": "python",
            "timeout": 5,
            "env": {"A": "b c"},
            "workdir": "/tmp",
            "stdin": "ü",
            "background": False,
        }
        answer = await house.ask("POST", f"/v1/sessions/{session}/runs", body)
        assert answer.json["stdout"] == "üb c"
        spec = house.service.specs[-1]
        assert isinstance(spec, RunSpec)
        assert (spec.session_id, spec.language.value, spec.timeout) == (session, "python", 5.0)
        assert (spec.env, spec.workdir, spec.stdin) == ({"A": "b c"}, "/tmp", "ü".encode())

    async def test_an_argv_is_taken_exactly(self, house: House) -> None:
        session = await house.make_session()
        argv = ["printf", "%s|", "", "a b", "$HOME", "\udcff"]
        answer = await house.ask("POST", f"/v1/sessions/{session}/runs", {"argv": argv})
        assert base64.b64decode(answer.json["stdout_base64"]) == b"|a b|$HOME|\xff|"

    async def test_stdin_may_be_any_bytes(self, house: House) -> None:
        session = await house.make_session()
        content = bytes(range(256))
        body = {"code": "cat", "stdin_base64": base64.b64encode(content).decode()}
        answer = await house.ask("POST", f"/v1/sessions/{session}/runs", body)
        assert base64.b64decode(answer.json["stdout_base64"]) == content

    async def test_a_background_run_has_no_exit_code_yet(self, house: House) -> None:
        session = await house.make_session()
        answer = await house.ask("POST", f"/v1/sessions/{session}/runs", {"code": "sleep 9", "background": True})
        assert (answer.json["run_id"], answer.json["status"], answer.json["exit_code"]) == ("run-1", "running", None)
        assert "k8e-exit-code" not in answer.headers

    async def test_poll_kill_and_log(self, house: House) -> None:
        session = await house.make_session()
        result = RunResult("run-9", session, Status.TIMED_OUT, 124, b"out", b"", 3, 0, False, 30_000)
        house.service.results["run-9"] = result
        answer = await house.ask("GET", "/v1/runs/run-9")
        expected = {**RUN, "run_id": "run-9", "status": "timed_out", "exit_code": 124, "duration_ms": 30_000}
        expected |= {"stdout_bytes": 3, "stderr_bytes": 0}
        assert answer.json == {**expected, "stdout": "out", "stderr": ""}
        assert (await house.ask("POST", "/v1/runs/run-9/kill", {})).json == {"ok": True, "had_ended": True}
        assert (await house.ask("GET", f"/v1/sessions/{session}/runs")).json == {"runs": [expected]}
        assert (await house.ask("GET", "/v1/runs/other")).json["code"] == "run_not_found"

    async def test_processes(self, house: House) -> None:
        session = await house.make_session()
        answer = await house.ask("GET", f"/v1/sessions/{session}/processes")
        assert answer.json == {
            "processes": [
                {
                    "pid": 7,
                    "command": "bash",
                    "running": False,
                    "exit_code": 3,
                    "signal": None,
                    "started": 9.5,
                    "stdout_bytes": 10,
                    "stderr_bytes": 11,
                }
            ]
        }


class TestHosts:
    async def test_shown_replaced_added_removed_and_cleared(self, house: House) -> None:
        session = await house.make_session()
        target = f"/v1/sessions/{session}/hosts"

        async def change(**body: object) -> list[str]:
            answer = await house.ask("POST", target, body)
            assert answer.status == 200, answer.json
            assert answer.json == (await house.ask("GET", target)).json
            assert set(answer.json) == {"session_id", "policy"}
            return list(answer.json["policy"]["allowed_hosts"])

        assert await change() == ["usual.test"]
        assert await change(hosts=["B.test", "a.test:22"]) == ["a.test:22", "b.test"]
        assert await change(add=["c.test"], remove=["b.test"]) == ["a.test:22", "c.test"]
        assert await change(clear=True) == []
        assert house.service.changes[-1] == HostsChange(hosts=())

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"add": "a.test"}, "add"),
            ({"remove": [1]}, "remove"),
            ({"hosts": {}}, "hosts"),
            ({"clear": 1}, "clear"),
            ({"clear": True, "add": ["a.test"]}, "clear"),
            ({"clear": True, "hosts": []}, "clear"),
            ({"hots": []}, "hots"),
        ],
    )
    async def test_nonsense_changes_nothing(self, house: House, body: dict[str, object], field: str) -> None:
        session = await house.make_session()
        answer = await house.ask("POST", f"/v1/sessions/{session}/hosts", body)
        assert (answer.status, answer.json["field"]) == (400, field)
        assert house.service.changes == []

    async def test_an_empty_list_is_not_no_list(self, house: House) -> None:
        await house.ask("POST", "/v1/sessions", {"allowed_hosts": []})
        assert house.service.specs == [SessionSpec(allowed_hosts=[])]

    async def test_what_was_denied_is_in_a_run_and_in_its_session(self, house: House) -> None:
        session = await house.make_session()
        denied = Denials((Denial("a.test", "", 0, "not_listed", "Ask for it.", 5.5),), 2)
        result = RunResult("run-9", session, Status.COMPLETED, 0, b"", b"", 0, 0, False, 1, denied)
        house.service.results["run-9"] = result
        house.service.sessions_by_id[session] = replace(house.service.sessions_by_id[session], denied=denied)
        expected = {"host": "a.test", "address": "", "port": 0, "reason": "not_listed", "hint": "Ask for it."}
        for target in ("/v1/runs/run-9", f"/v1/sessions/{session}"):
            answer = await house.ask("GET", target)
            assert (answer.json["denied"], answer.json["denied_more"]) == ([expected], 2)


class TestFiles:
    async def test_write_read_and_append(self, house: House) -> None:
        session = await house.make_session()
        target = f"/v1/sessions/{session}/files?path=%2Fworkspace%2Fa%20b"
        octets = {"Content-Type": "application/octet-stream"}
        answer = await house.ask("PUT", target, b"one\n", octets)
        assert answer.json == {"ok": True, "path": "/workspace/a b", "bytes": 4}
        await house.ask("PUT", target + "&mode=a", b"two\n", octets)
        answer = await house.ask("GET", target)
        assert answer.json == {"content": "one\ntwo\n", "path": "/workspace/a b", "encoding": "utf-8"}
        await house.ask("PUT", target + "&mode=w", b"\xff", octets)
        answer = await house.ask("GET", target)
        assert answer.json == {"content": "/w==", "path": "/workspace/a b", "encoding": "base64"}
        answer = await house.ask("GET", target, headers={"Accept": "application/octet-stream"})
        assert (answer.body, answer.headers["content-type"]) == (b"\xff", "application/octet-stream")

    async def test_a_download_that_fails_midway_has_no_end(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        session = await house.make_session()

        async def download(*_: object, **__: object) -> AsyncIterator[bytes]:
            async def give() -> AsyncIterator[bytes]:
                yield b"the first half"
                raise Fault(Kind.LOST, "sandbox_unreachable", "the answer was lost", hint="look")

            return give()

        monkeypatch.setattr(house.service.files, "download", download)
        async with await house.dial() as client:
            await client.begin("GET", f"/v1/sessions/{session}/content?path=a")
            await client.send(h11.EndOfMessage())
            await client.read_head()
            piece = await client.read_event()
            assert isinstance(piece, h11.Data)
            assert bytes(piece.data) == b"the first half"
            with pytest.raises(h11.RemoteProtocolError):  # cut off: not taken for the whole file
                await client.read_event()

    async def test_a_path_may_be_any_bytes(self, house: House) -> None:
        session = await house.make_session()
        house.service.contents["/workspace/\udcff"] = b"there"
        answer = await house.ask("GET", f"/v1/sessions/{session}/files?path=%2Fworkspace%2F%FF")
        assert answer.json == {"content": "there", "path": "/workspace/\udcff", "encoding": "utf-8"}

    async def test_list(self, house: House) -> None:
        session = await house.make_session()
        house.service.entries = [
            make_entry(b"/workspace/old", size=3, mtime=10),
            make_entry(b"/workspace/new\xff", FileType.DIRECTORY, mtime=20.5),
        ]
        answer = await house.ask("GET", f"/v1/sessions/{session}/entries")
        old = {"path": "/workspace/old", "modified": 10.0, "type": "file", "size": 3}
        new = {"path": "/workspace/new\ufffd", "modified": 20.5, "type": "directory", "size": 0}
        new["path_base64"] = base64.b64encode(b"/workspace/new\xff").decode()
        assert answer.json == {"files": [old, new]}
        answer = await house.ask("GET", f"/v1/sessions/{session}/entries?since=15")
        assert answer.json == {"files": [new]}

    @pytest.mark.parametrize(("query", "field"), [("mode=x", "mode"), ("path=a&mod=w", "mod")])
    async def test_an_odd_query_is_refused_by_name(self, house: House, query: str, field: str) -> None:
        session = await house.make_session()
        octets = {"Content-Type": "application/octet-stream"}
        answer = await house.ask("PUT", f"/v1/sessions/{session}/files?{query}", b"", octets)
        assert (answer.status, answer.json["code"], answer.json["field"]) == (400, "invalid_argument", field)


class TestFaults:
    @pytest.mark.parametrize("kind", Kind)
    async def test_each_kind_has_its_status(self, house: House, kind: Kind) -> None:
        house.service.fault = Fault(kind, "some_code", "an error", detail="why", hint="do this")
        answer = await house.ask("GET", "/v1/status")
        assert answer.status == STATUS[kind] >= 400
        assert answer.json == {"error": "an error", "detail": "why", "code": "some_code", "hint": "do this"}

    async def test_the_field_is_named(self, house: House) -> None:
        house.service.fault = Fault(Kind.INVALID, "some_code", "an error", hint="", field="env.A")
        assert (await house.ask("GET", "/v1/status")).json["field"] == "env.A"

    async def test_an_error_of_our_own_says_nothing_of_its_cause(self, house: House) -> None:
        house.service.fault = RuntimeError("secret")
        answer = await house.ask("GET", "/v1/status")
        assert (answer.status, answer.json["code"]) == (500, "internal")
        assert b"secret" not in answer.body

    async def test_the_connection_goes_on_after_one(self, house: House) -> None:
        async with await house.dial() as client:
            house.service.fault = Fault(Kind.DENIED, "some_code", "no", hint="ask")
            assert (await client.ask("GET", "/v1/status")).status == 403
            house.service.fault = None
            assert (await client.ask("GET", "/v1/status")).status == 200

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"code": 1}, "code"),
            ({"code": "x", "language": "rust"}, "language"),
            ({"code": "x", "timeout": "1"}, "timeout"),
            ({"code": "x", "timeout": True}, "timeout"),
            ({"code": "x", "timeout": 10**400}, "timeout"),
            ({"code": "x", "env": {"A": 1}}, "env"),
            ({"code": "x", "env": ["A=1"]}, "env"),
            ({"argv": ["a", 1]}, "argv"),
            ({"argv": []}, "argv"),
            ({"code": "x", "stdin_base64": "?"}, "stdin_base64"),
            ({"code": "x", "stdin": "a", "stdin_base64": "YQ=="}, "stdin"),
            ({"code": "x", "backgrund": True}, "backgrund"),
            ({"code": "x", "background": 1}, "background"),
        ],
    )
    async def test_a_wrong_shape_is_named(self, house: House, body: dict[str, Any], field: str) -> None:
        session = await house.make_session()
        answer = await house.ask("POST", f"/v1/sessions/{session}/runs", body)
        assert (answer.status, answer.json["code"], answer.json["field"]) == (400, "invalid_argument", field)

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"limits": {"memory": 1.5}}, "limits.memory"),
            ({"limits": {"memory": True}}, "limits.memory"),
            ({"limits": {"ram": 1}}, "limits.ram"),
            ({"runtime": "docker"}, "runtime"),
            ({"mounts": ["/p"]}, "mounts[0]"),
            ({"slots": ["/workspace"]}, "slots"),  # of warm sandboxes, not of sessions
            ({"mounts": [{"source": 1}]}, "mounts[0].source"),
            ({"mounts": [{"owner": 0}]}, "mounts[0].owner"),
            ({"mounts": [{"kept": "x"}]}, "mounts[0].kept"),
            ({"read_only": 1}, "read_only"),
            ({"git_ref": "v1"}, "git_ref"),
            ({"git_repo": "/"}, "git_repo"),
            ({"manifest": "nonsense"}, "manifest"),
        ],
    )
    async def test_a_wrong_wish_for_a_session_is_named(self, house: House, body: dict[str, Any], field: str) -> None:
        answer = await house.ask("POST", "/v1/sessions", body)
        assert (answer.status, answer.json["field"]) == (400, field)

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"1", b'{"code": "a"', b"[" * 100_000])
    async def test_what_is_no_json_object_is_refused(self, house: House, body: bytes) -> None:
        answer = await house.ask("POST", "/v1/sessions", body, {"Content-Type": "application/json"})
        assert (answer.status, answer.json["code"]) == (400, "invalid_json")

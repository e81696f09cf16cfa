"""Every method of the gateway, also with clients that do not behave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS
from tests.cli.machine import wait_until
from tests.gateway.house import Guest, House, collect


@pytest.fixture(scope="module")
def guest(house: House) -> Guest:
    return house.tenant("acme")


@pytest.fixture(scope="module")
def session(guest: Guest) -> str:
    return guest.create()


def running(guest: Guest, session: str) -> list[str]:
    return [process.command for process in guest.call("Ps", pb.PsRequest(session_id=session)).processes]


class TestChildren:
    def test_live_with_their_parent(self, guest: Guest) -> None:
        parent = guest.create(allowed_hosts=["a.example"])
        request = pb.RunSubAgentRequest(
            parent_session_id=parent,
            agent_type="reviewer",
            workspace_path="part",
            env={"COLOUR": "red"},
            env_bytes={"ODD": b"\xff"},
            limits=pb.Limits(memory=64 << 20),
            ttl=90,
            deny_all_hosts=True,
            read_only=False,
        )
        created = guest.call("RunSubAgent", request)
        child = guest.call("GetSession", pb.GetSessionRequest(session_id=created.session_id)).session
        assert child == created.session
        assert (child.parent_session_id, child.tenant_id, child.ttl) == (parent, "acme", 90)
        assert (child.limits.memory, child.limits.cpus, list(child.allowed_hosts)) == (64 << 20, 1.0, [])
        shown = guest.call("GetSession", pb.GetSessionRequest(session_id=parent)).session
        assert (list(shown.children), shown.parent_session_id) == ([created.session_id], "")
        assert guest.run(created.session_id, 'pwd; printf "%s" "$COLOUR$ODD"').stdout == b"/workspace/part\nred\xff"
        guest.call("DestroySession", pb.DestroySessionRequest(session_id=parent))
        code, detail = guest.refused("GetSession", pb.GetSessionRequest(session_id=created.session_id))
        assert code is grpc.StatusCode.NOT_FOUND
        assert detail is not None
        assert "parent" in detail.detail

    def test_have_no_more_than_their_parent(self, guest: Guest) -> None:
        parent = guest.create(allowed_hosts=["a.example"])
        child = guest.call("RunSubAgent", pb.RunSubAgentRequest(parent_session_id=parent)).session_id
        for request, field in (
            (pb.RunSubAgentRequest(parent_session_id=parent, allowed_hosts=["b.example"]), "allowed_hosts"),
            (pb.RunSubAgentRequest(parent_session_id=parent, limits=pb.Limits(pids=100_000)), "limits.pids"),
            (pb.RunSubAgentRequest(parent_session_id=child), "parent_session_id"),
        ):
            code, detail = guest.refused("RunSubAgent", request)
            assert (code, detail and detail.field) == (grpc.StatusCode.PERMISSION_DENIED, field)


class TestSessions:
    def test_live_from_create_to_destroy(self, guest: Guest) -> None:
        request = pb.CreateSessionRequest(
            env={"COLOUR": "red"}, env_bytes={"ODD": b"\xff"}, ttl=90, limits=pb.Limits(memory=64 << 20)
        )
        created = guest.call("CreateSession", request)
        session = guest.call("GetSession", pb.GetSessionRequest(session_id=created.session_id)).session
        assert session == created.session
        assert (session.tenant_id, session.phase, session.owner) == ("acme", "active", -1)
        assert (list(session.env_keys), session.ttl) == (["COLOUR", "ODD"], 90)
        assert (session.limits.memory, session.limits.cpus) == (64 << 20, 1.0)
        assert guest.run(session.session_id, 'printf "%s" "$COLOUR$ODD"').stdout == b"red\xff"
        guest.call("DestroySession", pb.DestroySessionRequest(session_id=session.session_id))
        code, detail = guest.refused("GetSession", pb.GetSessionRequest(session_id=session.session_id))
        assert (code, detail and detail.code) == (grpc.StatusCode.NOT_FOUND, "session_not_found")
        listed = guest.call("ListSessions", pb.ListSessionsRequest(phase="all")).sessions
        assert [one.phase for one in listed if one.session_id == session.session_id] == ["destroyed"]

    def test_have_a_list_of_hosts(self, guest: Guest) -> None:
        def list_hosts(**fields: object) -> list[str]:
            created = guest.call("CreateSession", pb.CreateSessionRequest(**fields))  # type: ignore[arg-type]
            return list(created.session.allowed_hosts)

        assert list_hosts(allowed_hosts=["B.example", "a.example"]) == ["a.example", "b.example"]
        assert list_hosts(deny_all_hosts=True) == []
        assert list_hosts() != []

    def test_whose_list_changes_while_they_live(self, guest: Guest) -> None:
        session = guest.create(allowed_hosts=["a.example"])

        def update(**fields: object) -> list[str]:
            request = pb.UpdateAllowedHostsRequest(session_id=session, **fields)  # type: ignore[arg-type]
            return list(guest.call("UpdateAllowedHosts", request).allowed_hosts)

        assert update(add=["b.example"]) == ["a.example", "b.example"]
        assert update(remove=["a.example"]) == ["b.example"]
        assert update(allowed_hosts=["c.example"]) == ["c.example"]
        assert update(clear=True) == []

    def test_begin_with_a_manifest(self, guest: Guest) -> None:
        session = guest.create(manifest='- file: {path: a/b.txt, content: "hello"}')
        request = pb.ReadFileRequest(session_id=session, path="a/b.txt")
        assert guest.call("ReadFile", request).content == b"hello"


class TestExec:
    def test_gives_exact_bytes_and_the_exit_code(self, guest: Guest, session: str) -> None:
        run = guest.run(session, "printf 'a\\0\\377'; printf err >&2; exit 7")
        assert (run.stdout, run.stderr, run.exit_code, run.status) == (b"a\0\xff", b"err", 7, "completed")
        assert (run.session_id, run.stdout_bytes, run.truncated) == (session, 3, False)

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"command": "import sys; print(sys.argv)", "language": "python"}, b"['-c']\n"),
            ({"argv": [b"printf", b"%s", b"\xfe\xff $x"]}, b"\xfe\xff $x"),
            ({"command_bytes": b"printf \xfe"}, b"\xfe"),
            ({"command": "pwd", "workdir": "/tmp"}, b"/tmp\n"),
            ({"command": "cat", "stdin": b"\0in\xff"}, b"\0in\xff"),
            ({"command": "printf $A$B", "env": {"A": "1"}, "env_bytes": {"B": b"\xfd"}}, b"1\xfd"),
        ],
    )
    def test_takes_what_is_to_be_run_exactly(
        self, guest: Guest, session: str, fields: dict[str, object], expected: bytes
    ) -> None:
        request = pb.ExecRequest(session_id=session, **fields)  # type: ignore[arg-type]
        assert guest.call("Exec", request).stdout == expected

    def test_says_when_the_time_was_up(self, guest: Guest, session: str) -> None:
        run = guest.run(session, "echo so far; sleep 60", timeout=0.3)
        assert (run.exit_code, run.status, run.stdout) == (124, "timed_out", b"so far\n")

    def test_in_the_background_is_polled_and_killed(self, guest: Guest, session: str) -> None:
        run = guest.run(session, "echo begun; sleep 60", background=True)
        assert (run.status, run.HasField("exit_code")) == ("running", False)
        ask = pb.PollRunRequest(run_id=run.run_id)
        wait_until(lambda: guest.call("PollRun", ask).run.stdout_bytes == 6)
        kill = pb.KillRunRequest(run_id=run.run_id)
        assert guest.call("KillRun", kill).had_ended is False
        ended = guest.call("PollRun", ask).run
        assert guest.call("KillRun", kill).had_ended is True
        assert (ended.status, ended.stdout) == ("killed", b"begun\n")
        logged = guest.call("Log", pb.LogRequest(session_id=session)).runs
        assert ended.run_id in [one.run_id for one in logged]

    def test_ends_with_a_client_that_has_no_more_time(self, guest: Guest, session: str) -> None:
        with pytest.raises(grpc.RpcError) as late:
            guest.call("Exec", pb.ExecRequest(session_id=session, command="sleep 61"), seconds=0.5)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: running(guest, session) == [])

    def test_of_packages_is_pip(self, guest: Guest) -> None:
        session = guest.create(env={"PIP_BREAK_SYSTEM_PACKAGES": "1"})  # the test engine has the machine's own pip
        answer = guest.call("PipInstall", pb.PipInstallRequest(session_id=session, packages=["./not-there-at-all"]))
        assert answer.exit_code != 0
        assert b"not-there-at-all" in answer.output
        code, detail = guest.refused("PipInstall", pb.PipInstallRequest(session_id=session, packages=["--help"]))
        assert (code, detail and detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, "packages[0]")


class TestLiveRuns:
    def test_send_output_and_end_with_the_result(self, guest: Guest, session: str) -> None:
        command = "for i in 1 2 3; do echo $i; echo $i >&2; done; exit 9"
        frames = guest.begin("ExecStream", pb.ExecRequest(session_id=session, command=command))
        stdout, stderr, result = collect(frames)
        assert (stdout, stderr, result.exit_code) == (b"1\n2\n3\n", b"1\n2\n3\n", 9)
        assert (result.stdout, result.stdout_bytes) == (b"", 6)

    def test_are_not_cut(self, guest: Guest, session: str) -> None:
        frames = guest.begin(
            "ExecStream", pb.ExecRequest(session_id=session, command="head -c 5000000 /dev/zero", timeout=50)
        )
        stdout, _, result = collect(frames)
        assert (len(stdout), result.truncated) == (5_000_000, True)

    def test_are_fed_as_they_run(self, guest: Guest, session: str) -> None:
        content = os.urandom(3_000_000)
        start = pb.ExecInput(start=pb.ExecRequest(session_id=session, command="cat", stdin=b"first"))
        pieces = [pb.ExecInput(stdin=content[at : at + 500_000]) for at in range(0, len(content), 500_000)]
        stdout, _, result = collect(guest.begin("ExecInteractive", start, *pieces))
        assert (stdout == b"first" + content, result.exit_code) == (True, 0)

    @pytest.mark.parametrize(
        "messages",
        [
            [pb.ExecInput(stdin=b"x")],
            [pb.ExecInput(start=pb.ExecRequest(session_id="S", command="cat")), pb.ExecInput()],
            [pb.ExecInput(start=pb.ExecRequest(session_id="S", command="cat")), pb.ExecInput(stdin=bytes(2 << 20))],
        ],
    )
    def test_are_not_run_with_input_that_is_not_whole(
        self, guest: Guest, session: str, messages: list[pb.ExecInput]
    ) -> None:
        for message in messages:
            if message.HasField("start"):
                message.start.session_id = session
        code, _ = guest.refused("ExecInteractive", *messages)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        wait_until(lambda: running(guest, session) == [])

    @pytest.mark.parametrize(
        "messages",
        [
            [pb.OpenTerminalRequest(input=b"x")],
            [pb.OpenTerminalRequest(options=pb.TerminalOptions()), pb.OpenTerminalRequest()],
            [pb.OpenTerminalRequest(options=pb.TerminalOptions()), pb.OpenTerminalRequest(input=bytes(2 << 20))],
            [
                pb.OpenTerminalRequest(options=pb.TerminalOptions()),
                pb.OpenTerminalRequest(size=pb.TerminalSize(rows=-1)),
            ],
        ],
    )
    def test_terminals_take_nothing_but_keys_and_sizes(
        self, guest: Guest, session: str, messages: list[pb.OpenTerminalRequest]
    ) -> None:
        for message in messages:
            if message.HasField("options"):
                message.options.session_id = session
        code, _ = guest.refused("OpenTerminal", *messages)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        for run in guest.call("Log", pb.LogRequest(session_id=session)).runs:
            assert run.terminal or run.status != "running", "what was left runs on"
            guest.call("KillRun", pb.KillRunRequest(run_id=run.run_id))

    @pytest.mark.parametrize("method", ["ExecStream", "ExecInteractive"])
    def test_end_with_their_tree_when_the_client_goes_away(self, guest: Guest, session: str, method: str) -> None:
        command = "echo on; (setsid sleep 62 &) ; sleep 62"
        request = pb.ExecRequest(session_id=session, command=command)
        message = request if method == "ExecStream" else pb.ExecInput(start=request)
        call = guest.begin(method, message)
        assert next(call).HasField("started")
        assert next(call).output.data == b"on\n"
        call.cancel()
        wait_until(lambda: guest.run(session, "pgrep -c sleep").stdout == b"0\n")

    def test_a_connection_that_breaks_ends_what_is_waited_for_and_nothing_else(
        self, house: House, guest: Guest, session: str
    ) -> None:
        other = house.meet(guest.key, guest.certificate)
        background = other.run(session, "sleep 63", background=True)
        call = other.begin("ExecStream", pb.ExecRequest(session_id=session, command="sleep 64"))
        assert next(call).HasField("started")
        other.close()
        wait_until(lambda: len(running(guest, session)) == 1)
        assert guest.call("PollRun", pb.PollRunRequest(run_id=background.run_id)).run.status == "running"
        guest.call("KillRun", pb.KillRunRequest(run_id=background.run_id))


class TestFiles:
    @pytest.mark.parametrize("fields", [{"path": "a b/ü.bin"}, {"path_bytes": b"odd/\xff\xfe"}])
    def test_are_written_appended_to_read_and_listed(
        self, guest: Guest, session: str, fields: dict[str, object]
    ) -> None:
        def write(content: bytes, mode: str) -> int:
            request = pb.WriteFileRequest(session_id=session, content=content, mode=mode, **fields)  # type: ignore[arg-type]
            return int(guest.call("WriteFile", request).bytes)

        assert (write(b"\0\xff", ""), write(b"end", "a")) == (2, 3)
        read = guest.call("ReadFile", pb.ReadFileRequest(session_id=session, **fields))  # type: ignore[arg-type]
        assert read.content == b"\0\xffend"
        files = guest.call("ListFiles", pb.ListFilesRequest(session_id=session)).files
        found = [file for file in files if (file.path_bytes or file.path.encode()).endswith((b"\xff\xfe", b".bin"))]
        assert {file.size for file in found} == {5}
        exact = {file.path_bytes or file.path.encode() for file in found}
        name = fields.get("path_bytes") or str(fields["path"]).encode()
        assert b"/workspace/" + name in exact  # type: ignore[operator]
        later = pb.ListFilesRequest(session_id=session, since=found[0].modified + 3600)
        assert list(guest.call("ListFiles", later).files) == []

    def test_of_any_size_go_in_and_out_in_pieces(self, guest: Guest, session: str) -> None:
        piece = os.urandom(1 << 20)
        size = 70 * len(piece)

        def upload() -> Iterator[pb.UploadFileRequest]:
            yield pb.UploadFileRequest(header=pb.UploadHeader(session_id=session, path="new/large"))
            for _ in range(70):
                yield pb.UploadFileRequest(content=piece)

        method = METHODS["UploadFile"]
        call = guest.channel.stream_unary(method.path, method.request.SerializeToString, method.response.FromString)
        assert call(upload(), timeout=60).bytes == size  # type: ignore[attr-defined]
        taken = 0
        for part in guest.begin("DownloadFile", pb.DownloadFileRequest(session_id=session, path="new/large")):
            start = taken % len(piece)
            assert (piece + piece)[start : start + len(part.content)] == part.content
            taken += len(part.content)
        assert taken == size
        some = pb.DownloadFileRequest(session_id=session, path="new/large", offset=len(piece) - 1, length=3)
        parts = b"".join(part.content for part in guest.begin("DownloadFile", some))
        assert parts == piece[-1:] + piece[:2]
        # Too large for one message, which is said rather than done by halves.
        code, detail = guest.refused("ReadFile", pb.ReadFileRequest(session_id=session, path="new/large"))
        assert (code, detail and detail.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_big")
        guest.run(session, "rm -r new")

    def test_of_an_upload_that_breaks_off(self, guest: Guest, session: str) -> None:
        """A new one is not there, an old one has what has come."""
        guest.call("WriteFile", pb.WriteFileRequest(session_id=session, path="old", content=b"before"))
        for path in ("old", "new"):
            header = pb.UploadFileRequest(header=pb.UploadHeader(session_id=session, path=path))
            code, _ = guest.refused("UploadFile", header, pb.UploadFileRequest(content=b"half"), pb.UploadFileRequest())
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        content = guest.call("ReadFile", pb.ReadFileRequest(session_id=session, path="old")).content
        assert b"half".startswith(content)
        code, _ = guest.refused("ReadFile", pb.ReadFileRequest(session_id=session, path="new"))
        assert code is grpc.StatusCode.NOT_FOUND

    def test_are_read_in_parts(self, guest: Guest, session: str) -> None:
        guest.call("WriteFile", pb.WriteFileRequest(session_id=session, path="digits", content=b"0123456789"))
        for offset, length, content in (
            (0, 0, b"0123456789"),
            (3, 4, b"3456"),
            (8, 0, b"89"),
            (8, 9, b"89"),
            (11, 0, b""),
        ):
            where: dict[str, Any] = {"session_id": session, "path": "digits", "offset": offset, "length": length}
            assert guest.call("ReadFile", pb.ReadFileRequest(**where)).content == content
        code, detail = guest.refused("ReadFile", pb.ReadFileRequest(session_id=session, path="digits", offset=-1))
        assert detail is not None
        assert (code, detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, "offset")


class TestErrors:
    @pytest.mark.parametrize(
        ("method", "message", "code", "word", "field"),
        [
            ("Exec", pb.ExecRequest(session_id="S"), "OK", "", ""),
            ("Exec", pb.ExecRequest(session_id="-x"), "INVALID_ARGUMENT", "invalid_argument", "session_id"),
            ("Exec", pb.ExecRequest(session_id="S", command="true", timeout=-1), "INVALID_ARGUMENT", "", "timeout"),
            ("Exec", pb.ExecRequest(session_id="S", command="true", timeout=float("nan")), "INVALID_ARGUMENT", "", ""),
            ("Exec", pb.ExecRequest(session_id="S", language="cobol"), "INVALID_ARGUMENT", "", "language"),
            (
                "Exec",
                pb.ExecRequest(session_id="S", command="a", command_bytes=b"b"),
                "INVALID_ARGUMENT",
                "",
                "command",
            ),
            ("Exec", pb.ExecRequest(session_id="S", command="a", argv=[b"b"]), "INVALID_ARGUMENT", "", "argv"),
            ("Exec", pb.ExecRequest(session_id="S", argv=[b"/nowhere"]), "UNAVAILABLE", "program_not_found", "argv"),
            ("Exec", pb.ExecRequest(session_id="S", command="a", workdir="/no"), "INVALID_ARGUMENT", "", "workdir"),
            ("ExecStream", pb.ExecRequest(session_id="S", background=True), "INVALID_ARGUMENT", "", "background"),
            ("ReadFile", pb.ReadFileRequest(session_id="S", path="no"), "NOT_FOUND", "file_not_found", ""),
            ("ReadFile", pb.ReadFileRequest(session_id="S", path="/dev/zero"), "INVALID_ARGUMENT", "", ""),
            ("WriteFile", pb.WriteFileRequest(session_id="S", path="x", mode="r"), "INVALID_ARGUMENT", "", "mode"),
            ("WriteFile", pb.WriteFileRequest(session_id="S"), "INVALID_ARGUMENT", "", "path"),
            ("ListFiles", pb.ListFilesRequest(session_id="S", since=float("inf")), "INVALID_ARGUMENT", "", "since"),
            ("DownloadFile", pb.DownloadFileRequest(session_id="S", path="x", offset=-1), "INVALID_ARGUMENT", "", ""),
            ("PollRun", pb.PollRunRequest(run_id="run-0"), "NOT_FOUND", "run_not_found", ""),
            ("ListSessions", pb.ListSessionsRequest(phase="?"), "INVALID_ARGUMENT", "", "phase"),
            ("CreateSession", pb.CreateSessionRequest(session_id="S"), "ALREADY_EXISTS", "session_exists", ""),
            ("CreateSession", pb.CreateSessionRequest(runtime_class="x"), "INVALID_ARGUMENT", "", "runtime_class"),
            ("CreateSession", pb.CreateSessionRequest(runtime_class="kata"), "UNAVAILABLE", "runtime_unavailable", ""),
            ("CreateSession", pb.CreateSessionRequest(tenant_id="b"), "PERMISSION_DENIED", "wrong_tenant", "tenant"),
            ("CreateSession", pb.CreateSessionRequest(manifest="- x"), "INVALID_ARGUMENT", "", ""),
            ("CreateSession", pb.CreateSessionRequest(env={"1": ""}), "INVALID_ARGUMENT", "", "env"),
            ("RunSubAgent", pb.RunSubAgentRequest(), "INVALID_ARGUMENT", "", "parent_session_id"),
            ("RunSubAgent", pb.RunSubAgentRequest(parent_session_id="none"), "NOT_FOUND", "session_not_found", ""),
            ("ConfirmAction", pb.ConfirmActionRequest(session_id="S"), "INVALID_ARGUMENT", "", "action"),
            ("ConfirmAction", pb.ConfirmActionRequest(approval_id="a", action="x"), "INVALID_ARGUMENT", "", ""),
            ("ConfirmAction", pb.ConfirmActionRequest(approval_id="a", timeout=-1), "INVALID_ARGUMENT", "", "wait"),
            ("ConfirmAction", pb.ConfirmActionRequest(approval_id="a"), "NOT_FOUND", "approval_not_found", ""),
            ("ListApprovals", pb.ListApprovalsRequest(status="x"), "INVALID_ARGUMENT", "", "status"),
        ],
    )
    def test_have_the_right_status_and_details(
        self, guest: Guest, session: str, method: str, message: Any, code: str, word: str, field: str
    ) -> None:
        request = type(message)()
        request.CopyFrom(message)
        if getattr(request, "session_id", "") == "S":
            request.session_id = session
        if code == "OK":
            guest.call(method, request)
            return
        status, detail = guest.refused(method, request)
        assert detail is not None
        assert (status.name, detail.code) == (code, word or detail.code)
        assert (detail.field, bool(detail.error)) == (field or detail.field, True)

    @pytest.mark.parametrize("path", ["\u20ac" * 1300, "/" + "\U0001f600" * 1000, "\x01" * 4000, "%" * 4000])
    def test_quote_whatever_it_is_and_still_arrive(self, guest: Guest, session: str, path: str) -> None:
        code, detail = guest.refused("ReadFile", pb.ReadFileRequest(session_id=session, path=path))
        assert detail is not None
        assert (code, detail.code) in (
            (grpc.StatusCode.NOT_FOUND, "file_not_found"),
            (grpc.StatusCode.INVALID_ARGUMENT, "name_too_long"),
        )


class TestTheServiceItself:
    def test_says_who_is_calling(self, house: House, guest: Guest) -> None:
        status = guest.call("Status", pb.StatusRequest())
        assert (status.available, status.runtime_class) == (True, "native")
        assert (status.name, status.tenant_id, status.scope) == ("acme", "acme", "run")
        status = house.root().call("Status", pb.StatusRequest())
        assert (status.name, status.tenant_id, status.scope) == ("uid:0", "", "admin")

    def test_has_health_for_everybody(self, house: House) -> None:
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        stub = health_pb2_grpc.HealthStub(house.unauthenticated().channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "sandbox.v1.SandboxService"):
            assert stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30).status == serving
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert next(watching).status == serving
        watching.cancel()
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="x"), timeout=30)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

    def test_describes_itself(self, guest: Guest) -> None:
        from google.protobuf.descriptor_pool import DescriptorPool
        from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(guest.channel))
        service = pool.FindServiceByName("sandbox.v1.SandboxService")
        assert {method.name for method in service.methods} == set(METHODS)

    def test_knows_no_other_method(self, guest: Guest) -> None:
        assert guest.send("/sandbox.v1.SandboxService/Nope", b"") is grpc.StatusCode.UNIMPLEMENTED

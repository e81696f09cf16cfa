"""The service over gRPC, at a gateway (docs/gateway.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import grpc

from k8e.cli.client import Answer, SessionName
from k8e.cli.process import Failure, read_some
from k8e.cli.remote import messages
from k8e.cli.remote.calls import DONE, serialize, write
from k8e.cli.remote.messages import decode, readable
from k8e.cli.remote.terminal import RemoteTerminal
from k8e.cli.remote.trees import RemoteTrees
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS
from k8e.doors.http import answers

if TYPE_CHECKING:
    from k8e.cli.client.service import Wanted

MARGIN: Final = 60.0
CREATE: Final = 1800.0
START: Final = 300.0
FILE: Final = 600.0
Explain = Callable[[Any], Failure]


class RemoteClient(RemoteTrees):
    """Sends one request after the other on one channel. No request is sent twice that may have arrived."""

    def status(self) -> Answer:
        answer = self._ask("Status", pb.StatusRequest())
        status = answers.show_status(messages.read_status(answer))
        who = answers.show_caller(answer.name, answer.tenant_id, answer.scope)
        return write({**status, **who, "gateway": {"endpoint": self.endpoint, "problem": ""}})

    # Sessions

    def create_session(self, wanted: Wanted) -> Answer:
        answer = self._call("CreateSession", messages.write_session(wanted), seconds=CREATE)
        return write(answers.show_created(messages.read_session(answer.session)))

    def create_child(self, parent: SessionName, wanted: Wanted) -> Answer:
        request = messages.write_child(parent.session_id, wanted)
        answer = self._call("RunSubAgent", request, parent, seconds=CREATE)
        return write(answers.show_child(messages.read_session(answer.session)))

    def list_sessions(self, phase: str, tenant_id: str = "", owner: str = "", *, load: bool = False) -> Answer:
        request = pb.ListSessionsRequest(phase=phase, load=load)
        answer = self._ask("ListSessions", request, SessionName("", tenant_id, owner))
        found = [answers.show_session(messages.read_session(session)) for session in answer.sessions]
        return write({"sessions": found})

    def get_session(self, session: SessionName) -> Answer:
        request = pb.GetSessionRequest(session_id=readable(session.session_id))
        answer = self._ask("GetSession", request, session)
        return write(answers.show_session_with_denials(messages.read_session(answer.session)))

    def stop_session(self, session: SessionName) -> Answer:
        request = pb.StopSessionRequest(session_id=readable(session.session_id))
        answer = self._call("StopSession", request, session)
        return write(answers.show_session(messages.read_session(answer.session)))

    def start_session(self, session: SessionName, wanted: Wanted) -> Answer:
        request = messages.write_start(session.session_id, wanted)
        answer = self._call("StartSession", request, session, seconds=START)
        return write(answers.show_session(messages.read_session(answer.session)))

    def destroy_session(self, session: SessionName) -> Answer:
        request = pb.DestroySessionRequest(session_id=readable(session.session_id))
        self._call("DestroySession", request, session)
        return DONE

    def get_hosts(self, session: SessionName) -> Answer:
        request = pb.GetSessionRequest(session_id=readable(session.session_id))
        answer = self._ask("GetSession", request, session)
        return write(answers.show_hosts(messages.read_session(answer.session)))

    def change_hosts(self, session: SessionName, change: Wanted) -> Answer:
        sid, hosts = readable(session.session_id), change.get("hosts")
        request = pb.UpdateAllowedHostsRequest(
            session_id=sid,
            allowed_hosts=map(readable, hosts or ()),
            clear=change.get("clear", False) or hosts == [],
            add=map(readable, change.get("add", ())),
            remove=map(readable, change.get("remove", ())),
        )
        answer = self._call("UpdateAllowedHosts", request, session)
        return write({"session_id": sid, "policy": {"allowed_hosts": list(answer.allowed_hosts)}})

    # Runs

    def run(self, session: SessionName, wanted: Wanted, stdin: bytes) -> Answer:
        request = messages.write_run(session.session_id, wanted, stdin)
        run = messages.read_run(self._call("Exec", request, session, seconds=wanted["timeout"] + MARGIN))
        return write(answers.show_run(run), run.exit_code)

    def stream_run(self, session: SessionName, wanted: Wanted, *, feeds: bool) -> RemoteStream:
        request = messages.write_run(session.session_id, wanted)
        method = METHODS["ExecInteractive" if feeds else "ExecStream"]
        kind = self._channel.stream_stream if feeds else self._channel.unary_stream
        call: Any = kind(method.path, serialize, method.response.FromString)
        seconds = wanted["timeout"] + MARGIN

        def attempt() -> RemoteStream:
            stdin = Stdin(pb.ExecInput(start=request))
            started = self._begin(call, stdin.messages() if feeds else request, session, seconds)
            return RemoteStream(started, stdin, self._explain)

        return self._repeat(attempt)

    def open_terminal(self, session: SessionName, wanted: Wanted) -> RemoteTerminal:
        method = METHODS["OpenTerminal"]
        call: Any = self._channel.stream_stream(method.path, serialize, method.response.FromString)

        def begin(sent: Iterator[pb.OpenTerminalRequest]) -> Any:
            return self._begin(call, sent, session)

        return self._repeat(lambda: RemoteTerminal(session, wanted, begin, self._explain))

    def get_run(self, run_id: str, stdout_from: int = 0, stderr_from: int = 0, wait: float = 0) -> Answer:
        request = pb.PollRunRequest(
            run_id=readable(run_id), stdout_from=stdout_from, stderr_from=stderr_from, wait=wait
        )
        run = messages.read_run(self._ask("PollRun", request, seconds=wait + MARGIN).run)
        return write(answers.show_run(run), run.exit_code)

    def kill_run(self, run_id: str) -> Answer:
        answer = self._call("KillRun", pb.KillRunRequest(run_id=readable(run_id)))
        return write({"ok": True, "had_ended": answer.had_ended})

    def list_runs(self, session: SessionName) -> Answer:
        answer = self._ask("Log", pb.LogRequest(session_id=readable(session.session_id)), session)
        return write({"runs": [answers.show_run_summary(messages.read_run(run)) for run in answer.runs]})

    def list_processes(self, session: SessionName) -> Answer:
        answer = self._ask("Ps", pb.PsRequest(session_id=readable(session.session_id)), session)
        processes = [answers.show_command(messages.read_process(process)) for process in answer.processes]
        return write({"processes": processes})

    # Files

    def read_file(self, session: SessionName, path: str, offset: int = 0, length: int | None = None) -> Answer:
        where = messages.name_part(path, offset, length)
        request = pb.ReadFileRequest(session_id=readable(session.session_id), **where)
        content = bytes(self._ask("ReadFile", request, session, seconds=FILE).content)
        return write(answers.show_file(decode(path), content))

    def write_file(self, session: SessionName, path: str, content: bytes, mode: str) -> Answer:
        where = messages.split_text("path", path)
        request = pb.WriteFileRequest(session_id=readable(session.session_id), **where, content=content, mode=mode)
        size = self._call("WriteFile", request, session, seconds=FILE).bytes
        return write({"ok": True, "path": decode(path), "bytes": size})

    def list_files(self, session: SessionName, path: str, since: float) -> Answer:
        where = messages.split_text("path", path)
        request = pb.ListFilesRequest(session_id=readable(session.session_id), **where, since=since)
        answer = self._ask("ListFiles", request, session)
        return write({"files": [messages.show_file(file) for file in answer.files]})

    # Approvals

    def request_approval(self, session: SessionName, action: str, timeout: float | None) -> Answer:
        request = pb.ConfirmActionRequest(
            session_id=readable(session.session_id), action=readable(action), expires_in=timeout or 0
        )
        return show_approval(self._call("ConfirmAction", request, session))

    def get_approval(self, approval_id: str, wait: float = 0) -> Answer:
        request = pb.ConfirmActionRequest(approval_id=readable(approval_id), timeout=wait)
        return show_approval(self._ask("ConfirmAction", request, seconds=wait + MARGIN))

    def list_approvals(self, status: str) -> Answer:
        answer = self._ask("ListApprovals", pb.ListApprovalsRequest(status=status))
        found = [answers.show_approval(messages.read_approval(approval)) for approval in answer.approvals]
        return write({"approvals": found})

    def check_approval(self, approval_id: str) -> Answer:
        request = pb.ConfirmActionRequest(approval_id=readable(approval_id), may_answer=True)
        return show_approval(self._ask("ConfirmAction", request))

    def answer_approval(self, approval_id: str, reason: str, *, approved: bool) -> Answer:
        request = pb.ApproveActionRequest(approval_id=readable(approval_id), approved=approved, reason=readable(reason))
        return show_approval(self._call("ApproveAction", request), ok=True)

    # Images and API keys

    def list_images(self) -> Answer:
        answer = self._ask("ListImages", pb.ListImagesRequest())
        return write({"images": [answers.show_image(messages.read_image(image)) for image in answer.images]})

    def create_key(self, wanted: Wanted) -> Answer:
        request = pb.CreateApiKeyRequest(
            name=readable(wanted["name"]),
            ttl=-1 if wanted["for_ever"] else wanted["ttl"],
            scope=wanted["scope"],
            tenant_ids=map(readable, wanted.get("tenant_ids", ())),
        )
        answer = self._call("CreateApiKey", request)
        return write(answers.show_new_key(messages.show_key(answer.api_key), answer.key, self.endpoint))

    def list_keys(self) -> Answer:
        answer = self._ask("ListApiKeys", pb.ListApiKeysRequest())
        return write({"keys": [messages.show_key(key) for key in answer.api_keys]})

    def delete_key(self, name: str) -> Answer:
        self._call("DeleteApiKey", pb.DeleteApiKeyRequest(name=readable(name)))
        return DONE


class RemoteStream:
    """A run whose output is still coming. Until it has started, an error is the whole answer."""

    def __init__(self, call: Any, stdin: Stdin, explain: Explain) -> None:
        self._call = call
        self._explain = explain
        self.result = Answer(b"")
        self.feed = stdin.feed
        try:
            started = next(call).started
        except grpc.RpcError as error:
            stdin.end()
            raise explain(error) from error
        self.run_id, self.session_id = started.run_id, started.session_id

    def output(self) -> Iterator[tuple[int, bytes]]:
        try:
            for frame in self._call:
                if frame.HasField("output"):
                    yield frame.output.stream, frame.output.data
                else:
                    result = messages.read_run(frame.result)
                    self.result = write(answers.show_run_summary(result), result.exit_code)
                    return
            raise Failure(
                "answer_unusable", "the gateway's answer ended without a result", hint="is the gateway of this version?"
            )
        except grpc.RpcError as error:
            raise self._explain(error) from error


class Stdin:
    """The messages of a run that is fed: its start, then the command's stdin from `feed` on."""

    def __init__(self, start: pb.ExecInput) -> None:
        self._start = start
        self._fed = threading.Event()
        self._descriptor = -1

    def feed(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._fed.set()

    def end(self) -> None:
        """The call has failed: nothing was read, and nothing will be."""
        self._fed.set()

    def messages(self) -> Iterator[pb.ExecInput]:
        """Runs in a thread of gRPC, which asks for more when it has sent what it had."""
        yield self._start
        self._fed.wait()
        if self._descriptor < 0:
            return
        while piece := read_some(self._descriptor):
            yield pb.ExecInput(stdin=piece)


def show_approval(answer: Any, *, ok: bool = False) -> Answer:
    shown = answers.show_approval(messages.read_approval(answer.approval))
    return write({"ok": True, **shown} if ok else shown)

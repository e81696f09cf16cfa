"""What `Client` is for the daemon of this machine, for a gateway: the same requests, the same answers."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from k8e.cli.client.http import BYTES
from k8e.cli.process import Failure, read_some
from k8e.cli.remote import connection, messages
from k8e.cli.remote.discovery import Target
from k8e.cli.remote.replies import LiveReply, Reply
from k8e.core.errors import Fault
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS, OWNER_KEY, TENANT_KEY
from k8e.doors.http import answers, requests
from k8e.doors.http.errors import describe
from k8e.doors.http.fields import Fields

MARGIN: Final = 60.0

_STATUS: Final = {
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNAUTHENTICATED: 401,
}


@dataclass(frozen=True, slots=True)
class Asked:
    parts: tuple[str, ...]
    query: Mapping[str, str]
    body: bytes
    accept: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RemoteClient:
    """One request after the other. A request is never sent twice."""

    def __init__(self, target: Target) -> None:
        self.place = target.place
        self.endpoint = target.endpoint
        self._channel = connection.open_channel(target.endpoint, target.roots, target.key, target.certificate)
        self._feeding = threading.Event()
        self._descriptor = -1
        self._harmless = True
        self._meant: tuple[tuple[str, str], ...] = ()  # whose sessions the request is about
        self._table: Mapping[tuple[str, ...], Callable[[Asked], Reply]] = {
            ("GET", "status"): self._status,
            ("POST", "sessions"): self._create,
            ("GET", "sessions"): self._list_sessions,
            ("GET", "sessions", "*"): self._get,
            ("DELETE", "sessions", "*"): self._destroy,
            ("POST", "sessions", "*", "stop"): self._stop,
            ("POST", "sessions", "*", "start"): self._start,
            ("POST", "sessions", "*", "subagents"): self._run_subagent,
            ("GET", "sessions", "*", "hosts"): self._get_hosts,
            ("POST", "sessions", "*", "hosts"): self._set_hosts,
            ("POST", "sessions", "*", "runs"): self._run,
            ("GET", "sessions", "*", "runs"): self._log,
            ("GET", "sessions", "*", "processes"): self._ps,
            ("GET", "sessions", "*", "files"): self._read_file,
            ("PUT", "sessions", "*", "files"): self._write_file,
            ("GET", "sessions", "*", "entries"): self._list_files,
            ("GET", "runs", "*"): self._poll,
            ("POST", "runs", "*", "kill"): self._kill,
            ("POST", "sessions", "*", "approvals"): self._ask,
            ("GET", "approvals"): self._list_approvals,
            ("GET", "approvals", "*"): self._await_answer,
            ("POST", "approvals", "*"): self._answer,
            ("GET", "images"): self._list_images,
            ("POST", "keys"): self._create_key,
            ("GET", "keys"): self._list_keys,
            ("DELETE", "keys", "*"): self._delete_key,
        }

    def request(
        self, method: str, target: str, body: bytes = b"", content_type: str = "", *, accept: str = "*/*"
    ) -> Reply:
        path, _, query = target.partition("?")
        words = [urllib.parse.unquote(word, errors="surrogateescape") for word in path.split("/")[2:]]
        values = self._take_meant(words, query)
        self._harmless = method == "GET"
        handler = self._table.get((method, *("*" if index == 1 else word for index, word in enumerate(words))))
        if handler is None:
            raise Failure("not_remote", "this is not possible over a gateway", hint="use it on the gateway's machine")
        try:
            return handler(Asked(tuple(words), values, body, accept))
        except grpc.RpcError as error:
            return self._explain(error)
        except Fault as fault:  # what is wrong with the request can be seen from here
            status, problem = describe(fault)
            return Reply(status, answers.encode(problem))

    def _take_meant(self, words: list[str], query: str) -> dict[str, str]:
        """Notes whose sessions are meant; the rest of the query."""
        values = dict(urllib.parse.parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))
        said = [(TENANT_KEY, values.pop("tenant_id", "")), (OWNER_KEY, values.pop("owner", ""))]
        self._meant = tuple((key, plain(value)) for key, value in said if value) if words[0] == "sessions" else ()
        return values

    def upload(self, target: str, first: bytes) -> Reply:
        """A run whose stdin follows (`feed`)."""
        path, _, query = target.partition("?")
        session_id = urllib.parse.unquote(path.split("/")[3], errors="surrogateescape")
        self._take_meant(["sessions"], query)
        self._harmless = False
        try:
            spec = requests.read_run_spec(session_id, Fields(json.loads(first)))
            start = pb.ExecInput(start=messages.write_run(spec))
            method = METHODS["ExecInteractive"]
            call = self._channel.stream_stream(method.path, _serialize, method.response.FromString)
            return LiveReply(
                call(self._stdin(start), timeout=spec.timeout + MARGIN, metadata=self._meant), self._explain
            )
        except grpc.RpcError as error:
            return self._explain(error)

    def feed(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._feeding.set()

    def _stdin(self, start: pb.ExecInput) -> Iterator[pb.ExecInput]:
        """Read in a thread of gRPC's, which asks for more when it has sent what it had."""
        yield start
        self._feeding.wait()
        while piece := read_some(self._descriptor):
            yield pb.ExecInput(stdin=piece)

    def _explain(self, error: Any) -> Reply:
        detail = connection.read_detail(error)
        if detail is None:
            failure = connection.explain(self.endpoint, error, harmless=self._harmless)
            if failure.body["code"] != "message_too_large":
                raise failure from error
            return Reply(413, answers.encode(failure.body))
        return Reply(_STATUS.get(error.code(), 500), answers.encode(connection.show_detail(detail)))

    def _call(self, name: str, message: Any, *, seconds: float = 120.0) -> Any:
        method = METHODS[name]
        call = self._channel.unary_unary(method.path, _serialize, method.response.FromString)
        return call(message, timeout=seconds, metadata=self._meant)

    # The service

    def _status(self, asked: Asked) -> Reply:
        status = answers.show_status(messages.read_status(self._call("Status", pb.StatusRequest())))
        return Reply(200, answers.encode({**status, "gateway": {"endpoint": self.endpoint, "problem": ""}}))

    # Sessions

    def _create(self, asked: Asked) -> Reply:
        answer = self._call("CreateSession", messages.write_session(asked.json), seconds=1800.0)
        return Reply(201, answers.encode(answers.show_created(messages.read_session(answer.session))))

    def _list_sessions(self, asked: Asked) -> Reply:
        answer = self._call("ListSessions", pb.ListSessionsRequest(phase=asked.query.get("phase", "")))
        found = [answers.show_session(messages.read_session(session)) for session in answer.sessions]
        return Reply(200, answers.encode({"sessions": found}))

    def _get(self, asked: Asked) -> Reply:
        answer = self._call("GetSession", pb.GetSessionRequest(session_id=name(asked)))
        return Reply(200, answers.encode(answers.show_session_with_denials(messages.read_session(answer.session))))

    def _destroy(self, asked: Asked) -> Reply:
        self._call("DestroySession", pb.DestroySessionRequest(session_id=name(asked)))
        return DONE

    def _stop(self, asked: Asked) -> Reply:
        answer = self._call("StopSession", pb.StopSessionRequest(session_id=name(asked)))
        return Reply(200, answers.encode(answers.show_session(messages.read_session(answer.session))))

    def _start(self, asked: Asked) -> Reply:
        env, secrets = requests.read_start(Fields(asked.json))
        answer = self._call("StartSession", messages.write_start(name(asked), env, secrets), seconds=300.0)
        return Reply(200, answers.encode(answers.show_session(messages.read_session(answer.session))))

    def _run_subagent(self, asked: Asked) -> Reply:
        request = messages.write_child(name(asked), requests.read_child_spec(Fields(asked.json)))
        answer = self._call("RunSubAgent", request, seconds=1800.0)
        return Reply(201, answers.encode(answers.show_child(messages.read_session(answer.session))))

    def _get_hosts(self, asked: Asked) -> Reply:
        answer = self._call("GetSession", pb.GetSessionRequest(session_id=name(asked)))
        return Reply(200, answers.encode(answers.show_hosts(messages.read_session(answer.session))))

    def _set_hosts(self, asked: Asked) -> Reply:
        change = asked.json
        hosts = change.get("hosts")
        request = pb.UpdateAllowedHostsRequest(
            session_id=name(asked),
            allowed_hosts=hosts or (),
            clear=change.get("clear", False) or hosts == [],
            add=change.get("add", ()),
            remove=change.get("remove", ()),
        )
        answer = self._call("UpdateAllowedHosts", request)
        shown = {"session_id": name(asked), "policy": {"allowed_hosts": list(answer.allowed_hosts)}}
        return Reply(200, answers.encode(shown))

    # Runs

    def _run(self, asked: Asked) -> Reply:
        fields = Fields(asked.json)
        live = fields.take_flag("stream")
        spec = requests.read_run_spec(asked.parts[1], fields)
        request = messages.write_run(spec)
        if live:
            method = METHODS["ExecStream"]
            call = self._channel.unary_stream(method.path, _serialize, method.response.FromString)
            return LiveReply(call(request, timeout=spec.timeout + MARGIN, metadata=self._meant), self._explain)
        run = messages.read_run(self._call("Exec", request, seconds=spec.timeout + MARGIN))
        return Reply(200, answers.encode(answers.show_run(run)), run.exit_code)

    def _log(self, asked: Asked) -> Reply:
        answer = self._call("Log", pb.LogRequest(session_id=name(asked)))
        runs = [answers.show_run_summary(messages.read_run(run)) for run in answer.runs]
        return Reply(200, answers.encode({"runs": runs}))

    def _ps(self, asked: Asked) -> Reply:
        answer = self._call("Ps", pb.PsRequest(session_id=name(asked)))
        processes = [answers.show_command(messages.read_process(process)) for process in answer.processes]
        return Reply(200, answers.encode({"processes": processes}))

    def _poll(self, asked: Asked) -> Reply:
        run = messages.read_run(self._call("PollRun", pb.PollRunRequest(run_id=name(asked))).run)
        return Reply(200, answers.encode(answers.show_run(run)), run.exit_code)

    def _kill(self, asked: Asked) -> Reply:
        self._call("KillRun", pb.KillRunRequest(run_id=name(asked)))
        return DONE

    # Files

    def _read_file(self, asked: Asked) -> Reply:
        path = asked.query["path"]
        request = pb.ReadFileRequest(session_id=name(asked), **messages.split_text("path", path))
        content = self._call("ReadFile", request, seconds=600.0).content
        return Reply(200, content if asked.accept == BYTES else answers.encode(answers.show_file(path, content)))

    def _write_file(self, asked: Asked) -> Reply:
        path = asked.query["path"]
        request = pb.WriteFileRequest(
            session_id=name(asked),
            **messages.split_text("path", path),
            content=asked.body,
            mode=asked.query.get("mode", ""),
        )
        size = self._call("WriteFile", request, seconds=600.0).bytes
        return Reply(200, answers.encode({"ok": True, "path": path, "bytes": size}))

    def _list_files(self, asked: Asked) -> Reply:
        where = messages.split_text("path", asked.query.get("path", ""))
        request = pb.ListFilesRequest(session_id=name(asked), **where, since=float(asked.query.get("since", "0")))
        answer = self._call("ListFiles", request)
        return Reply(200, answers.encode({"files": [messages.show_file(file) for file in answer.files]}))

    # Approvals

    def _ask(self, asked: Asked) -> Reply:
        wanted = asked.json
        request = pb.ConfirmActionRequest(
            session_id=name(asked), action=readable(wanted["action"]), expires_in=wanted.get("timeout", 0)
        )
        answer = self._call("ConfirmAction", request)
        return Reply(201, answers.encode(answers.show_approval(messages.read_approval(answer.approval))))

    def _await_answer(self, asked: Asked) -> Reply:
        seconds = float(asked.query.get("wait", "0"))
        request = pb.ConfirmActionRequest(approval_id=name(asked), timeout=seconds)
        answer = self._call("ConfirmAction", request, seconds=seconds + MARGIN)
        return Reply(200, answers.encode(answers.show_approval(messages.read_approval(answer.approval))))

    def _list_approvals(self, asked: Asked) -> Reply:
        answer = self._call("ListApprovals", pb.ListApprovalsRequest(status=asked.query.get("status", "")))
        found = [answers.show_approval(messages.read_approval(approval)) for approval in answer.approvals]
        return Reply(200, answers.encode({"approvals": found}))

    def _answer(self, asked: Asked) -> Reply:
        wanted = asked.json
        request = pb.ApproveActionRequest(
            approval_id=name(asked), approved=wanted["approved"], reason=readable(wanted.get("reason", ""))
        )
        answer = self._call("ApproveAction", request)
        shown = answers.show_approval(messages.read_approval(answer.approval))
        return Reply(200, answers.encode({"ok": True, **shown}))

    # Images

    def _list_images(self, asked: Asked) -> Reply:
        answer = self._call("ListImages", pb.ListImagesRequest(name=asked.query.get("name", "")))
        found = [answers.show_image(messages.read_image(image)) for image in answer.images]
        return Reply(200, answers.encode({"images": found}))

    # Keys

    def _create_key(self, asked: Asked) -> Reply:
        wanted = asked.json
        request = pb.CreateApiKeyRequest(
            name=wanted.get("name", ""),
            ttl=-1 if wanted.get("for_ever") else wanted.get("ttl", 0),
            scope=wanted.get("scope", ""),
            tenant_ids=wanted.get("tenant_ids", ()),
        )
        answer = self._call("CreateApiKey", request)
        return Reply(
            201, answers.encode(answers.show_new_key(messages.show_key(answer.api_key), answer.key, self.endpoint))
        )

    def _list_keys(self, asked: Asked) -> Reply:
        answer = self._call("ListApiKeys", pb.ListApiKeysRequest())
        return Reply(200, answers.encode({"keys": [messages.show_key(key) for key in answer.api_keys]}))

    def _delete_key(self, asked: Asked) -> Reply:
        self._call("DeleteApiKey", pb.DeleteApiKeyRequest(name=name(asked)))
        return DONE


DONE: Final = Reply(200, answers.encode({"ok": True}))


def name(asked: Asked) -> str:
    """The id in the path. What is no text is no id: the service says so."""
    return readable(asked.parts[1])


def readable(text: str) -> str:
    """For what is text and nothing else."""
    return text.encode("utf-8", "replace").decode()


def plain(text: str) -> str:
    """For metadata, which takes nothing else. What is not plain is nobody's name, and still is not."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())

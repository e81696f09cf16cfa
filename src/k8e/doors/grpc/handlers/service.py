"""Which method is which call of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from k8e.core.access.keys import Keys
from k8e.core.access.turns import Turns
from k8e.core.contract import WholeService
from k8e.core.model import Chunk
from k8e.doors.grpc import answers, requests
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import MARGIN, Call, Handler
from k8e.doors.grpc.errors import malformed
from k8e.doors.grpc.handlers.agents import Agents, Attendance
from k8e.doors.grpc.handlers.approvals import Approvals
from k8e.doors.run_stream import stream_run
from k8e.link.model import Entry

LONG: Final = 1800.0  # repositories are cloned, files of any size go over any line
STDIN_PIECE: Final = 1 << 20
UPLOAD_PATIENCE: Final = 120.0  # between two pieces of a file
_THREADED: Final = 1000  # entries of an answer that is better made beside the loop


class Handlers:
    def __init__(self, service: WholeService, keys: Keys, agents: Attendance) -> None:
        self._agents = Agents(agents)
        self._service = service
        self._keys = keys
        self._large_answers = Turns(16, each=4)

    def table(self) -> Mapping[str, Handler]:
        return {
            "CreateSession": Handler(self._create, LONG),
            "GetSession": Handler(self._get),
            "ListSessions": Handler(self._list_sessions),
            "DestroySession": Handler(self._destroy, 120.0),
            "StopSession": Handler(self._stop, 120.0),
            "StartSession": Handler(self._start, 300.0),
            "UpdateAllowedHosts": Handler(self._update_hosts),
            "Exec": Handler(self._exec, single=True),
            "ExecStream": Handler(self._exec_stream),
            "ExecInteractive": Handler(self._exec_interactive),
            "PollRun": Handler(self._poll),
            "KillRun": Handler(self._kill),
            "Ps": Handler(self._ps),
            "Log": Handler(self._log),
            "PipInstall": Handler(self._pip_install),
            "WriteFile": Handler(self._write_file, 300.0),
            "ReadFile": Handler(self._read_file, 300.0),
            "UploadFile": Handler(self._upload, LONG),
            "DownloadFile": Handler(self._download, LONG),
            "ListFiles": Handler(self._list_files, 120.0),
            "RunSubAgent": Handler(self._run_subagent, LONG),
            **Approvals(self._service.approvals).table(),
            "ListImages": Handler(self._list_images),
            **self._agents.table(),
            "Login": Handler(self._login, unauthenticated=True),
            "Status": Handler(self._status, 120.0),
            "CreateApiKey": Handler(self._create_key),
            "ListApiKeys": Handler(self._list_keys),
            "DeleteApiKey": Handler(self._delete_key),
        }

    # Sessions

    async def _create(self, call: Call) -> None:
        request = await call.read_one(pb.CreateSessionRequest)
        # In a thread, because a large manifest takes its time.
        spec = await asyncio.to_thread(requests.read_session_spec, request, self._service.default_limits)
        session = answers.show_session(await self._service.sessions.create(call.caller, spec))
        answer = pb.CreateSessionResponse(
            session_id=session.session_id, runtime_class=session.runtime_class, session=session
        )
        await call.write(answer)

    async def _get(self, call: Call) -> None:
        request = await call.read_one(pb.GetSessionRequest)
        session = await self._service.sessions.get(call.caller, request.session_id)
        await call.write(pb.GetSessionResponse(session=answers.show_session(session)))

    async def _list_sessions(self, call: Call) -> None:
        request = await call.read_one(pb.ListSessionsRequest)
        if request.phase not in ("", "active", "all"):
            raise requests.invalid("phase", f"{request.phase[:64]!r} is no choice of phases", hint="active or all")
        sessions = await self._service.sessions.list(call.caller, all_phases=request.phase == "all")
        await call.write(pb.ListSessionsResponse(sessions=map(answers.show_session, sessions)))

    async def _destroy(self, call: Call) -> None:
        request = await call.read_one(pb.DestroySessionRequest)
        await self._service.sessions.destroy(call.caller, request.session_id)
        await call.write(pb.DestroySessionResponse())

    async def _stop(self, call: Call) -> None:
        request = await call.read_one(pb.StopSessionRequest)
        session = await self._service.sessions.stop(call.caller, request.session_id)
        await call.write(pb.StopSessionResponse(session=answers.show_session(session)))

    async def _start(self, call: Call) -> None:
        request = await call.read_one(pb.StartSessionRequest)
        env = requests.read_env(request.env, request.env_bytes)
        secrets = requests.read_env(request.secrets, request.secrets_bytes, "secrets")
        session = await self._service.sessions.start(call.caller, request.session_id, env=env, secrets=secrets)
        await call.write(pb.StartSessionResponse(session=answers.show_session(session)))

    async def _run_subagent(self, call: Call) -> None:
        request = await call.read_one(pb.RunSubAgentRequest)
        spec = requests.read_child_spec(request)
        child = await self._service.sessions.create_child(call.caller, request.parent_session_id, spec)
        await call.write(pb.RunSubAgentResponse(session_id=child.session_id, session=answers.show_session(child)))

    async def _update_hosts(self, call: Call) -> None:
        request = await call.read_one(pb.UpdateAllowedHostsRequest)
        change = requests.read_hosts_change(request)
        session = await self._service.sessions.set_hosts(call.caller, request.session_id, change)
        await call.write(pb.UpdateAllowedHostsResponse(allowed_hosts=session.hosts.texts))

    # Runs

    async def _exec(self, call: Call) -> None:
        spec = requests.read_run_spec(await call.read_one(pb.ExecRequest))
        if not spec.background:
            call.allow(_wait_for(spec.timeout))
        await call.write(answers.show_run(await self._service.runs.run(call.caller, spec)))

    async def _exec_stream(self, call: Call) -> None:
        await self._run_live(call, await call.read_one(pb.ExecRequest), fed=False)

    async def _exec_interactive(self, call: Call) -> None:
        first = await call.read_one(pb.ExecInput)
        if first.WhichOneof("input") != "start":
            raise malformed("the first message has no start")
        with call.idle():
            await self._run_live(call, first.start, fed=True)

    async def _run_live(self, call: Call, request: pb.ExecRequest, *, fed: bool) -> None:
        spec = requests.read_run_spec(request)
        if spec.background:
            raise requests.invalid(
                "background", "a background run has no stream", hint="Exec starts it, PollRun looks."
            )
        call.allow(_wait_for(spec.timeout))
        live = await self._service.runs.start(call.caller, replace(spec, stdin=b""))

        async def begin() -> None:
            started = pb.ExecStarted(run_id=live.run_id, session_id=spec.session_id)
            await call.write(pb.ExecFrame(started=started))

        async def send(chunk: Chunk) -> None:
            output = pb.ExecOutput(stream=pb.Stream.Name(chunk.stream), data=chunk.data)
            await call.write(pb.ExecFrame(output=output))

        result = await stream_run(live, _take_stdin(spec.stdin, call if fed else None), begin, send)
        await call.write(pb.ExecFrame(result=answers.show_run(result)))

    async def _poll(self, call: Call) -> None:
        request = await call.read_one(pb.PollRunRequest)
        run = await self._service.runs.poll(call.caller, request.run_id)
        await call.write(pb.PollRunResponse(run=answers.show_run(run)))

    async def _kill(self, call: Call) -> None:
        request = await call.read_one(pb.KillRunRequest)
        await self._service.runs.kill(call.caller, request.run_id)
        await call.write(pb.KillRunResponse())

    async def _ps(self, call: Call) -> None:
        request = await call.read_one(pb.PsRequest)
        commands = await self._service.runs.commands(call.caller, request.session_id)
        await call.write(pb.PsResponse(processes=map(answers.show_process, commands)))

    async def _log(self, call: Call) -> None:
        request = await call.read_one(pb.LogRequest)
        runs = await self._service.runs.list(call.caller, request.session_id)
        await call.write(pb.LogResponse(runs=map(answers.show_run, runs)))

    async def _pip_install(self, call: Call) -> None:
        request = await call.read_one(pb.PipInstallRequest)
        call.allow(_wait_for(request.timeout or LONG))
        run = await self._service.runs.pip_install(
            call.caller, request.session_id, tuple(request.packages), seconds=request.timeout or None
        )
        answer = pb.PipInstallResponse(
            output=run.stdout + run.stderr, exit_code=run.exit_code, run=answers.show_run(run)
        )
        await call.write(answer)

    # Files

    async def _write_file(self, call: Call) -> None:
        request = await call.read_one(pb.WriteFileRequest)
        path, append = requests.read_path(request), requests.read_mode(request.mode)
        size = await self._service.files.write(call.caller, request.session_id, path, request.content, append=append)
        await call.write(pb.WriteFileResponse(path=request.path, bytes=size))

    async def _read_file(self, call: Call) -> None:
        request = await call.read_one(pb.ReadFileRequest)
        path = requests.read_path(request)
        async with self._large_answers.take(call.payer):
            content = await self._service.files.read(call.caller, request.session_id, path)
            await call.write(pb.ReadFileResponse(content=content, path=request.path))

    async def _upload(self, call: Call) -> None:
        first = await call.read_one(pb.UploadFileRequest)
        if first.WhichOneof("part") != "header":
            raise malformed("the first message has no header")
        header = first.header
        path, append = requests.read_path(header), requests.read_mode(header.mode)
        size = await self._service.files.upload(call.caller, header.session_id, path, _take_parts(call), append=append)
        await call.write(pb.UploadFileResponse(path=header.path, bytes=size))

    async def _download(self, call: Call) -> None:
        request = await call.read_one(pb.DownloadFileRequest)
        path = requests.read_path(request)
        pieces = await self._service.files.download(
            call.caller, request.session_id, path, offset=request.offset, length=request.length or None
        )
        async for piece in pieces:
            await call.write(pb.DownloadFileResponse(content=piece))

    async def _list_files(self, call: Call) -> None:
        request = await call.read_one(pb.ListFilesRequest)
        path = requests.read_path(request)
        async with self._large_answers.take(call.payer):
            entries = await self._service.files.list(call.caller, request.session_id, path, since=request.since)
            answer = _list(entries) if len(entries) < _THREADED else await asyncio.to_thread(_list, entries)
            await call.write(answer)

    # KeyHandlers, and the service itself

    async def _list_images(self, call: Call) -> None:
        request = await call.read_one(pb.ListImagesRequest)
        images = await self._service.images.list(call.caller, request.name)
        await call.write(pb.ListImagesResponse(images=map(answers.show_image, images)))

    async def _login(self, call: Call) -> None:
        request = await call.read_one(pb.LoginRequest)
        if request.key_id:
            issued = await self._keys.login(request.key_id, request.csr, request.signature)
        elif call.admission is not None:
            issued = await self._keys.renew(call.admission.identity, request.csr)
        else:
            raise call.refusal or malformed("there is no key, and no certificate to renew")
        await call.write(answers.show_certificate(issued))

    async def _status(self, call: Call) -> None:
        await call.read_one(pb.StatusRequest)
        await call.write(answers.show_status(await self._service.status(call.caller), call.caller))

    async def _create_key(self, call: Call) -> None:
        spec = requests.read_key_spec(await call.read_one(pb.CreateApiKeyRequest))
        record, text = await self._keys.create(call.caller, spec)
        await call.write(pb.CreateApiKeyResponse(api_key=answers.show_key(record), key=text))

    async def _list_keys(self, call: Call) -> None:
        await call.read_one(pb.ListApiKeysRequest)
        await call.write(pb.ListApiKeysResponse(api_keys=map(answers.show_key, await self._keys.list(call.caller))))

    async def _delete_key(self, call: Call) -> None:
        request = await call.read_one(pb.DeleteApiKeyRequest)
        await self._keys.delete(call.caller, request.name)
        await call.write(pb.DeleteApiKeyResponse())


def _wait_for(seconds: float) -> float:
    """A wish that makes no sense is refused by the service, not here."""
    return MARGIN + (seconds if 0 < seconds <= 86_400 else 0)


def _list(entries: Sequence[Entry]) -> pb.ListFilesResponse:
    return pb.ListFilesResponse(files=map(answers.show_file, entries))


async def _take_parts(call: Call) -> AsyncIterator[bytes]:
    while (message := await call.read(pb.UploadFileRequest, UPLOAD_PATIENCE)) is not None:
        if message.WhichOneof("part") != "content":
            raise malformed("a later message has no content")
        if message.content:
            yield message.content


async def _take_stdin(content: bytes, call: Call | None) -> AsyncGenerator[bytes, None]:
    """What the request brought, and what comes after it."""
    if content:
        yield content
    while call and (message := await call.read_idly(pb.ExecInput)) is not None:
        if message.WhichOneof("input") != "stdin":
            raise malformed("a later message has no stdin")
        if len(message.stdin) > STDIN_PIECE:
            raise requests.invalid("stdin", f"{len(message.stdin)} bytes at once, the limit is {STDIN_PIECE}")
        yield message.stdin

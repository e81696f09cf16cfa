"""The client, written once: _sync.py is generated from this file (scripts/unasync.py)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from sandbox_client import _requests as requests
from sandbox_client import sandbox_pb2 as pb
from sandbox_client._async_background import AsyncBackgroundRun
from sandbox_client._async_files import AsyncFileCalls, AsyncPieces
from sandbox_client._async_interactive import AsyncInteractiveRun
from sandbox_client._discovery import LOCAL
from sandbox_client._errors import (
    Conflict,
    Effect,
    NotFound,
    RunLost,
    SandboxError,
    find_effect,
    translate,
)
from sandbox_client._hints import find_hint
from sandbox_client._model import (
    Approval,
    Chunk,
    ChunkReader,
    ImageInfo,
    PipResult,
    ProcessInfo,
    RunResult,
    SessionInfo,
    StatusInfo,
)
from sandbox_client._retry import Retry, is_lost
from sandbox_client._target import OPTIONS, Target, find_target

_SERVICE = "/sandbox.v1.SandboxService/"
_HEALTH = "/grpc.health.v1.Health/Check"


class AsyncSandboxClient(AsyncFileCalls):
    """Runs code in sandboxes, through the gateway of a machine or cluster.

    Without arguments and configuration it finds the daemon of this machine, and starts it when it is not there, also
    when it ended meanwhile. A credential that is given is used or refused. A request that changes anything, or runs a
    command, is sent once; one that was never sent, or only asks, is sent again, for 15 seconds to a gateway that had
    answered this client before. A client may be used by many tasks at once.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        tenant_id: str = "",
        *,
        api_key: str | None = None,
        profile: str | None = None,
        only_tenant: bool = False,
    ) -> None:
        """`endpoint` is HOST:PORT of a gateway, or `local`, this machine's daemon. `api_key` or `profile` (a name that
        `k8e connect` gave to a gateway) say who calls. What is left out is looked for (docs/gateway.md); an `api_key`
        alone is used at this machine's gateway. New sessions belong to `tenant_id`. With `only_tenant` no others are
        meant, for a caller that sees those of several tenants."""
        self._wanted = (endpoint, api_key, profile)
        self._tenant = tenant_id
        self._metadata = (("sandbox-tenant", tenant_id),) if only_tenant and tenant_id else ()
        self._target: Target | None = None
        self._channel: grpc.aio.Channel | None = None
        self._opening = asyncio.Lock()
        self._known = False  # whether the gateway has answered this client
        self._session = ""  # the one that `run` made for itself
        self._creating = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Destroys the session that `run` made, and lets go of the gateway. The client cannot be used afterwards."""
        async with self._creating:  # a session that is being made for `run` is made first
            try:
                if self._session:
                    session, self._session = self._session, ""
                    with contextlib.suppress(NotFound, Conflict):
                        await self.destroy_session(session)
            finally:
                self._closed = True
                if self._channel is not None:
                    channel, self._channel = self._channel, None
                    await channel.close()

    # Running

    async def run(
        self,
        code: str | bytes | Sequence[str | bytes],
        language: str = "bash",
        timeout: float = 30,
        *,
        env: requests.Env | None = None,
        workdir: requests.Path = "",
        stdin: str | bytes = "",
        user: str = "",
    ) -> RunResult:
        """Runs code in this client's own session, which the first run makes and `close` destroys.

        A session that has expired is replaced by a new one; the code is run once in any case.
        """
        more: dict[str, Any] = {"language": language, "env": env, "workdir": workdir, "stdin": stdin, "user": user}
        session = await self._own_session("")
        try:
            return await self.exec(session, code, timeout, **more)
        except (NotFound, Conflict) as error:
            # These two mean that nothing was run.
            if error.code not in ("session_not_found", "session_destroying"):
                raise
        return await self.exec(await self._own_session(session), code, timeout, **more)

    async def exec(
        self,
        session_id: str,
        command: str | bytes | Sequence[str | bytes],
        timeout: float = 30,
        *,
        language: str = "bash",
        env: requests.Env | None = None,
        workdir: requests.Path = "",
        stdin: str | bytes = "",
        user: str = "",
    ) -> RunResult:
        """Runs code, or with a list a program with exactly these arguments, to its end. `user` is another user of the
        sandbox than its default one, by name or number."""
        request = requests.build_exec(
            session_id, command, timeout, language=language, env=env, workdir=workdir, stdin=stdin, user=user
        )
        return RunResult.read(await self._call("Exec", request, pb.ExecResponse, timeout + requests.MARGIN))

    def exec_stream(
        self,
        session_id: str,
        command: str | bytes | Sequence[str | bytes],
        timeout: float = 300,
        *,
        language: str = "bash",
        env: requests.Env | None = None,
        workdir: requests.Path = "",
        stdin: str | bytes = "",
        user: str = "",
    ) -> AsyncExecStream:
        """Runs code; its output comes as it is written, both streams. Leaving the loop early ends the command."""
        request = requests.build_exec(
            session_id, command, timeout, language=language, env=env, workdir=workdir, stdin=stdin, user=user
        )
        return AsyncExecStream(self._stream("ExecStream", request, pb.ExecFrame, timeout + requests.MARGIN))

    def exec_interactive(
        self,
        session_id: str,
        command: str | bytes | Sequence[str | bytes],
        timeout: float = 300,
        *,
        language: str = "bash",
        env: requests.Env | None = None,
        workdir: requests.Path = "",
        user: str = "",
    ) -> AsyncInteractiveRun:
        """Runs code whose input stays open, in a block of `with`: `write` pieces, `close_stdin`, and read the output as
        it comes. Leaving the block ends the command."""
        request = requests.build_exec(
            session_id, command, timeout, language=language, env=env, workdir=workdir, stdin="", user=user
        )
        return AsyncInteractiveRun(request, self._feed)

    async def start(
        self,
        session_id: str,
        command: str | bytes | Sequence[str | bytes],
        timeout: float = 3600,
        *,
        language: str = "bash",
        env: requests.Env | None = None,
        workdir: requests.Path = "",
        user: str = "",
    ) -> AsyncBackgroundRun:
        """Starts a run in the background, which goes on when this client is gone. Its handle has the output as it
        comes, `wait`, `poll` and `kill`."""
        request = requests.build_exec(
            session_id, command, timeout, language=language, env=env, workdir=workdir, user=user, background=True
        )
        started = RunResult.read(await self._call("Exec", request, pb.ExecResponse, requests.MARGIN))
        return AsyncBackgroundRun(started, self._look, self.kill)

    async def attach(self, run_id: str) -> AsyncBackgroundRun:
        """Returns the handle of a run in the background that any client has started."""
        return AsyncBackgroundRun(await self.poll(run_id), self._look, self.kill)

    async def poll(self, run_id: str) -> RunResult:
        """Returns the status of a run, with its output so far."""
        return await self._look(pb.PollRunRequest(run_id=run_id))

    async def _look(self, request: pb.PollRunRequest) -> RunResult:
        response = await self._call("PollRun", request, pb.PollRunResponse, request.wait + requests.MARGIN)
        return RunResult.read(response.run)

    async def kill(self, run_id: str) -> bool:
        """Ends a run with everything it started. False: it had ended before, and nothing was done."""
        response = await self._call("KillRun", pb.KillRunRequest(run_id=run_id), pb.KillRunResponse, requests.MARGIN)
        return not response.had_ended

    async def ps(self, session_id: str) -> list[ProcessInfo]:
        """Lists the commands that run in a session."""
        response = await self._call("Ps", pb.PsRequest(session_id=session_id), pb.PsResponse)
        return [ProcessInfo.read(process) for process in response.processes]

    async def log(self, session_id: str) -> list[RunResult]:
        """Lists the runs of a session, oldest first, without their output."""
        response = await self._call("Log", pb.LogRequest(session_id=session_id), pb.LogResponse)
        return [RunResult.read(run) for run in response.runs]

    async def pip_install(self, session_id: str, packages: Sequence[str], timeout: float = 300) -> PipResult:
        """Installs Python packages in a session, from the package indexes that the gateway's machine uses."""
        requests.check_list("packages", packages)
        requests.check_timeout(timeout)
        request = pb.PipInstallRequest(session_id=session_id, packages=list(packages), timeout=timeout)
        return PipResult.read(await self._call("PipInstall", request, pb.PipInstallResponse, timeout + requests.MARGIN))

    # Sessions

    async def create_session(
        self,
        runtime_class: str = "gvisor",
        allowed_hosts: Sequence[str] | None = None,
        tenant_id: str = "",
        *,
        session_id: str = "",
        env: requests.Env | None = None,
        image: str = "",
        cpus: float = 0,
        memory: int = 0,
        disk: int = 0,
        pids: int = 0,
        inodes: int = 0,
        open_files: int = 0,
        ttl: float = 0,
        manifest: str = "",
        git_repo: str = "",
        git_ref: str = "",
        persistent: bool = False,
        secrets: requests.Env | None = None,
        labels: Mapping[str, str] | None = None,
        read_only: bool = False,
        powerless: bool = False,
        more_hosts: Sequence[str] = (),
    ) -> str:
        """Makes a session and returns its id. `allowed_hosts`: None is the default list, an empty one denies all;
        `more_hosts` are added to the default list. Limits are `cpus`, bytes of `memory` and `disk`, `pids` (processes
        and threads), `inodes` (files and directories) and `open_files` of a process; 0 is the default. Unused for
        `ttl` seconds it ends.
        A runtime that is not there is an error, never something weaker; "" is the strongest that works.
        A `persistent` one lasts until it is destroyed and can be stopped; `secrets` are variables no disk keeps."""
        request = requests.build_create(
            runtime_class,
            allowed_hosts,
            tenant_id or self._tenant,
            session_id=session_id,
            env=env,
            image=image,
            cpus=cpus,
            memory=memory,
            disk=disk,
            pids=pids,
            inodes=inodes,
            open_files=open_files,
            ttl=ttl,
            manifest=manifest,
            git_repo=git_repo,
            git_ref=git_ref,
            persistent=persistent,
            secrets=secrets,
            labels=labels,
            read_only=read_only,
            powerless=powerless,
            more_hosts=more_hosts,
        )
        response = await self._call("CreateSession", request, pb.CreateSessionResponse, requests.CREATE_SECONDS)
        return str(response.session_id)

    async def run_subagent(
        self,
        parent_session_id: str,
        agent_type: str = "",
        workspace_path: str = "",
        *,
        session_id: str = "",
        runtime_class: str = "",
        allowed_hosts: Sequence[str] | None = None,
        env: requests.Env | None = None,
        image: str = "",
        cpus: float = 0,
        memory: int = 0,
        disk: int = 0,
        pids: int = 0,
        inodes: int = 0,
        open_files: int = 0,
        ttl: float = 0,
        read_only: bool = False,
        powerless: bool = False,
    ) -> str:
        """Makes a session for a sub-agent, which shares its parent's workspace, has no more than its parent in anything
        and ends with it; returns its id. What is left out it has as its parent, but for variables."""
        request = requests.build_child(
            parent_session_id,
            agent_type,
            workspace_path,
            session_id=session_id,
            runtime_class=runtime_class,
            allowed_hosts=allowed_hosts,
            env=env,
            image=image,
            cpus=cpus,
            memory=memory,
            disk=disk,
            pids=pids,
            inodes=inodes,
            open_files=open_files,
            ttl=ttl,
            read_only=read_only,
            powerless=powerless,
        )
        response = await self._call("RunSubAgent", request, pb.RunSubAgentResponse, requests.CREATE_SECONDS)
        return str(response.session_id)

    async def get_session(self, session_id: str) -> SessionInfo:
        """Returns a session, with what its sandbox was refused lately."""
        request = pb.GetSessionRequest(session_id=session_id)
        return SessionInfo.read((await self._call("GetSession", request, pb.GetSessionResponse)).session)

    async def list_sessions(self, *, all_phases: bool = False) -> list[SessionInfo]:
        """Lists the caller's sessions; with `all_phases` also those that have ended."""
        request = pb.ListSessionsRequest(phase="all" if all_phases else "active")
        response = await self._call("ListSessions", request, pb.ListSessionsResponse)
        return [SessionInfo.read(session) for session in response.sessions]

    async def destroy_session(self, session_id: str) -> None:
        """Ends a session, with everything that runs in it and all its files."""
        request = pb.DestroySessionRequest(session_id=session_id)
        await self._call("DestroySession", request, pb.DestroySessionResponse, requests.CREATE_SECONDS)

    async def stop_session(self, session_id: str) -> SessionInfo:
        """Ends what runs in a persistent session; its files and configuration stay. Fine for one that is stopped."""
        request = pb.StopSessionRequest(session_id=session_id)
        response = await self._call("StopSession", request, pb.StopSessionResponse, requests.CREATE_SECONDS)
        return SessionInfo.read(response.session)

    async def start_session(
        self, session_id: str, *, env: requests.Env | None = None, secrets: requests.Env | None = None
    ) -> SessionInfo:
        """Brings a stopped session back, with its files. Its secrets have to be given again; `env` adds variables."""
        request = pb.StartSessionRequest(session_id=session_id, env=dict(env or {}), secrets=dict(secrets or {}))
        response = await self._call("StartSession", request, pb.StartSessionResponse, requests.CREATE_SECONDS)
        return SessionInfo.read(response.session)

    async def list_images(self) -> list[ImageInfo]:
        """Lists the images that sessions can be made of, besides the machine's own tools."""
        response = await self._call("ListImages", pb.ListImagesRequest(), pb.ListImagesResponse)
        return [ImageInfo.read(image) for image in response.images]

    async def update_allowed_hosts(
        self,
        session_id: str,
        allowed_hosts: Sequence[str] | None = None,
        *,
        add: Sequence[str] = (),
        remove: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """A new list, or changes to the one in force; returns the list that holds from now on."""
        for field, hosts in (("allowed_hosts", allowed_hosts), ("add", add), ("remove", remove)):
            requests.check_list(field, hosts)
        request = pb.UpdateAllowedHostsRequest(
            session_id=session_id,
            allowed_hosts=list(allowed_hosts or ()),
            clear=allowed_hosts is not None and not allowed_hosts,
            add=list(add),
            remove=list(remove),
        )
        response = await self._call("UpdateAllowedHosts", request, pb.UpdateAllowedHostsResponse)
        return tuple(response.allowed_hosts)

    # Approvals

    async def confirm_action(
        self, session_id: str, action: str, timeout: float = 30, *, expires_in: float = 0
    ) -> Approval:
        """Asks a person whether something may be done, and waits that long for the answer (0: not at all). Go on only
        when `approved` is true. `expires_in`: for how long it can be answered, where that is longer than the wait."""
        request = pb.ConfirmActionRequest(session_id=session_id, action=action, timeout=timeout, expires_in=expires_in)
        response = await self._call("ConfirmAction", request, pb.ConfirmActionResponse, timeout + requests.MARGIN)
        return Approval.read(response.approval)

    async def await_approval(self, approval_id: str, timeout: float = 30) -> Approval:
        """The answer to an earlier question, or how it stands after that long."""
        request = pb.ConfirmActionRequest(approval_id=approval_id, timeout=timeout)
        seconds = timeout + requests.MARGIN
        response = await self._call("ConfirmAction", request, pb.ConfirmActionResponse, seconds, asks=True)
        return Approval.read(response.approval)

    async def approve_action(self, approval_id: str, approved: bool = True, *, reason: str = "") -> Approval:
        """Answers another caller's approval, once. With an API key this needs the scope operator."""
        request = pb.ApproveActionRequest(approval_id=approval_id, approved=approved, reason=reason)
        return Approval.read((await self._call("ApproveAction", request, pb.ApproveActionResponse)).approval)

    async def list_approvals(self, *, all_states: bool = False) -> list[Approval]:
        """Lists pending approvals, or all on record."""
        request = pb.ListApprovalsRequest(status="all" if all_states else "pending")
        response = await self._call("ListApprovals", request, pb.ListApprovalsResponse)
        return [Approval.read(approval) for approval in response.approvals]

    async def status(self) -> StatusInfo:
        """Says whether sandboxes work at the gateway, and who is calling."""
        return StatusInfo.read(await self._call("Status", pb.StatusRequest(), pb.StatusResponse))

    # The way there

    async def _own_session(self, dead: str) -> str:
        """This client's own session; one that is known to be dead is replaced, once for all who found out."""
        async with self._creating:
            if not self._session or self._session == dead:
                self._session = await self.create_session(runtime_class="")
            return self._session

    async def _open(self) -> grpc.aio.Channel:
        async with self._opening:
            if self._closed:
                raise requests.describe_closed()
            known = self._target
            fresh = known is not None and time.time() < known.renew_at and not known.is_gone
            if self._channel is not None and fresh:
                return self._channel
            if known is not None and fresh and not known.local:
                target = known  # the same gateway, by a new connection
            else:
                target = await asyncio.to_thread(find_target, *self._wanted)
            if target.local:
                self._wanted = (LOCAL, None, None)  # its sessions are there, whatever is configured later
            channel = grpc.aio.secure_channel(target.address, target.credentials(), options=OPTIONS)
            # Calls that are under way on an older one go on; it is gone with the last of them.
            self._target, self._channel = target, channel
            return channel

    async def _forget(self, channel: grpc.aio.Channel, failure: SandboxError, retry: Retry) -> bool:
        """Whether the call is sent once more, on a new channel: to the daemon of this machine, which is then started,
        or to another gateway behind the same address."""
        if not is_lost(failure) or self._target is None:
            return False
        pause = retry.choose_pause(local=self._target.local, known=self._known)
        if pause is None:
            return False
        await asyncio.sleep(pause)
        async with self._opening:
            if self._channel is channel:
                self._channel = None  # its backoff would hold the next attempt
        return True

    async def _call(
        self, name: str, request: Any, response: Any, timeout: float = requests.MARGIN, *, asks: bool = False
    ) -> Any:
        effect = Effect.ASKS if asks else find_effect(name)
        return await self._attempt(_SERVICE + name, request, response, timeout, effect)

    async def _attempt(self, path: str, request: Any, response: Any, timeout: float, effect: Effect) -> Any:
        retry = Retry()
        while True:
            channel = await self._open()
            method = channel.unary_unary(
                path, request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
            )
            try:
                answer = await method(request, timeout=timeout, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = translate(error, effect)
                if not await self._forget(channel, failure, retry):
                    raise failure from error
            else:
                self._known = True
                return answer

    async def _open_awake(self, timeout: float) -> grpc.aio.Channel:
        """For pieces that can be sent once only: a daemon of this machine that is gone is started before the first."""
        channel = await self._open()
        if self._target is not None and self._target.local:
            await self._attempt(_HEALTH, pb.StatusRequest(), pb.StatusRequest, timeout, Effect.ASKS)
            channel = await self._open()
        return channel

    async def _upload(self, name: str, pieces: AsyncPieces, response: Any, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        method = (await self._open_awake(timeout)).stream_unary(
            _SERVICE + name,
            request_serializer=pb.UploadFileRequest.SerializeToString,
            response_deserializer=response.FromString,
        )
        left = max(deadline - time.monotonic(), 0)
        call = method(aiter(pieces), timeout=left, metadata=self._metadata)
        pieces.cancel = call.cancel
        try:
            return await call
        except BaseException as error:
            if pieces.error is not None:
                raise pieces.error from None
            if isinstance(error, grpc.RpcError):
                raise translate(error, find_effect(name)) from error
            raise
        finally:
            call.cancel()  # for a caller that leaves early; after the end it has no effect

    async def _feed(self, request: pb.ExecRequest, inputs: AsyncIterator[pb.ExecInput]) -> Any:
        method = (await self._open_awake(requests.MARGIN)).stream_stream(
            _SERVICE + "ExecInteractive",
            request_serializer=pb.ExecInput.SerializeToString,
            response_deserializer=pb.ExecFrame.FromString,
        )
        return method(inputs, timeout=request.timeout + requests.MARGIN, metadata=self._metadata)

    async def _stream(self, name: str, request: Any, response: Any, timeout: float) -> AsyncIterator[Any]:
        begun, run_id = False, ""
        retry = Retry()
        while True:
            channel = await self._open()
            method = channel.unary_stream(
                _SERVICE + name,
                request_serializer=type(request).SerializeToString,
                response_deserializer=response.FromString,
            )
            call = method(request, timeout=timeout, metadata=self._metadata)
            try:
                async for message in call:
                    begun = self._known = True
                    if isinstance(message, pb.ExecFrame) and message.HasField("started"):
                        run_id = message.started.run_id
                    yield message
                return
            except grpc.RpcError as error:
                failure = translate(error, find_effect(name), run_id)
                if begun or not await self._forget(channel, failure, retry):
                    raise failure from error
            finally:
                call.cancel()  # for a caller that leaves early; after the end it has no effect


class AsyncExecStream:
    """The output of a run, piece by piece; after the last one `result` says how it ended."""

    def __init__(self, frames: AsyncIterator[pb.ExecFrame]) -> None:
        self._frames = frames
        self._result: RunResult | None = None
        self.run_id = ""  # known as soon as the command has started

    @property
    def result(self) -> RunResult:
        """The result without output, which was streamed."""
        if self._result is None:
            raise RuntimeError("the run has not ended: read its output to the end first")
        return self._result

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        # No reference is kept: a caller that leaves the loop drops the last one, which ends the command.
        reader = ChunkReader()
        try:
            async for frame in self._frames:
                if frame.HasField("started"):
                    self.run_id = frame.started.run_id
                elif frame.HasField("output"):
                    yield reader.read(frame.output)
                elif frame.HasField("result"):
                    self._result = RunResult.read(frame.result)
        finally:
            await self._frames.aclose()  # type: ignore[attr-defined]
        for chunk in reader.rest():
            yield chunk
        if self._result is None:
            error, code = "the stream ended before the run did", "run_lost"
            raise RunLost(error, code=code, hint=find_hint(code), run_id=self.run_id)


@contextlib.asynccontextmanager
async def async_sandbox_session(
    runtime_class: str = "gvisor",
    allowed_hosts: Sequence[str] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[AsyncSandboxClient, str]]:
    """A client and a session of its own, which is destroyed at the end of the block."""
    async with AsyncSandboxClient() as client:
        session = await client.create_session(runtime_class, allowed_hosts, **options)
        try:
            yield client, session
        finally:
            with contextlib.suppress(NotFound):
                await client.destroy_session(session)

"""The sandbox provider `k8e` of Inspect (inspect_ai): each sample has a session of its own.

    pip install 'k8e-sandbox-client[inspect]'

    Task(..., sandbox="k8e")
    Task(..., sandbox=SandboxEnvironmentSpec("k8e", K8eSandboxConfig(image="python:3.12")))

Inspect finds it by its entry point. The gateway is found as SandboxClient() finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel

from sandbox_client._async import AsyncExecStream, AsyncSandboxClient
from sandbox_client._errors import Conflict, DeadlineExceeded, NotFound, SandboxError, Unavailable
from sandbox_client._model import RunResult

_DAY: Final = 86_400  # the longest that a command may take
_TASK, _PROCESS = "inspect-ai/task", "inspect-ai/process"  # labels of sessions
_THIS_PROCESS: Final = uuid.uuid4().hex

# Errors of files, as Inspect and Python know them.
_FILE_ERRORS: Final = {
    "file_not_found": errno.ENOENT,
    "is_a_directory": errno.EISDIR,
    "not_a_directory": errno.ENOTDIR,
    "permission_denied": errno.EACCES,
    "read_only": errno.EACCES,
    "program_not_executable": errno.EACCES,
    "workdir_denied": errno.EACCES,
    "workdir_not_found": errno.ENOENT,
    "workdir_not_a_directory": errno.ENOTDIR,
}
# Commands that were not started, and the exit codes that a shell has for them.
_NOT_STARTED: Final = {"program_not_found": 127, "user_not_found": 126, "arguments_too_long": 126}


class K8eSandboxConfig(BaseModel, frozen=True, extra="forbid"):
    """The sandboxes of a task. What is left out is the default of `create_session`, and the strongest runtime."""

    runtime_class: str = ""
    image: str = ""
    allowed_hosts: tuple[str, ...] | None = None  # None: the default list; empty: nothing may be reached
    cpus: float = 0
    memory: int = 0
    disk: int = 0
    pids: int = 0
    ttl: float = 0
    manifest: str = ""  # the path of a file


@sandboxenv(name="k8e")
class K8eSandboxEnvironment(SandboxEnvironment):
    """A session of k8e, as Inspect uses it. No command is ever run a second time: `timeout_retry` has no effect."""

    def __init__(self, client: AsyncSandboxClient, session_id: str) -> None:
        super().__init__()
        self.client = client
        self.session_id = session_id

    # The life of a sandbox

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Reads the configuration that a log of Inspect has."""
        return K8eSandboxConfig.model_validate(config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Makes the session of a sample. A text as configuration is the path of a manifest."""
        wanted = config if isinstance(config, K8eSandboxConfig) else K8eSandboxConfig(manifest=str(config or ""))
        options = wanted.model_dump(exclude={"manifest"})
        if wanted.manifest:
            options["manifest"] = await asyncio.to_thread(Path(wanted.manifest).read_text)
        client = AsyncSandboxClient()
        try:
            session = await client.create_session(**options, labels={_TASK: task_name, _PROCESS: _THIS_PROCESS})
        except BaseException:
            await client.close()
            raise
        return {"default": cls(client, session)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Destroys the sessions of a sample; after an interruption `task_cleanup` does, which has the time."""
        for environment in environments.values():
            mine = environment.as_type(cls)
            try:
                if not interrupted:
                    with contextlib.suppress(NotFound):
                        await mine.client.destroy_session(mine.session_id)
            finally:
                await mine.client.close()

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """Destroys what samples of this process have left. Inspect calls it once, after all tasks."""
        if cleanup:
            await _destroy({_PROCESS: _THIS_PROCESS})

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:  # noqa: A002 - Inspect's name
        """Destroys one session, or all that Inspect has made here (`inspect sandbox cleanup k8e`)."""
        await _destroy({}, id)

    # Commands and files

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - Inspect's name
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 - Inspect's contract
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a command to its end. One that could not be started has a shell's exit code for that."""
        seconds = _DAY if timeout is None else timeout
        output = _Output(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE)
        try:
            with _told_as_inspect_does(cmd[0] if cmd else ""):
                stream = self.client.exec_stream(
                    self.session_id, cmd, seconds, env=env, workdir=cwd or "", stdin=input or "", user=user or ""
                )
                result = await output.collect(stream)
        except SandboxError as error:
            if error.code not in _NOT_STARTED:
                raise
            said = ": ".join(part for part in (error.error, error.detail) if part)
            return ExecResult(False, _NOT_STARTED[error.code], "", f"{said}\n")
        if result.status == "timed_out":
            raise TimeoutError(f"the command was ended after {seconds} seconds")
        if output.exceeded:
            raise OutputLimitExceededError(
                limit_str=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR,
                truncated_output=output.stdout + output.stderr,
            )
        if result.exit_code is None:
            raise SandboxUnavailableError(f"the command's end is not known: {result.status} {result.reason}".rstrip())
        return ExecResult(result.exit_code == 0, result.exit_code, output.stdout, output.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes a file as the sandbox's default user. Folders above it are made."""
        with _told_as_inspect_does(file):
            await self.client.write_file(self.session_id, file, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Reads a file as the sandbox's default user, up to Inspect's limit."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _told_as_inspect_does(file):
            content = await self.client.read_bytes(self.session_id, file, length=limit + 1)
        if len(content) > limit:
            limit_str = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
            raise OutputLimitExceededError(limit_str=limit_str, truncated_output=None)
        return content.decode() if text else content


class _Output:
    """Both streams of a command, each up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self.exceeded = False

    async def collect(self, stream: AsyncExecStream) -> RunResult:
        async for chunk in stream:
            kept = self._kept[chunk.stream]
            room = self._limit - len(kept)
            kept += chunk.data[:room]
            self.exceeded = self.exceeded or len(chunk.data) > room
        return stream.result

    @property
    def stdout(self) -> str:
        return self._kept["stdout"].decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self._kept["stderr"].decode("utf-8", "replace")


@contextlib.contextmanager
def _told_as_inspect_does(name: str) -> Iterator[None]:
    """Errors of Python's own for what Inspect and its tools tell apart."""
    try:
        yield
    except DeadlineExceeded as error:
        raise TimeoutError(str(error)) from error
    except SandboxError as error:
        if error.code in _FILE_ERRORS:
            number = _FILE_ERRORS[error.code]
            raise OSError(number, os.strerror(number), name) from error
        if error.code == "user_refused":
            raise SandboxUserUnsupportedError(str(error)) from error
        if error.code in _NOT_STARTED or not isinstance(error, NotFound | Conflict | Unavailable):
            raise
        raise SandboxUnavailableError(str(error)) from error


async def _destroy(labels: dict[str, str], session_id: str | None = None) -> None:
    """Destroys the sessions of Inspect that have these labels, or the one of that id."""
    async with AsyncSandboxClient() as client:
        for session in await client.list_sessions():
            mine = _TASK in session.labels and labels.items() <= session.labels.items()
            if mine and session_id in (None, session.session_id):
                with contextlib.suppress(NotFound):
                    await client.destroy_session(session.session_id)

"""Run code in k8e sandboxes.

    from sandbox_client import SandboxClient

    with SandboxClient() as client:
        print(client.run("print('hello')", language="python").stdout)

Without configuration it uses the daemon of this machine. `AsyncSandboxClient` is the same for asyncio.
"""

from sandbox_client._async import AsyncExecStream, AsyncSandboxClient, async_sandbox_session
from sandbox_client._async_background import AsyncBackgroundRun
from sandbox_client._errors import (
    Conflict,
    DeadlineExceeded,
    Failed,
    InternalError,
    InvalidArgument,
    NotFound,
    NotText,
    PermissionDenied,
    ResourceExhausted,
    RunLost,
    SandboxError,
    ServerNotTrusted,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from sandbox_client._model import (
    Approval,
    Chunk,
    FileInfo,
    ImageInfo,
    PipResult,
    ProcessInfo,
    Refusal,
    RunResult,
    SessionInfo,
    StatusInfo,
    Transfer,
)
from sandbox_client._sync import ExecStream, SandboxClient, sandbox_session
from sandbox_client._sync_background import BackgroundRun

__all__ = [
    "Approval",
    "AsyncBackgroundRun",
    "AsyncExecStream",
    "AsyncSandboxClient",
    "BackgroundRun",
    "Chunk",
    "Conflict",
    "DeadlineExceeded",
    "ExecStream",
    "Failed",
    "FileInfo",
    "ImageInfo",
    "InternalError",
    "InvalidArgument",
    "NotFound",
    "NotText",
    "PermissionDenied",
    "PipResult",
    "ProcessInfo",
    "Refusal",
    "ResourceExhausted",
    "RunLost",
    "RunResult",
    "SandboxClient",
    "SandboxError",
    "ServerNotTrusted",
    "SessionInfo",
    "StatusInfo",
    "Transfer",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "async_sandbox_session",
    "sandbox_session",
]

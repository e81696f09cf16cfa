"""A session's environment variables, and where a sandbox keeps them.

The values must outlive the daemon and reach no file of the machine. So they are kept where they are needed anyway:
inside the sandbox, in a directory that only the agent can read. The output of ended background runs is beside them.
"""

from __future__ import annotations

from typing import Final

from k8e.core.translation import translated
from k8e.link.model import Sandbox

STATE: Final = b"/run/k8e-session"
_ENV: Final = STATE + b"/env"
_MAX_ENV: Final = 1 << 20

Variables = tuple[tuple[bytes, bytes], ...]


async def prepare_state(sandbox: Sandbox) -> None:
    """Makes the directory in which every sandbox keeps what belongs to its session."""
    with translated("preparing the session's own directory"):
        await sandbox.mkdir(STATE, mode=0o700)


async def keep_env(sandbox: Sandbox, env: Variables) -> None:
    if env:
        with translated("keeping the session's environment"):
            await sandbox.write_file(_ENV, write_variables(env), mode=0o600)


async def recall_env(sandbox: Sandbox) -> Variables:
    return read_variables(await sandbox.read_file(_ENV, limit=_MAX_ENV))


def write_variables(env: Variables) -> bytes:
    return b"".join(name + b"=" + value + b"\0" for name, value in env)


def read_variables(content: bytes) -> Variables:
    pairs = (line.partition(b"=") for line in content.split(b"\0") if line)
    return tuple((name, value) for name, _, value in pairs)

"""What a new sandbox gets before its session begins: the environment, and the entries of a manifest.

The values of a session's environment must outlive the daemon and reach no file of the machine. So they wait where they
are needed anyway: inside the sandbox, in a directory that only the agent can read. Output of ended background
runs is kept beside them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

from k8e.core.checks import check_path
from k8e.core.errors import Fault, Kind
from k8e.core.model import ManifestDir, ManifestEntry, ManifestFile, ManifestRepo
from k8e.core.runs.output import HeadTail, read_into
from k8e.core.sessions.manifest import describe_entry, list_steps
from k8e.core.translation import translated
from k8e.engine import Place
from k8e.link.model import ExecSpec, Identity, Sandbox

STATE: Final = b"/run/k8e-session"
_ENV: Final = STATE + b"/env"
_MAX_ENV: Final = 1 << 20
_SHOWN: Final = 2000
CLONE_SECONDS: Final = 300.0

Variables = tuple[tuple[bytes, bytes], ...]


def file_identity(place: Place) -> Identity:
    """The default user, in the form that file operations take."""
    return Identity(place.user.uid, place.user.gid)


def merge_env(*layers: Variables) -> Variables:
    """Later ones win."""
    merged: dict[bytes, bytes] = {}
    for layer in layers:
        merged.update(layer)
    return tuple(merged.items())


async def prepare_state(sandbox: Sandbox) -> None:
    """What every session has, whoever it is for."""
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


async def make_workdir(sandbox: Sandbox, place: Place, path: str) -> None:
    if path:
        with translated("making the directory that its commands start in"):
            await sandbox.mkdir(path.encode(), identity=file_identity(place))


async def apply_manifest(sandbox: Sandbox, place: Place, env: Variables, entries: Sequence[ManifestEntry]) -> None:
    for index, entry in enumerate(entries):
        try:
            with translated(describe_entry(entry)):
                await _apply(sandbox, place, env, entry)
        except Fault as fault:
            raise Fault(
                Kind.FAILED,
                "manifest_failed",
                f"manifest entry {index} ({describe_entry(entry)}) failed; the session was not created",
                detail=fault.detail or fault.error,
                hint=fault.hint,
                field=f"manifest[{index}]",
            ) from fault


async def _apply(sandbox: Sandbox, place: Place, env: Variables, entry: ManifestEntry) -> None:
    path = check_path("path", entry.path)
    identity = file_identity(place)
    if isinstance(entry, ManifestDir):
        await sandbox.mkdir(path, identity=identity)
        return
    parent = path.rstrip(b"/").rpartition(b"/")[0] or b"/"
    await sandbox.mkdir(parent, identity=identity)
    if isinstance(entry, ManifestFile):
        await sandbox.write_file(path, entry.content, mode=entry.mode, identity=identity)
    else:
        await _clone(sandbox, place, env, entry, path)


async def _clone(sandbox: Sandbox, place: Place, env: Variables, entry: ManifestRepo, path: bytes) -> None:
    variables = merge_env(place.env, env, ((b"GIT_TERMINAL_PROMPT", b"0"),))
    for argv in list_steps(entry, path):
        spec = ExecSpec(argv, variables, place.workspace, identity=place.user, stdin=False, timeout=CLONE_SECONDS)
        process = await sandbox.start(spec)
        output = HeadTail(_SHOWN)
        _, _, outcome = await asyncio.gather(
            read_into(process.stdout, output), read_into(process.stderr, output), process.wait()
        )
        if outcome.exit_code != 0:
            said = _hide_credentials(output.take().decode(errors="replace").strip())
            raise Fault(Kind.FAILED, "git_failed", "git failed", detail=said or f"{outcome.cause.value}, no output")


def _hide_credentials(text: str) -> str:
    return re.sub(r"://[^/@\s]*@", "://***@", text)

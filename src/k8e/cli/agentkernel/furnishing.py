"""The files that an agentkernel.toml brings into a new sandbox.

They are read here, as the user, and written there by the agent, as the sandbox's user. What a file that is not trusted
may name is decided before (profiles/trust.py) by its name; here nothing is followed that would lead out of the project.
"""

from __future__ import annotations

import os
import stat

from k8e.cli.client import BYTES, JSON, quote
from k8e.cli.ending import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.client import AnyClient
    from k8e.profiles.config import Config
    from k8e.profiles.effective import Cage
    from k8e.profiles.wishes import FileWish

MESSAGE = 64 << 20
PLAIN = 0o644


def read_files(cage: Cage, config: Config | None, *, trusted: bool) -> list[tuple[FileWish, bytes]]:
    """Before a sandbox is made: what cannot be read makes none."""
    folder = os.path.realpath(os.path.dirname(config.file) or ".") if config else ""
    return [(file, read_file(file.source, folder, trusted=trusted)) for file in cage.files]


def read_file(source: str, folder: str, *, trusted: bool) -> bytes:
    path = os.path.join(folder, os.path.expanduser(source) if trusted else source)
    if not trusted and os.path.realpath(path) != os.path.normpath(path):
        raise Failure(
            "file_refused",
            f"{source} is, or goes through, a link",
            detail=f"to {os.path.realpath(path)}",
            hint="put the file itself there, or `agentkernel trust` the file that names it",
        )
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if trusted else os.O_NOFOLLOW))
    except OSError as error:
        raise Failure("file_unreadable", f"{source} cannot be read", detail=str(error)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Failure("file_unreadable", f"{source} is no file")
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(MESSAGE + 1)
    if len(content) > MESSAGE:
        raise Failure("file_too_large", f"{source} has more than {MESSAGE} bytes")
    return content


def furnish(client: AnyClient, session_id: str, files: list[tuple[FileWish, bytes]]) -> None:
    import json

    for file, content in files:
        target = f"/v1/sessions/{quote(session_id)}/files?path={quote(file.dest)}&mode=w"
        response = client.request("PUT", target, content, BYTES)
        answer = json.loads(response.read())
        if response.status >= 300:
            raise Failure.of(answer)
        if file.mode != PLAIN:
            run = {"argv": ["chmod", f"{file.mode:o}", "--", file.dest]}
            response = client.request("POST", f"/v1/sessions/{quote(session_id)}/runs", json.dumps(run).encode(), JSON)
            answer = json.loads(response.read())
            if response.status >= 300:
                raise Failure.of(answer)
            if response.exit_code != 0:
                raise Failure("file_mode", f"the mode of {file.dest} could not be set", detail=answer["stderr"])

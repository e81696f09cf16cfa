"""Files of the user: agentkernel.toml, the user's own configuration, and the list of trusted files."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable

from k8e.cli.agentkernel.plan import FILE_NAME, state_folder
from k8e.profiles.config.file import MAX_SIZE, Config, read_config
from k8e.profiles.errors import ProfileError
from k8e.profiles.trust import Trusted, is_trusted, read_trusted, write_trusted


def find_named(path: str) -> tuple[Config, bool]:
    """The file that the user named, which is trusted for that."""
    return parse(read_bytes(path, follow=True), path), True


def find_own() -> tuple[Config, bool]:
    """The file in the working directory. A link is refused: it would borrow the trust of another place."""
    content = read_bytes(FILE_NAME, follow=False)
    config = parse(content, FILE_NAME)
    return config, is_trusted(load_trusted(), os.path.realpath(FILE_NAME), content)


def read_user(path: str) -> Config:
    content = read_bytes(path, follow=True)
    found = os.stat(path)
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise ProfileError(
            "config_untrusted",
            f"{path} could be changed by another user",
            hint=f"chown it to yourself, and chmod go-w {path}",
        )
    config = parse(content, path)
    for wish in ("name", "files"):
        if wish in config.options.said:
            error = f"{config.where(wish)} belongs into a project's file, not into yours"
            raise ProfileError("config_invalid", error, hint="move it to the agentkernel.toml of the project")
    return config


_SEE = "see to the file, or name another one: --config FILE"


def read_bytes(path: str, *, follow: bool) -> bytes:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if not follow and os.path.islink(path):
            raise ProfileError(
                "config_link",
                f"{path} is a link, and links are not followed",
                detail=f"to {os.readlink(path)}",
                hint="put the file itself there, or name the one that is meant: --config FILE",
            ) from error
        raise ProfileError("config_unreadable", f"{path} cannot be read", detail=str(error), hint=_SEE) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ProfileError("config_unreadable", f"{path} is no file", hint=_SEE)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(MAX_SIZE + 1)
    if len(content) > MAX_SIZE:
        raise ProfileError("config_unreadable", f"{path} has more than {MAX_SIZE} bytes", hint=_SEE)
    return content


def parse(content: bytes, path: str) -> Config:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ProfileError("config_syntax", f"{path} is not UTF-8", detail=str(error), hint=_SEE) from error
    return read_config(text, path)


# Trust


def load_trusted() -> tuple[Trusted, ...]:
    try:
        with open(os.path.join(state_folder(), "trusted.json"), encoding="utf-8") as file:
            return read_trusted(file.read(1 << 20))
    except (FileNotFoundError, UnicodeDecodeError):
        return ()
    except OSError as error:
        raise ProfileError(
            "trust_unreadable", "what you trust cannot be read", detail=str(error), hint=_see_to_list()
        ) from error


def change_trusted(change: Callable[[tuple[Trusted, ...]], tuple[Trusted, ...]]) -> None:
    """Changes the list under a lock: what one process revokes, another must not bring back."""
    folder = state_folder()
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        with open(os.path.join(folder, "trusted.lock"), "w", opener=open_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = change(load_trusted())
            descriptor, draft = tempfile.mkstemp(prefix=".trusted.", dir=folder)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(write_trusted(entries))
                file.flush()
                os.fsync(descriptor)
            os.replace(draft, os.path.join(folder, "trusted.json"))
    except OSError as error:
        problem = "what you trust cannot be written down"
        raise ProfileError("trust_unwritable", problem, detail=str(error), hint=_see_to_list()) from error


def _see_to_list() -> str:
    return f"see to {os.path.join(state_folder(), 'trusted.json')}: it has to be yours"


def open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)

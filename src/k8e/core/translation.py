"""Translates errors of engines and links into Faults, by tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from k8e.core.errors import Fault, Kind, correct
from k8e.engine import EngineError, MountRefused, SharingRefused
from k8e.link.errors import AgentError, BrokenInput, Code, LinkError, NotStarted, Stage

_LOOK: Final = "It ran. Look at what it has done before you run it again."
_DAEMON_LOG: Final = "`k8e doctor` says what does not work on this machine; the daemon log has the details."

# The agent's answers about files: kind, our code, the hint.
_FILES: Final[Mapping[Code, tuple[Kind, str, str]]] = {
    Code.NOT_FOUND: (Kind.NOT_FOUND, "file_not_found", "Relative paths begin at /workspace; list what is there."),
    Code.DENIED: (Kind.DENIED, "permission_denied", "Commands and files are the default user's, not root's."),
    Code.EXISTS: (Kind.CONFLICT, "file_exists", "Choose another name, or remove what is there first."),
    Code.NOT_DIRECTORY: (Kind.INVALID, "not_a_directory", "A part of the path that should be a directory is a file."),
    Code.IS_DIRECTORY: (Kind.INVALID, "is_a_directory", "List it, or name a file in it."),
    Code.NOT_REGULAR: (Kind.INVALID, "not_a_regular_file", "Devices, pipes and sockets can be used by commands only."),
    Code.NAME_TOO_LONG: (
        Kind.INVALID,
        "name_too_long",
        "A name has at most 255 bytes, a path 4095: choose a shorter one.",
    ),
    Code.LINK_LOOP: (Kind.INVALID, "link_loop", "Links on the path lead in a circle: name the file itself."),
    Code.NO_SPACE: (Kind.EXHAUSTED, "disk_full", "Remove files, or create a session with a larger disk."),
    Code.READ_ONLY: (Kind.DENIED, "read_only", "Write below /workspace or /tmp."),
    Code.NOT_EMPTY: (
        Kind.CONFLICT,
        "not_empty",
        "Remove it with everything in it: `k8e sandbox rm --recursive`, `rm -r` inside.",
    ),
    Code.BUSY: (
        Kind.CONFLICT,
        "busy",
        "A mount or a running program uses it: choose another path, or end the program first.",
    ),
    Code.TOO_MANY: (Kind.EXHAUSTED, "too_many", "End or collect some of what runs, then try again."),
    Code.NO_MEMORY: (Kind.EXHAUSTED, "out_of_memory", "Create a session with more memory."),
    Code.INVALID: (
        Kind.INVALID,
        "invalid_argument",
        "The file system in the sandbox does not take this: choose another path.",
    ),
    Code.TOO_DEEP: (Kind.EXHAUSTED, "too_deep", "Begin further down: 128 levels are handled at once."),
    Code.TOO_BIG: (Kind.EXHAUSTED, "too_big", "Ask for a part of it, with head or tail, or further down."),
    Code.LOST: (Kind.LOST, "command_lost", _LOOK),
    Code.UNKNOWN_COMMAND: (Kind.LOST, "command_lost", _LOOK),
}

# The agent's answers when a command did not start. Nothing ran.
_STARTS: Final[Mapping[tuple[Stage, Code], tuple[Kind, str, str, str]]] = {
    (Stage.CWD, Code.NOT_FOUND): (Kind.INVALID, "workdir_not_found", "workdir", "Create the directory first."),
    (Stage.CWD, Code.NOT_DIRECTORY): (Kind.INVALID, "workdir_not_a_directory", "workdir", "Name a directory."),
    (Stage.CWD, Code.DENIED): (
        Kind.DENIED,
        "workdir_denied",
        "workdir",
        "Commands are the default user's, not root's.",
    ),
    (Stage.EXEC, Code.NOT_FOUND): (Kind.UNAVAILABLE, "program_not_found", "argv", "This image does not have it."),
    (Stage.EXEC, Code.DENIED): (Kind.DENIED, "program_not_executable", "argv", "chmod +x may be missing."),
    (Stage.EXEC, Code.NOT_EXECUTABLE): (Kind.INVALID, "program_not_executable", "argv", "Is it a script without #!?"),
    (Stage.EXEC, Code.TOO_BIG): (Kind.INVALID, "arguments_too_long", "argv", "Hand large input over in a file."),
}

# The engine's reasons for not having an image.
_IMAGES: Final[Mapping[str, tuple[Kind, str, str]]] = {
    "invalid": (
        Kind.INVALID,
        "invalid_argument",
        "Names are docker's: python:3.12-slim, registry.example/team/app@sha256:...",
    ),
    "not_found": (
        Kind.NOT_FOUND,
        "image_not_found",
        "`k8e image list` has the names here; a registry may call it otherwise.",
    ),
    "unauthorized": (
        Kind.DENIED,
        "image_unauthorized",
        "`docker login REGISTRY` or `podman login REGISTRY`, then pull it again.",
    ),
    "rate_limited": (
        Kind.EXHAUSTED,
        "registry_busy",
        "Wait a few minutes, or log in at the registry, which allows more.",
    ),
    "no_platform": (Kind.UNAVAILABLE, "image_not_for_this_machine", "Choose an image for this machine's architecture."),
    "unreachable": (
        Kind.UNAVAILABLE,
        "registry_unreachable",
        "Is its name right, and does this machine reach it? Then pull again.",
    ),
    "untrusted": (
        Kind.UNAVAILABLE,
        "registry_untrusted",
        "Install its CA on this machine, or use a registry with a valid certificate.",
    ),
    "refused": (Kind.FAILED, "image_refused", "Have it built or exported anew: its content is not what it says."),
    "disk_full": (Kind.EXHAUSTED, "disk_full", "Make room: `k8e image prune` removes what is not used."),
}


# A path is the workspace's or another directory's as often as the image's; a script also needs its interpreter.
_NO_FILE: Final = "There is no such file in the sandbox, or not the interpreter that its first line (#!) names."


def translate(error: Exception, subject: str, program: bytes = b"") -> Fault:
    """`subject` says in a few words what was tried, `program` is the first word of the command if it was one."""
    if isinstance(error, NotStarted):
        return _translate_start(error, subject, program)
    if isinstance(error, AgentError):
        kind, code, hint = _FILES.get(
            error.code,
            (Kind.FAILED, "failed", "The detail has the sandbox's own words; look at what is there, then try again."),
        )
        return Fault(kind, code, f"{subject} failed", detail=str(error), hint=hint)
    if isinstance(error, BrokenInput):
        hint = "It has ended, or has closed its input: its result says how."
        return Fault(Kind.CONFLICT, "stdin_closed", "the command does not read its input any more", hint=hint)
    if isinstance(error, LinkError):
        hint = "It may or may not have happened. Look before you do it again."
        return Fault(Kind.LOST, "sandbox_unreachable", f"{subject}: the answer was lost", detail=str(error), hint=hint)
    if isinstance(error, MountRefused):
        return Fault(
            Kind.DENIED,
            "mount_refused",
            f"{subject} failed",
            detail=str(error),
            hint=error.hint or correct("mounts"),
            field="mounts",
        )
    if isinstance(error, SharingRefused):
        field = "parent_session_id"
        hint = error.hint or correct(field)
        return Fault(Kind.DENIED, "sharing_refused", f"{subject} failed", detail=str(error), hint=hint, field=field)
    if isinstance(error, EngineError):
        return Fault(
            Kind.FAILED, "sandbox_failed", f"{subject} failed", detail=str(error), hint=error.hint or _DAEMON_LOG
        )
    raise error


def _translate_start(error: NotStarted, subject: str, program: bytes) -> Fault:
    found = _STARTS.get((error.stage, error.code))
    if found is not None:
        kind, code, field, hint = found
        if code == "program_not_found" and b"/" in program:
            hint = _NO_FILE
        return Fault(kind, code, f"{subject} did not start", detail=str(error), hint=hint, field=field)
    if error.stage is Stage.RESOURCES or error.code in (Code.NO_MEMORY, Code.TOO_MANY):
        hint = "End some of what runs in the session, or create one with higher limits."
        return Fault(Kind.EXHAUSTED, "too_many_processes", f"{subject} did not start", detail=str(error), hint=hint)
    return Fault(Kind.FAILED, "not_started", f"{subject} did not start", detail=str(error), hint=_DAEMON_LOG)


@contextmanager
def translated(subject: str) -> Iterator[None]:
    try:
        yield
    except (LinkError, EngineError) as error:
        raise translate(error, subject) from error


@contextmanager
def translated_image(subject: str) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        kind, code, hint = _IMAGES.get(error.reason, (Kind.FAILED, "image_failed", _DAEMON_LOG))
        field = "image" if kind is Kind.INVALID else ""
        raise Fault(
            kind, code, f"{subject} failed", detail=error.cause, hint=error.hint or hint, field=field
        ) from error

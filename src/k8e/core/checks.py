"""Checks of what comes through a door: names, paths, sizes, numbers and times. Pure.

Each returns its value in the form that the rest of core works with (bytes for what goes into a sandbox), or raises a
Fault that names the field. Checks of one noun alone stand with it, as in runs/launcher.py and sessions/mounts.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from k8e.core.errors import Fault, Kind, correct
from k8e.core.model import (
    MAX_ENV_BYTES,
    MAX_ENV_KEYS,
    MAX_MESSAGE,
    WORKSPACE,
    Caller,
    SessionSpec,
    Terminal,
)
from k8e.engine import Limits, Runtime
from k8e.engine.reference import InvalidReference, parse_reference
from k8e.policy import HostList, InvalidEntry
from k8e.profiles.text import describe_amount

MAX_TIMEOUT: Final = 86_400.0
MAX_TTL: Final = 30 * 86_400.0
MAX_PATH: Final = 4095  # PATH_MAX without the NUL
MAX_SIGNAL: Final = 64
MAX_USER: Final = 128
MAX_SIDE: Final = 0xFFFF  # of a terminal
MAX_LABELS: Final = 32
MAX_LABEL_BYTES: Final = 16 << 10
MAX_WORDS: Final = 2000  # characters of what a person is asked, and of the answer

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")
_RUN_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TERM: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
HOST: Final = "host"  # the machine's own toolchain
BASE: Final = "k8e/base"  # what is built here
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")

# Below these nothing starts; above them the caller mistook the unit.
_LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "cpus": (0.01, 1024),
    "memory": (16 << 20, 1 << 44),
    "pids": (8, 1 << 22),
    "disk": (1 << 20, 1 << 50),
    "inodes": (64, 1 << 32),
    "open_files": (16, 1 << 20),
}

# gVisor's own kernel, and that of a virtual machine, take about this much before the first command.
_MEMORY: Final[Mapping[Runtime, int]] = {
    Runtime.GVISOR: 32 << 20,
    Runtime.KATA: 128 << 20,
    Runtime.FIRECRACKER: 128 << 20,
}


def refuse(field: str, cause: str, hint: str = "") -> NoReturn:
    raise Fault(Kind.INVALID, "invalid_argument", f"{field}: {cause}", field=field, hint=hint or correct(field))


def check_name(field: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        refuse(field, "must be 1 to 63 of A-Z a-z 0-9 _ - and not begin with -")
    return value


def check_caller(caller: Caller) -> None:
    """A tenant may have a part (access.py): doors make it, and no user can name it."""
    tenant, slash, part = caller.tenant.partition("/")
    if tenant or slash:
        check_name("tenant", tenant)
    if slash:
        check_name("tenant", part)


def check_run_id(value: object) -> str:
    if not isinstance(value, str) or not _RUN_ID.fullmatch(value):
        refuse("run_id", "is not the id of a run")
    return value


def check_approval_id(value: object) -> str:
    if not isinstance(value, str) or not _RUN_ID.fullmatch(value):
        refuse("approval_id", "is not the id of an approval")
    return value


def check_words(field: str, value: object, *, empty: bool) -> str:
    """Text that a person decides by, as it is kept and shown everywhere: characters that a terminal acts on, or that
    hide or reorder others, stand there as escapes."""
    if not isinstance(value, str):
        refuse(field, "must be a string")
    if len(value) > MAX_WORDS:
        refuse(field, f"has {len(value)} characters, the limit is {MAX_WORDS}")
    shown = "".join(letter if letter.isprintable() else _escape(letter) for letter in value.strip())
    if not shown and not empty:
        refuse(field, "is empty")
    return shown


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def encode(field: str, value: object) -> bytes:
    """The bytes of a string from a command line or JSON: undecodable ones come back as they were."""
    if not isinstance(value, str):
        refuse(field, "must be a string")
    try:
        content = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        refuse(field, "is not text")
    if b"\0" in content:
        refuse(field, "contains a NUL byte")
    return content


def check_path(field: str, value: object) -> bytes:
    """The absolute path; relative ones begin at the workspace. `..` and links are the sandbox's own business."""
    path = encode(field, value)
    if not path:
        refuse(field, "is empty")
    if not path.startswith(b"/"):
        path = WORKSPACE + b"/" + path
    if len(path) > MAX_PATH:
        refuse(field, f"is longer than {MAX_PATH} bytes")
    return path


def check_user(value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_USER or not value.isprintable():
        refuse("user", f"is no user: a name or number of at most {MAX_USER} characters", "Such as root, or 1000:1000.")


def check_content(field: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        refuse(field, "must be bytes")
    if len(value) > MAX_MESSAGE:
        refuse(field, f"has {len(value)} bytes, the limit is {MAX_MESSAGE}", "Send it in parts, appending.")
    return value


def check_number(field: str, value: object, lowest: float, highest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(field, "must be a number")
    if not lowest <= value <= highest:  # which a NaN is not
        name = field.removeprefix("limits.")
        refuse(field, f"must be {describe_amount(name, lowest)} to {describe_amount(name, highest)}")
    return value


def check_timeout(value: object) -> float:
    return _check_seconds("timeout", value, MAX_TIMEOUT)


def check_ttl(value: object) -> float:
    return _check_seconds("ttl", value, MAX_TTL)


def _check_seconds(field: str, value: object, highest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(field, "must be a number")
    if not 0 < value <= highest:  # which a NaN is not
        refuse(field, f"must be more than 0 and at most {describe_amount(field, highest)} seconds")
    return value


def check_env(field: str, env: Mapping[str, object]) -> tuple[tuple[bytes, bytes], ...]:
    """Faults name keys, never values."""
    if len(env) > MAX_ENV_KEYS:
        refuse(field, f"has {len(env)} variables, the limit is {MAX_ENV_KEYS}")
    variables = []
    size = 0
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            refuse(field, f"{name[:64]!r} is not the name of a variable")
        content = encode(f"{field}.{name[:64]}", value)
        size += len(name) + len(content) + 2  # = and NUL
        variables.append((name.encode(), content))
    if size > MAX_ENV_BYTES:
        refuse(field, f"takes {size} bytes, the limit is {MAX_ENV_BYTES}", "Hand larger values over in a file.")
    return tuple(variables)


def check_size_of_env(env: Sequence[tuple[bytes, bytes]]) -> None:
    """The size of all variables together, which were checked in parts."""
    if len(env) > MAX_ENV_KEYS:
        refuse("env", f"has {len(env)} variables with the secrets, the limit is {MAX_ENV_KEYS}")
    size = sum(len(name) + len(value) + 2 for name, value in env)
    if size > MAX_ENV_BYTES:
        refuse("env", f"takes {size} bytes with the secrets, the limit is {MAX_ENV_BYTES}")


def check_limits(limits: Limits) -> None:
    for name, (lowest, highest) in _LIMITS.items():
        value = getattr(limits, name)
        check_number(f"limits.{name}", value, lowest, highest)
        if name != "cpus" and not isinstance(value, int):
            refuse(f"limits.{name}", "must be a whole number")


def check_memory(runtime: Runtime, limits: Limits) -> None:
    """The least memory of a runtime, which is chosen after the limits were checked."""
    lowest = _MEMORY.get(runtime, 0)
    if limits.memory < lowest:
        cause = f"must be at least {describe_amount('memory', lowest)} with the runtime {runtime.value}"
        refuse("limits.memory", cause, "Give it more memory, or choose the runtime native, which needs 16 MiB.")


def check_image(value: object, field: str = "image") -> str:
    """In its canonical form: `host`, a digest, or a name with its registry."""
    if not isinstance(value, str):
        refuse(field, "must be a string")
    if value in (HOST, BASE) or _DIGEST.fullmatch(value):
        return value
    try:
        found = parse_reference(value)
    except InvalidReference as error:
        refuse(field, error.cause, "Such as python:3.12 or registry.example.com/team/image:tag.")
    if found.host == "docker.io" and found.path.startswith("k8e/"):
        if (found.path, found.tag, found.digest) != (BASE, "latest", ""):
            refuse(field, "names that begin with k8e/ are for what is built here", f"There is {BASE}.")
        return BASE
    return str(found)


def check_hosts(field: str, value: object) -> HostList:
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value) or isinstance(value, str):
        refuse(field, "must be a list of hosts")
    try:
        return HostList.parse(value)
    except InvalidEntry as error:
        refuse(field, f"{error.text[:100]!r}: {error.cause}", error.hint)


def check_session(spec: SessionSpec) -> tuple[tuple[bytes, bytes], ...]:
    """Everything but the manifest, whose entries are checked by `manifest.check_entries`. Returns the environment."""
    if spec.session_id:
        check_name("session_id", spec.session_id)
    if spec.tenant:
        check_name("tenant", spec.tenant)
    check_image(spec.image)
    if spec.limits is not None:
        check_limits(spec.limits)
    if spec.ttl is not None:
        check_ttl(spec.ttl)
    check_labels(spec.labels)
    if twice := sorted(set(spec.env) & set(spec.secrets)):
        refuse("secrets", f"{twice[0]} is in env as well")
    env = (*check_env("env", spec.env), *check_env("secrets", spec.secrets))
    check_size_of_env(env)
    return env


def check_labels(labels: Mapping[str, object]) -> None:
    if len(labels) > MAX_LABELS:
        refuse("labels", f"has {len(labels)} entries, the limit is {MAX_LABELS}")
    size = 0
    for name, value in labels.items():
        if not _LABEL.fullmatch(name):
            refuse("labels", f"{name[:64]!r} is not the name of a label", "1 to 63 of A-Z a-z 0-9 . _ / -")
        if not isinstance(value, str) or not value.isprintable():
            refuse(f"labels.{name}", "is not printable text")
        size += len(name) + len(value.encode())
    if size > MAX_LABEL_BYTES:
        refuse("labels", f"takes {size} bytes, the limit is {MAX_LABEL_BYTES}")


def check_signal(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_SIGNAL:
        refuse("signal", f"must be the number of a signal, 1 to {MAX_SIGNAL}")
    return number


def check_size(rows: object, columns: object) -> None:
    for field, value in (("terminal.rows", rows), ("terminal.columns", columns)):
        if not isinstance(value, int):
            refuse(field, "must be a whole number")
        check_number(field, value, 0, MAX_SIDE)  # 0 is what a terminal says that does not know


def check_terminal(terminal: Terminal) -> None:
    check_size(terminal.rows, terminal.columns)
    if terminal.term and not _TERM.fullmatch(terminal.term):
        refuse("terminal.term", "is not the name of a kind of terminal")

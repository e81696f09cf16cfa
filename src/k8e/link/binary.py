"""Finds and verifies the agent's executable and its loader, and writes them where a sandbox starts them.

An installed package has one of each per architecture, and this module has their hashes: pid 1 of a sandbox is the
released program, or the sandbox is not made. A checkout uses its own build for this machine.

    BinaryError
    ├── UnknownMachine       there is no agent for that architecture
    ├── BinaryMissing        it was not built, or not installed
    └── BinaryMismatch       the file is not the one that was released or built
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from k8e.link.errors import LinkError

# SHA-256 of the release builds, written by `make pin` after a change of the agent. The wheel build refuses any other.
PINNED: Mapping[str, str] = MappingProxyType(
    {
        "x86_64": "c6a7d9c64af13928d81186822d10f6d68c66a1b2069d2885c9c182dc0fd50c8a",
        "aarch64": "f88214c1a1002b8370a0d0b2f2a48d6916bf0c10238bbf877a638b6e8102c4fc",
    }
)

PINNED_LOADERS: Mapping[str, str] = MappingProxyType(
    {
        "loader_x86_64": "a9b4d7c7af96684f72826956a69cd8d5ea824efec43a0d2f30443abd54e29222",
        "loader_aarch64": "087a698245e14adff79aa5525dc07b06422eab947b912ba262c8652d4265b322",
    }
)

PACKAGE = Path(__file__).resolve().parent.parent
PACKAGED = PACKAGE / "_agent"
CHECKOUT = PACKAGE.parent.parent


class BinaryError(LinkError):
    """No agent that could be trusted."""


class UnknownMachine(BinaryError):
    pass


class BinaryMissing(BinaryError):
    pass


class BinaryMismatch(BinaryError):
    pass


@dataclass(frozen=True, slots=True)
class VerifiedBinary:
    """The bytes themselves, not a path: between a check and a second read the file could be another."""

    machine: str
    sha256: str
    content: bytes = field(repr=False)


def agent_binary(machine: str | None = None, *, packaged: Path = PACKAGED, checkout: Path = CHECKOUT) -> VerifiedBinary:
    """Returns the agent for `machine` (as `uname -m` names it; None: this one)."""
    return _find(machine, "k8e-agent", "", packaged, checkout)


def loader_library(
    machine: str | None = None, *, packaged: Path = PACKAGED, checkout: Path = CHECKOUT
) -> VerifiedBinary:
    """Returns the library that the agent preloads into parked interpreters."""
    return _find(machine, "k8e-loader", ".so", packaged, checkout)


def _find(machine: str | None, name: str, suffix: str, packaged: Path, checkout: Path) -> VerifiedBinary:
    here = platform.machine()
    machine = machine or here
    if machine not in PINNED:
        raise UnknownMachine(f"there is no agent for {machine}, only for {' and '.join(PINNED)}")
    if packaged.is_dir():
        remedy = "install the k8e package again"
        pinned = PINNED_LOADERS[f"loader_{machine}"] if suffix else PINNED[machine]
        return _verify(machine, _read(packaged / f"{name}-{machine}{suffix}", remedy), pinned, remedy)
    if machine != here:
        raise BinaryMissing(
            f"a checkout builds the agent for {here} only: for {machine} install the wheel of `make release`"
        )
    built = checkout / "build" / "agent" / f"{name}{suffix}"
    # The build wrote this hash. It detects a broken build, not a user who may write to the checkout.
    recorded = _read(built.with_name(f"{built.name}.sha256"), "run `make agent`").decode("ascii", "replace").strip()
    return _verify(machine, _read(built, "run `make agent`"), recorded, "run `make agent`")


def place(binary: VerifiedBinary, target: Path) -> None:
    """Writes the verified bytes to `target`, executable, at once or not at all; what was there before is replaced.

    Not synced: after a power cut the sandbox that needed it is gone too.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
    try:
        with open(descriptor, "wb") as file:
            file.write(binary.content)
            os.fchmod(file.fileno(), 0o755)  # whatever the umask
        partial.rename(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BinaryMissing(f"there is no {path}: {remedy}") from error


def _verify(machine: str, content: bytes, expected: str, remedy: str) -> VerifiedBinary:
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise BinaryMismatch(f"the agent for {machine} has SHA-256 {digest}, expected {expected}: {remedy}")
    return VerifiedBinary(machine, digest, content)

"""Finds and verifies the agent's executable, that of pods, the loader and the first process of virtual machines, and
writes them where a sandbox starts them.

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
        "x86_64": "349d82c95dbef79cd7696bfb0f5f513932c0f73af6847560e1956a246a510832",
        "aarch64": "f23be12d12596b5184f34fe136036a45a1aac1485352d8857cdff0b1cfc68c2c",
    }
)

PINNED_PODS: Mapping[str, str] = MappingProxyType(
    {
        "pod_x86_64": "6339454c4e4eace842889080af1c38a5672c68dab8cbaaa547a44837a5a71e1f",
        "pod_aarch64": "d59d2bf1da01c466ce7f8221327b09aae2ff820c5c9464906fb21f09f6038908",
    }
)

PINNED_LOADERS: Mapping[str, str] = MappingProxyType(
    {
        "loader_x86_64": "21d79109512c6d4ddbe83c17e0a80fa1dc6ea83b2cee0a389500f12aed571484",
        "loader_aarch64": "2e23d42d163d9b267337ff1001d05bc7dc0ae0aef8f065afa8d2fec11a740624",
    }
)

PINNED_GUESTS: Mapping[str, str] = MappingProxyType(
    {
        "guest_x86_64": "0003c1b7268c882421fbe4a58f357e7268e02be52b9b5564f3e9cb0a0b59ad5b",
        "guest_aarch64": "2053c1bad7798b447e839f7986e74b4e7e559322b69badf99b1cd0783b4914af",
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
    return _find(machine, PINNED, "", ("k8e-agent", ""), packaged, checkout)


def pod_agent_binary(
    machine: str | None = None, *, packaged: Path = PACKAGED, checkout: Path = CHECKOUT
) -> VerifiedBinary:
    """Returns the agent of pods, which listens on TCP (docs/kubernetes-channel.md)."""
    return _find(machine, PINNED_PODS, "pod_", ("k8e-agent-pod", ""), packaged, checkout)


def loader_library(
    machine: str | None = None, *, packaged: Path = PACKAGED, checkout: Path = CHECKOUT
) -> VerifiedBinary:
    """Returns the library that the agent preloads into parked interpreters."""
    return _find(machine, PINNED_LOADERS, "loader_", ("k8e-loader", ".so"), packaged, checkout)


def guest_binary(machine: str | None = None, *, packaged: Path = PACKAGED, checkout: Path = CHECKOUT) -> VerifiedBinary:
    """Returns the first process of a virtual machine, which starts the agent there."""
    return _find(machine, PINNED_GUESTS, "guest_", ("k8e-guest", ""), packaged, checkout)


def _find(
    machine: str | None,
    pins: Mapping[str, str],
    prefix: str,
    file: tuple[str, str],
    packaged: Path,
    checkout: Path,
) -> VerifiedBinary:
    name, suffix = file
    here = platform.machine()
    machine = machine or here
    if machine not in PINNED:
        raise UnknownMachine(f"there is no agent for {machine}, only for {' and '.join(PINNED)}")
    if packaged.is_dir():
        remedy = "install the k8e package again"
        content = _read(packaged / f"{name}-{machine}{suffix}", remedy)
        return _verify(machine, content, pins[f"{prefix}{machine}"], remedy)
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

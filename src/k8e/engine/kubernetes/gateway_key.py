"""The key that the agents of a gateway's sandboxes answer to: in a file of the gateway's own, or in a Secret, of which
the file is a copy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from k8e.damage import Damaged, check_own
from k8e.engine import EngineError
from k8e.engine.kubernetes.shared_secret import SharedSecret
from k8e.link.noise import GatewayKey

_ENTRY = "gateway.pem"


def load_key(path: Path) -> GatewayKey:
    """Reads the key, or makes one. EngineError when the file is not this user's own or cannot be read: with another key
    no sandbox that exists could be reached."""
    try:
        if not path.exists():
            _write(path, GatewayKey.generate().pem())
        check_own(path.lstat())
        return GatewayKey.read(path)
    except (Damaged, OSError, ValueError) as error:
        hint = "put the file back from a copy; without it the sandboxes that exist cannot be reached: delete their pods"
        raise EngineError("gateway's key", f"{path}: {error}", hint) from error


async def share_key(secret: SharedSecret, path: Path) -> None:
    """Writes the key of the Secret to the file. The first gateway puts the one of its file there, or a new one.
    EngineError when the Secret has no key, or the file has another one."""
    own = await asyncio.to_thread(_read_or_generate, path)
    await asyncio.to_thread(_copy, (await secret.share({_ENTRY: own}))[_ENTRY], path)


def _read_or_generate(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return GatewayKey.generate().pem()


def _copy(content: bytes, path: Path) -> None:
    try:
        wanted = GatewayKey.parse(content)
        if not path.exists():
            _write(path, content)
        elif GatewayKey.read(path).public != wanted.public:
            hint = f"remove {path}, or let K8E_STATE_DIR name another directory"
            raise EngineError("gateway's key", f"{path} is not the key of [kubernetes] key_secret", hint)
    except (OSError, ValueError) as error:
        hint = "put the content of [kubernetes] key_secret back from a copy"
        raise EngineError("gateway's key", f"the Secret or {path}: {error}", hint) from error


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise

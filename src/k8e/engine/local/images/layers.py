"""Unpacks a layer from a file to a directory, and hashes and counts it on the way.

Two processes and this thread between them: a decompressor without any rights, under the account nobody, and the
unpacker (unpacker.py), which has the target directory and nothing else. The hash is taken here and not by one of them:
a stream that takes one of them over can spoil its own layer, but not pass for another.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from k8e.engine import EngineError
from k8e.engine.local.images.limits import ImageLimits
from k8e.engine.local.system.calls import opened, syncfs
from k8e.engine.local.system.tool import bound_to, find_tool

_UNPACKER = Path(__file__).with_name("unpacker.py")
_PIECE = 1 << 20
_REPORT = 256 << 20  # bytes of the unpacker's answer
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_NOBODY = "65534"


class Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Unpacked:
    diff_id: str  # sha256 of the uncompressed tar, hex
    entries: int
    size: int  # bytes of its files
    whole: bool = False  # nothing of the layers below it is seen


class Cancelled(Exception):
    """The caller does not want the layer any more."""


def refused(cause: str) -> EngineError:
    return EngineError("image", cause, "The image was not made by a tool that means well, or it is damaged.", "refused")


def decompressor(head: bytes) -> list[str] | None:
    """The command, by the first bytes of the file: what a manifest says of it is not trusted."""
    if head.startswith(_GZIP):
        command = ["gzip", "-dc"]
    elif head.startswith(_ZSTD):
        command = ["zstd", "-dcq", "--no-progress", "--memory=256MB"]
    else:
        return None
    if find_tool(command[0]) is None:
        hint = f"install {command[0]} (`k8e doctor --fix` does)"
        raise EngineError("image", f"there is no {command[0]} to unpack it with", hint)
    # As the account nobody, with no capability, no way to get one, and nothing but its pipes.
    return [
        *("setpriv", "--reuid", _NOBODY, "--regid", _NOBODY, "--clear-groups", "--no-new-privs"),
        *("--inh-caps=-all", "--bounding-set=-all", "--pdeathsig", "KILL", "--"),
        *("prlimit", f"--as={1 << 30}", "--fsize=65536", "--core=0", "--", *command),
    ]


class Decompressed:
    """The content of a file, uncompressed."""

    def __init__(self, file: IO[bytes]) -> None:
        command = decompressor(os.pread(file.fileno(), 4, 0))
        file.seek(0)
        os.lseek(file.fileno(), 0, os.SEEK_SET)  # a buffer has an idea of its own of where it is
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._plain = file
        if command is not None:
            self._process = subprocess.Popen(
                bound_to(os.getpid(), command),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env=_ENV,
                cwd="/",
                start_new_session=True,
            )

    def read(self, size: int) -> bytes:
        if self._process is None:
            return self._plain.read(size)
        assert self._process.stdout is not None
        piece = self._process.stdout.read(size)
        if not piece and self._process.wait() != 0:
            self._complaints.seek(0)
            words = self._complaints.read(300).decode(errors="replace").strip()
            raise refused(f"a layer cannot be decompressed: {words or self._process.returncode}")
        return piece

    def close(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        self._complaints.close()


def unpack_file(
    file: IO[bytes], packed: int, target: Path, limits: ImageLimits, stop: threading.Event, tell: Callable[[int], None]
) -> Unpacked:
    """`packed` is its size in bytes. The target is an empty directory."""
    stream = Decompressed(file)
    try:
        return unpack(stream, packed, target, limits, stop, tell)
    finally:
        stream.close()


def unpack(
    source: Source,
    packed: int,
    target: Path,
    limits: ImageLimits,
    stop: threading.Event,
    tell: Callable[[int], None],
) -> Unpacked:
    settings = {name: getattr(limits, name) for name in ("bytes", "entries", "path", "depth", "seconds")}
    with tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            # Isolated: it needs the standard library and nothing else.
            bound_to(
                os.getpid(), [sys.executable, "-I", "-S", "-B", str(_UNPACKER), str(target), json.dumps(settings)]
            ),
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=complaints,
            env=_ENV,
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            diff_id = _feed(source, packed, process.stdin, limits, stop, tell)
            process.stdin.close()
            status = process.wait()
        except BrokenPipeError:
            status = process.wait()  # it has refused; its report says why
            diff_id = ""
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass
        report.seek(0)
        complaints.seek(0)
        words = complaints.read(2000).decode(errors="replace").strip().splitlines()
        entries, size, opaque = _read_report(report.read(_REPORT), status, words[-1] if words else "", limits.seconds)
    if not diff_id:
        raise EngineError("image", "the unpacker stopped early and did not say why")
    for path in opaque:
        if path:
            _mark_opaque(target, path)
    return Unpacked(diff_id, entries, size, whole=b"" in opaque)


def _feed(
    source: Source,
    packed: int,
    sink: IO[bytes],
    limits: ImageLimits,
    stop: threading.Event,
    tell: Callable[[int], None],
) -> str:
    total, digest = 0, hashlib.sha256()
    most = limits.bytes + limits.entries * 1024  # headers and padding
    while piece := source.read(_PIECE):
        if stop.is_set():
            raise Cancelled
        total += len(piece)
        if total > most:
            raise refused(f"a layer has more than {limits.bytes} bytes")
        if total > limits.ratio_from and total > packed * limits.ratio:
            raise refused(f"a layer of {packed} bytes unpacks to more than {limits.ratio} times as many")
        digest.update(piece)
        sink.write(piece)
        tell(total)
    sink.flush()
    return digest.hexdigest()


def _read_report(text: bytes, status: int, complaint: str, seconds: int) -> tuple[int, int, list[bytes]]:
    lines = [json.loads(line) for line in text.splitlines()]
    last = lines[-1] if lines else {}
    if "refused" in last:
        raise refused(f"a layer is refused: {last['refused']}")
    if "failed" in last:
        full = last.get("errno") in (errno.ENOSPC, errno.EDQUOT)
        hint = "Make room: `k8e image prune` removes what is not used." if full else ""
        raise EngineError("image", f"a layer cannot be written: {last['failed']}", hint, "disk_full" if full else "")
    if status == -signal.SIGXCPU:
        raise refused(f"a layer takes more than {seconds} s of processor time to unpack")
    if status != 0 or "entries" not in last:
        raise EngineError("image", f"the unpacker ended with {status}: {complaint}")
    opaque = [base64.b64decode(line["opaque"]) for line in lines[:-1]]
    return int(last["entries"]), int(last["bytes"]), opaque


def _mark_opaque(top: Path, path: bytes) -> None:
    """Component by component: neither the directory that the unpacker made nor the path that it reports is trusted."""
    handle = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in path.split(b"/"):
            if part in (b"", b".", b".."):
                raise refused("the unpacker named a directory that cannot be")
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            os.close(handle)
            handle = inner
        os.setxattr(handle, "trusted.overlay.opaque", b"y")
    except OSError as error:
        raise EngineError("image", f"a directory cannot be marked as replaced: {error}") from error
    finally:
        os.close(handle)


def sync_filesystem(path: Path) -> None:
    """Writes what is there to the disk: a name that survives a power cut stands for all of its content."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as handle:
        syncfs(handle)

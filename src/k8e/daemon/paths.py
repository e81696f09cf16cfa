"""The daemon's directories, which only its own user may change, and the lock that excludes a second daemon."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from k8e.errors import ExplainedError


class StartRefused(ExplainedError):
    """The daemon does not start."""


@dataclass(frozen=True, slots=True)
class Paths:
    state_dir: Path
    run_dir: Path

    @classmethod
    def from_environment(cls) -> Self:
        return cls(
            Path(os.environ.get("K8E_STATE_DIR") or "/var/lib/k8e").absolute(),
            Path(os.environ.get("K8E_RUN_DIR") or "/run/k8e").absolute(),
        )

    @property
    def socket(self) -> Path:
        return self.run_dir / "k8e.sock"

    @property
    def lock(self) -> Path:
        return self.run_dir / "k8e.lock"

    @property
    def log(self) -> Path:
        return self.state_dir / "daemon.log"

    @property
    def audit(self) -> Path:
        return self.state_dir / "audit.log"

    @property
    def environments(self) -> Path:
        return self.state_dir / "environments"

    @property
    def database(self) -> Path:
        return self.state_dir / "k8e.db"

    @property
    def identity(self) -> Path:
        return self.state_dir / "identity"

    @property
    def gateway_key(self) -> Path:
        """Of the Kubernetes engine; where it is, no other engine has its sessions."""
        return self.state_dir / "kubernetes" / "gateway.pem"

    def prepare(self) -> None:
        """Makes the directories. Other users may pass through but not list them: clients reach the socket, which has
        its own mode, and the users of native sandboxes reach those sandboxes' disks."""
        make_directory(self.state_dir, 0o711)
        make_directory(self.run_dir, 0o711)


def make_directory(path: Path, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode, exist_ok=True)
        found = path.lstat()
        trustworthy = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if trustworthy:
            path.chmod(mode)  # whatever the umask was
    except OSError as error:
        hint = "see to the directory, or let K8E_STATE_DIR and K8E_RUN_DIR name others"
        raise StartRefused(
            "directory_unusable", f"{path} cannot be made or used", detail=str(error), hint=hint
        ) from error
    if not trustworthy:
        raise StartRefused(
            "directory_untrusted",
            f"{path} can be changed by other users",
            detail="it is not a directory, has another owner, or is writable for others",
            hint=f"remove it, or make it a directory of uid {os.geteuid()} that other users cannot write",
        )


def take_lock(path: Path, patience: float) -> int:
    """Takes the lock and returns its descriptor: one daemon per directory. The kernel releases it with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def give_up(number: int, frame: object) -> None:
        raise BlockingIOError

    previous = signal.signal(signal.SIGALRM, give_up)
    try:
        if patience:
            signal.setitimer(signal.ITIMER_REAL, patience)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if patience else fcntl.LOCK_NB))
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise StartRefused(
            "already_running",
            "another k8e daemon is running here",
            detail=f"pid {holder or 'unknown'} holds {path}",
            hint="use that one, or stop it first; K8E_RUN_DIR and K8E_STATE_DIR make room for a second one",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    # In one write, always of the same length: a reader finds the old process id or the new one.
    note = b"%-10d\n" % os.getpid()
    os.pwrite(descriptor, note, 0)
    os.ftruncate(descriptor, len(note))
    return descriptor

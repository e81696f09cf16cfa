"""Kept parts as mount points in the namespaces of gVisor's own processes: the machine's kernel refuses these processes
what gVisor's kernel refuses its programs.

Linux refuses to rename or remove a mount point only to a process in whose own mount namespace it is one. gVisor's
sandbox process opens, renames and removes files of the project itself, through descriptors that its gofer hands it,
from a namespace with nothing in it. So what is kept is mounted there as well, read-only, over the root of that
namespace, and no call that the process's filter knows could take it away again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence

from k8e.engine import EngineError, Mount
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.mounts.kernel import RDONLY, attach_mount, clone_mount
from k8e.engine.local.system.own_thread import in_own_thread

_CLONE_FS = 0x200
_CLONE_NEWNS = 0x20000
_EXPECTED = 2  # the gofer's, and that of the sandbox process
_libc = ctypes.CDLL(None, use_errno=True)


def pin_mounts(mounts: Sequence[Mount], paths: SandboxPaths, list_processes: Callable[[], Iterable[int]]) -> None:
    """`list_processes`: all of the sandbox. In the gofer's namespace kept parts are mount points already; once more
    does no harm there, and which process is which need not be known here, but that both are among them."""
    writable = [index for index, mount in enumerate(mounts) if mount.writable]
    if not writable:
        return
    namespaces = _open_namespaces(list_processes())
    try:
        if len(namespaces) < _EXPECTED:
            found = f"{len(namespaces)} of {_EXPECTED} mount namespaces"
            raise EngineError("kept parts", f"they cannot be held against gVisor's own processes: {found} were found")
        for namespace in namespaces:
            # A mount is in one place: each namespace gets its own.
            trees = [clone_mount(paths.mounts / f"mount-{index}", RDONLY, recursive=True) for index in writable]
            try:
                in_own_thread(lambda namespace=namespace, trees=trees: _attach(namespace, trees))  # type: ignore[misc]
            finally:
                for tree in trees:
                    os.close(tree)
    except OSError as error:
        raise EngineError("kept parts", f"they cannot be held against gVisor's own processes: {error}") from error
    finally:
        for namespace in namespaces:
            os.close(namespace)


def _open_namespaces(processes: Iterable[int]) -> list[int]:
    """Those that are not ours, each once."""
    known = {os.stat("/proc/self/ns/mnt").st_ino}
    opened: list[int] = []
    for process in processes:
        try:
            namespace = os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # ended since it was listed
        if (inode := os.fstat(namespace).st_ino) in known:
            os.close(namespace)
        else:
            known.add(inode)
            opened.append(namespace)
    return opened


def _attach(namespace: int, trees: Sequence[int]) -> None:
    # Threads share their root and current directory, and the kernel moves no thread that shares them.
    if _libc.unshare(_CLONE_FS) != 0 or _libc.setns(namespace, _CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for tree in trees:
            attach_mount(tree, root)
    finally:
        os.close(root)

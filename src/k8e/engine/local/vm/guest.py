"""The guest of every virtual machine: a kernel of the distribution's, its modules, and the machine's /usr as a disk.

`k8e image build-guest` makes it (guest_builder.py), once for the machine. What is booted is the kernel with an
initramfs that holds the modules, our first process and the agent, and nothing else; it is put together here, the same
bytes from the same parts.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k8e.damage import Damaged, check_own, read_own
from k8e.engine import EngineError
from k8e.engine.local.system.calls import opened
from k8e.link.binary import agent_binary, guest_binary, loader_library

GUEST_FOLDER: Final = Path("/var/lib/k8e/guest")
MANIFEST: Final = "guest.json"
KERNEL: Final = "vmlinuz"
KERNEL_ELF: Final = "vmlinux"
HOST_DISK: Final = "host.erofs"
HINT: Final = "as root: k8e image build-guest (needs apt-get, dpkg-deb and mkfs.erofs)"
_DIRECTORY, _FILE, _PROGRAM, _CONSOLE = 0o040755, 0o100644, 0o100755, 0o020600


@dataclass(frozen=True, slots=True)
class Guest:
    folder: Path
    version: str  # of the kernel's package
    modules: tuple[str, ...]  # in the order in which they are loaded
    host_targets: tuple[str, ...]  # where what is on the disk of the image `host` is seen
    digest: str  # of all of it
    elf: Path | None = None  # the kernel as Firecracker wants it

    @property
    def kernel(self) -> Path:
        return self.folder / KERNEL

    @property
    def host_disk(self) -> Path:
        return self.folder / HOST_DISK


def load_guest(folder: Path, *, elf: bool = False, whole: bool = False) -> Guest:
    """Blocks. EngineError when there is none, or one of its files is not as it was made. Of the disk of the image
    `host`, which is as large as /usr, only the size is compared, unless `whole`. `elf`: with the kernel in that form.
    """
    try:
        place = folder.lstat()
        if place.st_uid != os.geteuid() or place.st_mode & 0o022:
            raise Damaged("other users can write there")  # and could replace what was checked
        content = read_own(folder / MANIFEST)
        manifest = json.loads(content)
        if elf and "elf" not in manifest:
            raise EngineError("guest", "the guest has no kernel in the form that Firecracker boots", HINT)
        more = manifest.get("elf", {}) if elf or whole else {}
        disk = {HOST_DISK: manifest["host"]["sha256"]} if whole else {}
        for name, digest in {**manifest["files"], **more, **disk}.items():
            if _hash_own(folder / name) != digest:
                raise Damaged(f"{name} is not what it was made as")
        status = (folder / HOST_DISK).lstat()
        check_own(status)
        if status.st_size != manifest["host"]["size"]:
            raise Damaged(f"{HOST_DISK} has another size")
        return Guest(
            folder,
            str(manifest["version"]),
            tuple(map(str, manifest["modules"])),
            tuple(map(str, manifest["host"]["targets"])),
            hashlib.sha256(content).hexdigest(),
            folder / KERNEL_ELF if elf else None,
        )
    except FileNotFoundError as error:
        raise EngineError("guest", "the guest of virtual machines is not built", HINT) from error
    except (OSError, Damaged, ValueError, LookupError, TypeError, AttributeError) as error:
        raise EngineError("guest", f"the guest in {folder} is damaged: {error}", HINT) from error


def _hash_own(path: Path) -> str:
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
        check_own(os.fstat(descriptor))
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def place_initramfs(guest: Guest, folder: Path, *, vsock: bool) -> Path:
    """Blocks. Writes it, unless it is there already; its name is the digest of its content. `vsock`: with its modules,
    which a guest with another link does without."""
    modules = [name for name in guest.modules if vsock or "vsock" not in name]
    content = b"".join(_archive(_entries(guest, modules)))
    target = folder / f"initramfs-{hashlib.sha256(content).hexdigest()}"
    if not target.exists() or target.read_bytes() != content:
        partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        partial.write_bytes(content)
        partial.chmod(0o644)
        partial.rename(target)
    return target


def _entries(guest: Guest, modules: Sequence[str]) -> Iterable[tuple[str, int, bytes]]:
    yield "dev", _DIRECTORY, b""
    yield "dev/console", _CONSOLE, b""
    yield "modules", _DIRECTORY, b""
    for number, name in enumerate(modules):
        yield f"modules/{number:02}-{name}", _FILE, read_own(guest.folder / name)
    yield "init", _PROGRAM, guest_binary().content
    yield "k8e-agent", _PROGRAM, agent_binary().content
    yield "k8e-loader.so", _PROGRAM, loader_library().content
    yield "TRAILER!!!", 0, b""


def _archive(entries: Iterable[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """In the format that the kernel unpacks (cpio, "newc"): no times, no owners but root."""
    for number, (name, mode, content) in enumerate(entries, 1):
        device = (5, 1) if mode == _CONSOLE else (0, 0)
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + os.fsencode(name) + b"\0"
        yield head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)

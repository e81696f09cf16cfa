"""The runtime `firecracker`: a microVM of the `firecracker` binary, with the guest of `kata`, in the same container.

All that is specific to it is here: what it is started with, the requests on its API socket, and how a connection to the
guest begins (vsock). Its jailer is not used: the container that confines every VMM (bundle.py) gives it a root, a user,
a control group and namespaces as the jailer does, and a user namespace and an allowlist of system calls besides.

It needs KVM and has never been run where this was written: tests compare the requests with its published description
(src/firecracker/swagger/firecracker.yaml of its repository, 1.17).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from k8e.engine import EngineError, Runtime
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.network.wires import TAP
from k8e.engine.local.system.tool import find_tool, run_tool
from k8e.engine.local.vm.bundle import KERNEL_WORDS, LINK_PATH, VmSpec, guest_options, processors
from k8e.engine.local.vm.guest import load_guest
from k8e.engine.local.vm.runtime import VmOptions, VmRuntime, find_container
from k8e.link.dial import UnixDialer
from k8e.link.errors import LinkError

API_SOCKET: Final = "api.sock"
VSOCK_SOCKET: Final = "vsock.sock"
CONTROL_PORT, AGENT_PORT = 1, 2  # of vsock: agent/guest/guest.h
MOST_PROCESSORS: Final = 32
_CID: Final = 3  # the guest's, in a machine that has no other
_NAME: Final = "runtime firecracker"
_INSTALL: Final = "put firecracker (1.8 or newer) of its releases on the PATH of root"
_OLDEST: Final = (1, 8)
_DEADLINE: Final = 5.0  # of each request, and until it listens
_LONGEST: Final = 16_384
_PAUSE: Final = 0.01
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) ")
_BODY_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: *([0-9]{1,6}) *\r\n")

Request = tuple[str, Mapping[str, Any]]  # the path, and the body, of a PUT


async def find_firecracker(options: VmOptions) -> Sequence[VmRuntime]:
    """EngineError says all that is missing. Whether KVM works is for the probe to find out."""
    binary = find_tool("firecracker")
    missing = [] if binary else ["firecracker is not installed"]
    if not os.access(options.kvm, os.R_OK | os.W_OK):
        missing.append(f"there is no {options.kvm} that can be used")
    if missing or binary is None:
        raise EngineError(_NAME, "; ".join(missing), _INSTALL if binary is None else "use kata, gvisor or native")
    told = await run_tool(binary, "--version", capture=True)
    release = re.search(r"v([0-9]+)\.([0-9]+)", told)
    if release is None or (int(release[1]), int(release[2])) < _OLDEST:
        cause = f"{told.strip()[:60]!r} is too old: the guest's kernel learns of its devices by ACPI only"
        raise EngineError(_NAME, cause, _INSTALL)
    container = await find_container(_NAME, "Firecracker")
    guest = await asyncio.to_thread(load_guest, options.guest, elf=True)
    return [VmRuntime(Runtime.FIRECRACKER, binary, container, guest, "kvm", ("kvm",))]


def firecracker_command(spec: VmSpec) -> list[str]:
    return [spec.vmm, "--id", "k8e", "--api-sock", f"{LINK_PATH}/{API_SOCKET}", "--level", "Warn"]


def list_requests(spec: VmSpec) -> list[Request]:
    """In their order: the first drive is the guest's first, and the last request starts it."""
    limits = spec.sandbox.limits
    if processors(limits) > MOST_PROCESSORS:
        raise EngineError("cpus", f"a microVM has at most {MOST_PROCESSORS} processors")
    words = [*KERNEL_WORDS, "reboot=k", "pci=off", *guest_options(spec)]
    boot = {"kernel_image_path": "/k8e/kernel", "initrd_path": "/k8e/initramfs", "boot_args": " ".join(words)}
    base = {"drive_id": "base", "path_on_host": "/k8e/base", "is_root_device": False, "is_read_only": True}
    disk = {"drive_id": "disk", "path_on_host": "/k8e/disk", "is_root_device": False, "is_read_only": False}
    return [
        ("/machine-config", {"vcpu_count": processors(limits), "mem_size_mib": limits.memory >> 20}),
        ("/boot-source", boot),
        ("/drives/base", base),
        ("/drives/disk", {**disk, "cache_type": "Writeback"}),
        ("/network-interfaces/wire", {"iface_id": "wire", "host_dev_name": TAP, "guest_mac": spec.wire.inner_mac}),
        ("/vsock", {"guest_cid": _CID, "uds_path": f"{LINK_PATH}/{VSOCK_SOCKET}"}),
        ("/entropy", {}),
        ("/actions", {"action_type": "InstanceStart"}),
    ]


async def boot(paths: SandboxPaths, requests: Sequence[Request]) -> None:
    """Tells a VMM that was just started what machine it is, and starts that."""
    for path, body in requests:
        try:
            async with asyncio.timeout(_DEADLINE):
                status, answer = await _put(paths.link / API_SOCKET, path, body)
        except TimeoutError as error:
            raise EngineError("firecracker", f"{path}: no answer in {_DEADLINE:g} s") from error
        except (OSError, LinkError, ValueError) as error:
            raise EngineError("firecracker", f"{path}: {error}") from error
        if status != 204:
            raise EngineError("firecracker", f"{path}: {status} {_read_fault(answer)}")


async def _put(api: Path, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
    content = json.dumps(body).encode()
    head = f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection = await _connect(api)
    loop, heard = asyncio.get_running_loop(), b""
    try:
        await loop.sock_sendall(connection, head.encode() + b"\r\n\r\n" + content)
        while b"\r\n\r\n" not in heard:
            heard += await _receive(connection, len(heard))
        status, length = _STATUS.match(heard), _BODY_LENGTH.search(heard)
        if status is None:
            raise ValueError("what it says is not HTTP")
        answer = heard.partition(b"\r\n\r\n")[2]
        while length and len(answer) < int(length[1]):
            answer += await _receive(connection, len(answer))
        return int(status[1]), answer
    finally:
        connection.close()


async def _receive(connection: socket.socket, heard: int) -> bytes:
    more = await asyncio.get_running_loop().sock_recv(connection, _LONGEST)
    if not more or heard > _LONGEST:
        raise ValueError("the connection was closed" if not more else "it says too much")
    return more


async def _connect(api: Path) -> socket.socket:
    """The caller's deadline ends it."""
    while True:
        try:
            return await UnixDialer(api)()
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.sleep(_PAUSE)


def _read_fault(answer: bytes) -> str:
    """For people."""
    try:
        return str(json.loads(answer)["fault_message"])[:500]
    except (ValueError, LookupError, TypeError):
        return answer.decode(errors="replace")[:500]


class VsockDialer:
    """A port of the guest, through the socket on which the VMM listens for the host's connections."""

    def __init__(self, path: Path, port: int) -> None:
        self._dial = UnixDialer(path)
        self._port = port

    async def __call__(self) -> socket.socket:
        connection = await self._dial()
        try:
            async with asyncio.timeout(_DEADLINE):
                await self._open(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _open(self, connection: socket.socket) -> None:
        loop, heard = asyncio.get_running_loop(), b""
        await loop.sock_sendall(connection, b"CONNECT %d\n" % self._port)
        while not heard.endswith(b"\n"):  # a byte at a time: what follows is the guest's
            more = await loop.sock_recv(connection, 1)
            if not more or len(heard) > 32:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there in the guest yet")
            heard += more
        if not re.fullmatch(rb"OK [0-9]+\n", heard):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the VMM did not connect")

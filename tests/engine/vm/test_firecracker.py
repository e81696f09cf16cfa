"""What k8e says to Firecracker, against the published description of its API; its tap, its kernel and its connections,
against the machine's kernel. Firecracker itself needs KVM, and is not run here."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import lzma
import os
import socket
import struct
import subprocess
import tempfile
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest

from k8e.engine import EngineError, Limits, Runtime, SandboxSpec
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.wires import open_bridged_tap, remove_wire
from k8e.engine.local.system.calls import CLONE_NEWNET, unshare
from k8e.engine.local.vm.bases import Base
from k8e.engine.local.vm.bundle import VmSpec, build_vmm
from k8e.engine.local.vm.firecracker import VsockDialer, boot, firecracker_command, list_requests
from k8e.engine.local.vm.kernel import UnknownKernel, extract_elf, unpack_lz4
from k8e.engine.tasks import in_own_thread
from tests.engine.vm.firecracker_api import Api, find_fault, refuse
from tests.sandboxes import needs_root


def make_spec(wire: Wire, **changes: Any) -> VmSpec:
    limits = Limits(cpus=1.5, memory=300 << 20)
    return VmSpec(
        sandbox=SandboxSpec(Runtime.FIRECRACKER, limits=limits),
        root=Path("/vmm"),
        kernel=Path("/guest/vmlinux"),
        initramfs=Path("/guest/initramfs"),
        base=Base(Path("/guest/base"), ("/usr",)),
        disk=Path("/box/disk.img"),
        disk_size=128 << 20,
        link=Path("/box/link"),
        wire=wire,
        instance=bytes(16),
        cgroup="k8e/one",
        first_id=0x30000000,
        seccomp={},
        hidden=(),
        vmm="/usr/bin/firecracker",
        accelerator="kvm",
        link_kind="vsock",
        nodes={"kvm": "/box/kvm", "net/tun": "/box/net-tun"},
        namespace="/proc/1/fd/9",
        **changes,
    )


@pytest.fixture
def wire() -> Wire:
    return Wire(4711, IPv4Address("198.18.0.2"), IPv6Address("fd6b:38:6500::2"))


@pytest.fixture
def paths(tmp_path: Path) -> SandboxPaths:
    paths = SandboxPaths(tmp_path)
    paths.link.mkdir(parents=True)
    return paths


async def test_every_request_is_as_described_and_the_last_one_starts_it(wire: Wire, paths: SandboxPaths) -> None:
    api, requests = Api(), list_requests(make_spec(wire))
    async with await api.serve(paths.link / "api.sock"):
        await boot(paths, requests)
    assert api.heard == requests
    assert api.started
    told = dict(requests)
    assert told["/machine-config"] == {"vcpu_count": 2, "mem_size_mib": 300}
    assert [path for path, _ in requests if path.startswith("/drives")] == ["/drives/base", "/drives/disk"], "vda, vdb"
    assert (told["/drives/base"]["is_read_only"], told["/drives/disk"]["is_read_only"]) == (True, False)
    words = told["/boot-source"]["boot_args"].split()
    assert {"k8e.link=vsock", "k8e.binds=/usr", f"k8e.mac={wire.host_mac}"} <= set(words)
    assert told["/network-interfaces/wire"]["guest_mac"] == wire.inner_mac


async def test_it_is_waited_for_until_it_listens(wire: Wire, paths: SandboxPaths) -> None:
    api = Api()
    booting = asyncio.create_task(boot(paths, list_requests(make_spec(wire))))
    await asyncio.sleep(0)
    async with await api.serve(paths.link / "api.sock"):
        await booting
    assert api.started


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refuse("the tap is not there"), "/network-interfaces/wire: 400 the tap is not there"),
        (b"HTTP/1.1 500 \r\nContent-Length: 3\r\n\r\n\xff??", "500"),
        (b"HTTP/1.1 204 \r\n" + b"x" * 40_000, "too much"),
        (b"nonsense\r\n\r\n", "not HTTP"),
    ],
    ids=["refused", "failed", "endless", "nonsense"],
)
async def test_what_it_refuses_is_an_error_that_says_so(
    wire: Wire, paths: SandboxPaths, answer: bytes, said: str
) -> None:
    api = Api(answers={"/network-interfaces/wire": answer})
    async with await api.serve(paths.link / "api.sock"):
        with pytest.raises(EngineError, match=said):
            await boot(paths, list_requests(make_spec(wire)))
    assert not api.started, "nothing is started after it"


async def test_a_socket_that_is_a_link_is_not_followed(wire: Wire, paths: SandboxPaths, tmp_path: Path) -> None:
    api = Api()
    (paths.link / "api.sock").symlink_to(tmp_path / "other.sock")
    async with await api.serve(tmp_path / "other.sock"):
        with pytest.raises(EngineError, match="not a socket"):
            await boot(paths, list_requests(make_spec(wire)))
    assert api.heard == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/machine-config", {"vcpu_count": 33, "mem_size_mib": 1}),
        ("/machine-config", {"vcpu_count": 1}),
        ("/drives/base", {"drive_id": "disk", "is_root_device": False}),
        ("/drives/base", {"drive_id": "base", "is_root_device": 0}),
        ("/vsock", {"guest_cid": 2, "uds_path": "x"}),
        ("/actions", {"action_type": "Start"}),
        ("/other", {}),
    ],
)
def test_the_server_of_these_tests_can_refuse(path: str, body: Any) -> None:
    assert find_fault(path, body)


def test_too_many_processors_are_refused(wire: Wire) -> None:
    spec = make_spec(wire)
    many = replace(spec, sandbox=replace(spec.sandbox, limits=replace(spec.sandbox.limits, cpus=33)))
    with pytest.raises(EngineError, match="at most 32"):
        list_requests(many)


def test_its_container_has_its_two_devices_and_its_wire_and_no_more(wire: Wire) -> None:
    spec = make_spec(wire)
    config = build_vmm(spec, firecracker_command(spec))
    allowed = [each for each in config["linux"]["resources"]["devices"] if each["allow"]]
    assert [(each["major"], each["minor"]) for each in allowed] == [(10, 232), (10, 200)]
    assert {"type": "network", "path": "/proc/1/fd/9"} in config["linux"]["namespaces"]
    assert "/usr/bin/firecracker" in config["process"]["args"]
    assert not any(config["process"]["capabilities"].values())


# Its connections -----------------------------------------------------------------------------------------------------


async def test_a_connection_to_the_guest_begins_with_its_port(tmp_path: Path) -> None:
    asked = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        if asked == [b"CONNECT 2\n"]:
            writer.write(b"OK 1073741824\nfirst word of the guest")
        writer.close()

    async with await asyncio.start_unix_server(talk, tmp_path / "vsock.sock"):
        dial, loop = VsockDialer(tmp_path / "vsock.sock", 2), asyncio.get_running_loop()
        with await dial() as connection:
            assert await loop.sock_recv(connection, 100) == b"first word of the guest"
        with pytest.raises(ConnectionRefusedError):
            await dial()  # nothing listens there: the VMM closes it


# Its tap -------------------------------------------------------------------------------------------------------------


# As Firecracker does it: as its own user it opens the tap by its name. It sends one packet back to where it is from.
OPEN_TAP = """
import fcntl, os, struct, sys
tap = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(tap, 0x400454CA, struct.pack("16sH22x", b"tap0", 0x0002 | 0x1000 | 0x4000))
print("open", flush=True)
while True:
    frame = os.read(tap, 65536)[10:]
    if frame[12:14] == bytes([8, 0]) and frame[23] == 17:
        break
print(frame[:6].hex(":"), flush=True)
back = frame[6:12] + frame[:6] + frame[12:26] + frame[30:34] + frame[26:30] + frame[36:38] + frame[34:36]
os.write(tap, bytes(10) + back + frame[38:])
"""
OWNER = 61_234


@needs_root
def test_a_tap_that_only_its_vmm_can_open_leads_to_the_machines_end(wire: Wire) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        node = os.path.join(folder, "tun")
        os.mknod(node, 0o020666, os.makedev(10, 200))
        os.chmod(node, 0o666)
        in_own_thread(lambda: _try_tap(wire, node))


def _try_tap(wire: Wire, node: str) -> None:
    unshare(CLONE_NEWNET)  # a machine of its own
    namespace = open_bridged_tap(wire, "one", OWNER)
    words = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", "setpriv", "--clear-groups"]

    def open_tap(user: int) -> subprocess.Popen[str]:
        ids = [f"--reuid={user}", f"--regid={user}"]
        program = [*words, *ids, "/usr/bin/python3", "-c", OPEN_TAP, node]
        return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    try:
        with open_tap(OWNER + 1) as other:
            assert "Operation not permitted" in other.communicate()[1]
        with open_tap(OWNER) as vmm, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talker:
            assert vmm.stdout is not None
            assert vmm.stdout.readline() == "open\n"
            talker.settimeout(0.2)
            for _ in range(200):  # the bridge notices in its own time that the tap is open
                talker.sendto(b"hello", (str(wire.inner4), 4000))
                with contextlib.suppress(TimeoutError):
                    assert talker.recvfrom(100) == (b"hello", (str(wire.inner4), 4000))
                    break
            vmm.kill()
            assert vmm.communicate()[0] == f"{wire.inner_mac}\n", "the guest's own hardware address"
    finally:
        os.close(namespace)
        remove_wire(wire)


# Its kernel ----------------------------------------------------------------------------------------------------------


def pack(payload: bytes, length: int) -> bytes:
    """A file as boot loaders want it, with one sector of set-up code."""
    head = bytearray(1024)
    head[0x1F1] = 1
    head[0x202:0x208] = b"HdrS" + (0x20F).to_bytes(2, "little")
    content = payload + length.to_bytes(4, "little")
    head[0x248:0x250] = struct.pack("<II", 16, len(content))
    return bytes(head) + bytes(16) + content


KERNEL = b"\x7fELF" + bytes(range(256)) * 40 + b"end"
# One byte, a copy that overlaps what it makes, and bytes at the end.
LZ4_BLOCK = b"\x1fa" + b"\x01\x00" + b"\x05" + b"\x30end"


@pytest.mark.parametrize("packer", [gzip.compress, lzma.compress])
def test_the_kernel_is_unpacked(packer: Any) -> None:
    assert extract_elf(pack(packer(KERNEL), len(KERNEL))) == KERNEL


def test_lz4_is_unpacked() -> None:
    packed = b"\x02\x21\x4c\x18" + len(LZ4_BLOCK).to_bytes(4, "little") + LZ4_BLOCK
    assert unpack_lz4(packed) == b"a" * 25 + b"end"


@pytest.mark.parametrize(
    "image",
    [
        b"",
        bytes(4096),
        pack(gzip.compress(KERNEL), len(KERNEL) + 1),
        pack(gzip.compress(KERNEL)[:-20], len(KERNEL)),
        pack(gzip.compress(b"no kernel"), 9),
        pack(b"unknown", 7),
        pack(b"\x02\x21\x4c\x18\xff\xff\xff\xff", 7),
        pack(b"\x02\x21\x4c\x18\x03\x00\x00\x00\x00\x09\x00", 7),
    ],
)
def test_what_is_no_kernel_is_refused(image: bytes) -> None:
    with pytest.raises(UnknownKernel):
        extract_elf(image)


def test_the_guests_kernel_is_there_in_both_forms(guest: Path) -> None:
    with (guest / "vmlinux").open("rb") as file:
        assert file.read(5) == b"\x7fELF\x02"

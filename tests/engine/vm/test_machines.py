"""Sandboxes that are virtual machines, emulated: what every sandbox is, is so there too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import EngineError, Mount, MountRefused, SandboxSpec, Shape, SharingRefused
from k8e.engine.local.record import Record
from k8e.engine.local.runtime.bundle import PARKED_TASKS
from k8e.engine.local.vm.bundle import CONTROL_PORT, PORTS
from k8e.engine.local.vm.machines import _GREETING
from k8e.engine.local.vm.silence import Hung, judge_silence
from k8e.link import AgentLink
from k8e.link.dial import PORT_TOKEN, UnixDialer
from k8e.link.model import Cause
from k8e.policy import HostList
from tests.engine.rig import ROOT, Rig, Room, eventually, read_host
from tests.engine.vm.conftest import VM_LIMITS, on_its_day


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


async def test_it_says_that_it_is_emulated_and_what_it_boots(rig: Rig) -> None:
    assert rig.report.emulated
    assert any("emulated" in note and "linux-image" in note for note in rig.report.notes)


async def test_a_command_has_its_own_kernel_its_user_and_its_network(rig: Rig, room: Room) -> None:
    script = "id -u; pwd; uname -n; cat /proc/sys/kernel/osrelease; cat /proc/1/comm; grep -c processor /proc/cpuinfo"
    user, folder, host, kernel, first, processors = (await room.output("bash", "-c", script)).split()
    assert (user, folder, host, first, processors) == ("1000", "/workspace", "sandbox", "k8e-agent", "1")
    assert kernel != os.uname().release
    assert kernel in rig.report.notes[0], "the guest's, and not the machine's"
    done = await room.run("bash", "-c", "echo out; echo err >&2; exit 7", identity=ROOT)
    assert (done.outcome.exit_code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    capabilities = await room.output("bash", "-c", "grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status", identity=ROOT)
    assert capabilities.split() == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


async def test_files_go_in_and_out(room: Room) -> None:
    content = os.urandom(300_000)
    await room.link.write_file(b"/workspace/deep", content)
    assert await room.link.read_file(b"/workspace/deep") == content
    assert await room.output("stat", "-c", "%s", "/workspace/deep") == "300000\n"


async def test_what_is_not_on_the_list_is_refused_and_told(rig: Rig, room: Room) -> None:
    reach = "exec 3<>/dev/tcp/203.0.113.9/80"
    assert (await room.run("bash", "-c", reach)).outcome.exit_code == 1
    refused = (await rig.engine.observe(room.name)).refusals
    assert {(each.address, each.port) for each in refused} == {("203.0.113.9", 80)}
    await rig.engine.set_egress(room.name, HostList.parse(["203.0.113.9:80"]))
    # There is no such host: now the machine's kernel says so, and no rule.
    await room.run("timeout", "2", "bash", "-c", reach)
    assert (await rig.engine.observe(room.name)).refusals == ()
    await rig.engine.set_egress(room.name, HostList.parse([]))


FORK = """
import os, signal
children = []
try:
    while len(children) < 1000:
        child = os.fork()
        if not child:
            signal.pause()
        children.append(child)
except BlockingIOError:
    print(len(children))
for child in children:
    os.kill(child, signal.SIGKILL)
"""


async def test_limits_are_the_guests_own(rig: Rig, room: Room) -> None:
    (pid,) = rig.host_processes(room.name)
    words = read_host(f"/proc/{pid}/cmdline").split("\0")
    machine, memory = (words[words.index(option) + 1] for option in ("-machine", "-m"))
    assert (machine.split(",")[0], memory) == ("microvm", f"{VM_LIMITS.memory >> 20}M")
    total = int(await room.output("sed", "-n", "s/^MemTotal: *\\([0-9]*\\) kB/\\1/p", "/proc/meminfo")) << 10
    assert VM_LIMITS.memory // 2 < total < VM_LIMITS.memory
    most = int((await room.python(FORK)).stdout)
    assert VM_LIMITS.pids - 16 <= most <= VM_LIMITS.pids + PARKED_TASKS
    code = "import os; os.posix_fallocate(os.open('/workspace/full', os.O_CREAT | os.O_WRONLY), 0, %d)"
    assert b"No space left" in (await room.python(code % (200 << 20))).stderr
    files = "import os\nwhile True: os.dup(0)"
    assert b"Too many open files" in (await room.python(files)).stderr
    assert await room.output("bash", "-c", "rm -f /workspace/full; echo fine") == "fine\n"


async def test_out_of_memory_is_counted(rig: Rig, room: Room) -> None:
    before = (await rig.engine.observe(room.name)).oom_kills
    done = await room.python("blocks = []\nwhile True: blocks.append(b'x' * (1 << 22))")
    assert done.outcome.signal == signal.SIGKILL
    assert done.outcome.cause is Cause.ITSELF
    after = await rig.engine.observe(room.name)
    assert (after.alive, after.oom_kills) == (True, before + 1)


async def test_the_vmm_has_what_a_native_sandbox_has(rig: Rig, room: Room) -> None:
    """Whoever takes QEMU over from inside is there: no power, no user, no network, no file but the guest's disks."""
    pids = rig.host_processes(room.name)
    (pid,) = pids
    status = status_of(pid)
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert int(status["Seccomp_filters"]) >= 2, "ours, and QEMU's own"
    ids = {int(word) for name in ("Uid", "Gid") for word in status[name].split()}
    assert min(ids) >= 0x30000000
    for kind in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
    interfaces = read_host(f"/proc/{pid}/net/dev").splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    opened = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            opened.add(os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":")[0])
    files = {path for path in opened if path.startswith("/")}
    assert files <= {"/k8e/base", "/k8e/disk", "/dev/null", "/dev/net/tun", "/run/k8e/log", "/run/k8e/console"}, files
    writable = set()
    for line in read_host(f"/proc/{pid}/mountinfo").splitlines():
        words = line.split()
        if "rw" in words[5].split(",") and not words[4].startswith(("/proc", "/dev")):
            writable.add(words[4])
    assert writable == {"/k8e/disk", "/run/k8e"}


async def test_a_new_connection_takes_over_and_meets_no_older_bytes(rig: Rig, room: Room) -> None:
    """As another daemon's does, while the first one's is still open."""
    record = Record.load(room.paths.record)
    yes = await room.link.start(room.spec("yes"))  # which goes on writing into what is closed
    for _ in range(10):
        dialer, deadline = rig.engine._machines.dialer_of(room.name, record)
        async with await AgentLink.open(dialer, instance=bytes.fromhex(record.instance), deadline=deadline) as link:
            assert (await link.run(room.spec("echo", "heard"))).stdout == b"heard\n"
    room = await rig.enter(room.name)
    await room.link.run(room.spec("kill", str(yes.pid)))
    assert await room.output("echo", "again") == "again\n"


@on_its_day(2)
async def test_no_greeting_is_lost(rig: Rig) -> None:
    """Its bytes may be in the guest before the guest's kernel has noticed the connection. The VMM is stopped meanwhile,
    so that both reach it at once; what is lost would never be answered."""
    loop = asyncio.get_running_loop()
    async with rig.room(VM_LIMITS) as room:
        await room.link.close()
        (pid,) = rig.host_processes(room.name)
        for number in range(60):
            greeting = _GREETING + os.urandom(PORT_TOKEN)
            os.kill(pid, signal.SIGSTOP)
            with contextlib.ExitStack() as stack:
                with contextlib.ExitStack() as going_on:
                    going_on.callback(os.kill, pid, signal.SIGCONT)
                    connection = await UnixDialer(room.paths.link / f"{CONTROL_PORT + 1 + number % (PORTS - 1)}.sock")()
                    stack.callback(connection.close)
                    await loop.sock_sendall(connection, greeting)
                heard = b""
                async with asyncio.timeout(60):
                    while not heard.endswith(greeting):
                        heard += await loop.sock_recv(connection, 4096)


async def test_stopped_it_keeps_its_files_and_the_machine_never_mounts_them(rig: Rig) -> None:
    name = rig.new_name()
    spec = rig.spec(VM_LIMITS)
    await rig.engine.create(name, spec)
    room = await rig.enter(name)
    # Links where its first process puts mounts and files at the next start.
    script = "echo kept > /workspace/file; rm -f /etc/resolv.conf; ln -s /proc/sys/kernel/core_pattern /etc/resolv.conf"
    await room.output("bash", "-c", script, identity=ROOT, keep_capabilities=True)
    await rig.engine.stop(name)
    assert not (await rig.engine.observe(name)).alive
    assert sorted(path.name for path in room.paths.top.iterdir()) == ["disk.img", "sandbox.json"]
    await rig.engine.start(name, spec)
    room = await rig.enter(name)
    assert await room.output("cat", "/workspace/file") == "kept\n"
    assert (await room.output("cat", "/etc/resolv.conf")).startswith("nameserver ")
    # The VMM's death is the sandbox's, at once; what was written before it is there after it.
    await room.output("bash", "-c", "echo more > /workspace/more; sync")
    for pid in rig.host_processes(name):
        os.kill(pid, signal.SIGKILL)

    async def is_dead() -> bool:
        return not (await rig.engine.observe(name)).alive

    await eventually(is_dead, "the kernel tells")
    with pytest.raises(EngineError):
        await rig.engine.attach(name)
    await rig.engine.start(name, spec)
    room = await rig.enter(name)
    assert await room.output("cat", "/workspace/more") == "more\n"
    await rig.engine.destroy(name)
    assert name not in await rig.engine.list()


def stop_vmm(pid: int) -> bool:
    """For good. False: it is a process of the runtime that starts it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if read_host(f"/proc/{pid}/comm").startswith("qemu"):
            os.kill(pid, signal.SIGSTOP)
            return True
    return False


@on_its_day(1)
async def test_one_that_hangs_while_it_boots_is_booted_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within create: no command has run. Its VMM is stopped for good as soon as it is there."""
    machines = rig.engine._machines
    dialer_of, deadlines = machines.dialer_of, iter([10.0])
    monkeypatch.setattr(
        machines, "dialer_of", lambda *words: (dialer_of(*words)[0], next(deadlines, dialer_of(*words)[1]))
    )
    name, stopped = rig.new_name(), list[int]()
    making = asyncio.create_task(rig.engine.create(name, rig.spec(VM_LIMITS)))

    async def is_stopped() -> bool:
        stopped.extend(pid for pid in rig.host_processes(name) if stop_vmm(pid))
        return bool(stopped)

    await eventually(is_stopped, "the VMM starts", deadline=120.0)
    await making
    room = await rig.enter(name)
    assert not set(stopped) & rig.host_processes(name)
    assert await room.output("echo", "booted") == "booted\n"
    await rig.engine.destroy(name)


def test_a_silence_is_judged_by_the_time_that_the_vmm_had() -> None:
    hung = judge_silence([os.getpid()], 1e6, "said last")
    assert isinstance(hung, Hung)
    assert "no answer from the virtual machine in 1000000 s (said last); it had" in hung.cause
    starved = judge_silence([os.getpid()], 0.0, "")
    assert not isinstance(starved, Hung)
    assert "the machine is too busy" in starved.cause
    assert starved.hint


@pytest.mark.parametrize(
    "shape",
    [Shape(mounts=(Mount("/srv", "/workspace", 1000),)), Shape(slots=("/workspace",))],
    ids=["mounts", "slots"],
)
async def test_directories_of_the_machine_are_refused_with_the_reason(rig: Rig, shape: Shape) -> None:
    name = rig.new_name()
    with pytest.raises(MountRefused, match="cannot have directories of the machine") as raised:
        await rig.engine.create(name, replace(rig.spec(VM_LIMITS), shape=shape))
    assert raised.value.hint
    assert name not in await rig.engine.list()


async def test_a_shared_workspace_is_refused_with_the_reason(rig: Rig, room: Room) -> None:
    name = rig.new_name()
    with pytest.raises(SharingRefused, match="cannot share") as raised:
        await rig.engine.create(name, SandboxSpec(rig.runtime, limits=VM_LIMITS, shares=room.name))
    assert raised.value.hint


# Each is tried by its name, as the default user and as the strongest that a process inside can become.
SURFACE = """
import ctypes, errno, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *words):
    if libc.syscall(number, *words) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def write(path, text):
    with open(path, "w") as file:
        file.write(text)

def connect(family, *address):
    socket.socket(family, socket.SOCK_STREAM).connect(*address)

ATTEMPTS = {
    "a user namespace": lambda: call(272, 0x10000000),
    "a mount": lambda: call(165, b"tmpfs", b"/tmp", b"tmpfs", 0, None),
    "the new mount interface": lambda: call(430, b"tmpfs", 0),
    "a module": lambda: call(175, b"", 0, b""),
    "another kernel": lambda: call(246, 0, 0, None, 0),
    "bpf": lambda: call(321, 0, ctypes.create_string_buffer(bytes([2, 0, 0, 0] + [4, 0, 0, 0] * 3), 120), 120),
    "the kernel's log": lambda: call(103, 3, ctypes.create_string_buffer(4096), 4096),
    "packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "raw packets": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "the host by vsock": lambda: connect(socket.AF_VSOCK, (2, 1)),
    "itself by vsock": lambda: connect(socket.AF_VSOCK, (1, 2)),
    "the agent's socket": lambda: connect(socket.AF_UNIX, "/link.sock"),
    "a device": lambda: os.mknod("/tmp/device", 0o060600, os.makedev(254, 0)),
    "a setting": lambda: write("/proc/sys/kernel/core_pattern", "|/bin/sh"),
    "another setting": lambda: write("/proc/sys/kernel/modules_disabled", "0"),
    "memory of the agent": lambda: open("/proc/1/mem", "rb"),
    "the machine's disks": lambda: open("/dev/vdb", "rb"),
    "the console": lambda: open("/dev/vport0p1", "rb"),
    "the machine": lambda: call(169, 0xFEE1DEAD, 672274793, 0x1234567),
}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
    except OSError:
        continue
    print(name)
"""


async def test_nothing_is_to_be_had_of_the_guests_kernel(rig: Rig, room: Room) -> None:
    room = await rig.enter(room.name)  # a test above has taken the first way in
    assert (await room.python(SURFACE)).stdout == b""
    strongest = await room.as_agent("/usr/bin/python3", "-S", "-E", "-c", SURFACE)
    # The agent may read what it may write to itself; it is the sandbox's own.
    assert set(strongest.stdout.decode().splitlines()) <= {"memory of the agent"}, strongest

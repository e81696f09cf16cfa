"""Everything that kernels offer and sandboxes must not: tried as the default user, as root of the sandbox, and with all
that the agent itself has. `kernel_probe` tries; here is what must have come of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from k8e.link.errors import LinkError
from k8e.link.model import AGENT, ExecOptions, TerminalSize
from tests.engine.kernel_probe import ATTEMPTS, NAMESPACES
from tests.engine.rig import ROOT, Rig, Room, read_host

PROBE = Path(__file__).with_name("kernel_probe")
WHO: Mapping[str, ExecOptions] = {
    "user": {},
    "root": {"identity": ROOT},
    "agent": {"identity": AGENT, "keep_capabilities": True},
}

DENIED = frozenset({"EPERM", "EACCES", "ENOSYS"})
# By the beginning of an attempt's name: what else means no. A call that does not exist in one kernel is denied in the
# words of its neighbours there.
ALSO: Mapping[str, frozenset[str]] = {
    "AF_": frozenset({"EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT"}),
    "NETLINK_": frozenset({"EAFNOSUPPORT", "EPROTONOSUPPORT"}),
    "TIOC": frozenset({"ENOTTY", "EIO"}),
    "bring-loopback-down": frozenset({"ENOTTY"}),
    "clear-no-new-privileges": frozenset({"EINVAL"}),
    "clone": frozenset({"EINVAL"}),
    "file-capability": frozenset({"ENOTSUP"}),
    "fsconfig": frozenset({"EINVAL"}),
    "name_to_handle_at": frozenset({"ENOTSUP"}),
    "open_by_handle_at": frozenset({"ENOTSUP"}),
    "perf_event_open": frozenset({"ENODEV"}),
    "personality": frozenset({"EINVAL"}),
    "read-/proc": frozenset({"ENOENT"}),
    "real-time-scheduling": frozenset({"EINVAL"}),
    "release_agent": frozenset({"ENOENT"}),
    "setns": frozenset({"EINVAL", "ENOENT"}),
    "trusted-attribute": frozenset({"ENOTSUP"}),
    "write-": frozenset({"ENOENT", "EROFS", "EINVAL"}),
    "/dev/": frozenset({"ENOENT", "ENXIO", "ENODEV"}),
    "/proc/sys/": frozenset({"ENOENT", "EROFS"}),
}
# gVisor's kernel is the sandbox's own, and these, for those who may, reach nothing else: `test_..._of_the_host` below
# do each of them for good and look at the host. Everything else is denied there as it is natively.
EVERYBODY, ROOTS, AGENTS = frozenset(WHO), frozenset({"root", "agent"}), frozenset({"agent"})
OWN_KERNEL: Mapping[str, frozenset[str]] = {
    "write-/proc/self/oom_score_adj": EVERYBODY,
    "write-/proc/1/oom_score_adj": ROOTS,
    "write-/proc/sysrq-trigger": ROOTS,
    "anything-writable-in-/proc/sys": ROOTS,
    "anything-writable-in-/sys": AGENTS,
    "/proc/sys/kernel/randomize_va_space": ROOTS,
    "/proc/sys/kernel/yama/ptrace_scope": ROOTS,
    "/proc/sys/kernel/hostname": AGENTS,
    "/proc/sys/kernel/domainname": AGENTS,
    "/proc/sys/kernel/shmmax": AGENTS,
    "/proc/sys/vm/overcommit_memory": AGENTS,
    "/proc/sys/vm/mmap_min_addr": AGENTS,
    "/proc/sys/net/ipv4/ip_forward": AGENTS,
}
# What the agent is there for: it acts for every user inside.
AGENT_MAY = frozenset({"become-somebody-else", "join-groups"})
# Dying of the attempt is an answer as well where the filter cannot say no (SIGSYS).
MAY_DIE = frozenset({"int80-unshare", "x32-unshare"})
SIGSYS = 31

Results = Mapping[str, Mapping[str, Any]]


async def run_probe(room: Room, who: str, *names: str, terminal: TerminalSize | None = None) -> Results:
    await room.link.mkdir(f"/workspace/{PROBE.name}".encode())
    for file in PROBE.glob("*.py"):
        await room.link.write_file(f"/workspace/{PROBE.name}/{file.name}".encode(), file.read_bytes(), mode=0o644)
    options: ExecOptions = {**WHO[who], "terminal": terminal}
    done = await room.run("/usr/bin/python3", "-S", "-E", "-B", "-m", PROBE.name, *names, **options)
    assert done.outcome.exit_code == 0, done
    results: Results = json.loads(done.stdout)
    return results


@pytest.fixture(scope="module", params=WHO)
async def tried(request: pytest.FixtureRequest, rig: Rig) -> AsyncIterator[tuple[str, Results]]:
    """All attempts, made once in a sandbox of their own that must still be well afterwards."""
    async with rig.room() as room:
        results = await run_probe(room, request.param)
        yield request.param, results
        assert await room.output("echo", "well") == "well\n"


def allowed_errnos(name: str) -> frozenset[str]:
    return DENIED.union(*(errnos for prefix, errnos in ALSO.items() if name.startswith(prefix)))


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_denied(rig: Rig, tried: tuple[str, Results], name: str) -> None:
    who, results = tried
    result = results[name]
    if who == "agent" and name in AGENT_MAY:
        assert "done" in result
        return
    if not rig.native and who in OWN_KERNEL.get(name, ()) and "done" in result:
        opened = result["done"] if isinstance(result["done"], list) else [name.removeprefix("write-")]
        assert all(path.startswith(("/proc/", "/sys/devices/system/cpu/")) for path in opened), opened
        return
    if name in MAY_DIE and result.get("signal") == SIGSYS:
        return
    assert result.get("errno") in allowed_errnos(name), result


@pytest.mark.parametrize("who", WHO)
async def test_nothing_can_be_typed_into_the_terminal_of_the_agent(room: Room, who: str) -> None:
    names = [name for name in ATTEMPTS if name.startswith("TIOC")]
    results = await run_probe(room, who, *names, terminal=TerminalSize())
    assert len(results) == len(names)
    for name, result in results.items():
        assert result.get("errno") in allowed_errnos(name), (name, result)


WRITE_ALL = """
import os, sys
names = [os.path.join(parent, name) for top in sys.argv[1:] for parent, _, names in os.walk(top) for name in names]
written = 0
for name in names:
    for value in ("0", "1", "evil", "1024 2048", "|/tmp/evil"):
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            break
        try:
            written += os.write(descriptor, value.encode()) > 0
        except OSError:
            pass
        os.close(descriptor)
print(written)
"""
SETTINGS = ("/proc/sys/kernel", "/proc/sys/net", "/proc/sys/vm", "/proc/sys/fs", "/sys/devices/system/cpu")
PER_INTERFACE = tuple(f"/proc/sys/net/{family}/{kind}" for family in ("ipv4", "ipv6") for kind in ("conf", "neigh"))
INSIDE_VALUES = {"0", "1", "evil", "1024\t2048", "|/tmp/evil"}


def read_settings() -> dict[str, str]:
    """Those that say the same twice: some are counters."""
    found: dict[str, str] = {}
    for parent, name in ((parent, name) for top in SETTINGS for parent, _, names in os.walk(top) for name in names):
        path = Path(parent, name)
        # Those of interfaces come and go with other sandboxes.
        if not parent.startswith(PER_INTERFACE):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if (content := path.read_text()) == path.read_text():
                    found[str(path)] = content
    return found


async def test_writing_settings_inside_changes_none_of_the_host(room: Room) -> None:
    before = await asyncio.to_thread(read_settings)
    assert {f"/proc/sys/{name}" for name in ("kernel/core_pattern", "vm/overcommit_memory")} < set(before)
    for options in WHO.values():
        done = await room.python(WRITE_ALL, *SETTINGS, **options)
        assert done.outcome.exit_code == 0, done
    after = await asyncio.to_thread(read_settings)
    changed = {name: (text, after[name]) for name, text in before.items() if after.get(name, text) != text}
    assert not [name for name, (_, new) in changed.items() if new.strip() in INSIDE_VALUES], changed


@pytest.mark.parametrize("who", WHO)
async def test_a_score_for_the_killer_is_not_one_of_the_host(rig: Rig, room: Room, who: str) -> None:
    def scores() -> set[str]:
        found = set()
        for pid in rig.host_processes(room.name):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the agent starts and ends some by itself
                found.add(read_host(f"/proc/{pid}/oom_score_adj"))
        return found

    before = scores()
    assert before
    code = """
for name in ("1", "self"):
    try:
        open(f"/proc/{name}/oom_score_adj", "w").write("-999")
    except OSError:
        pass
"""
    done = await room.python(code, **WHO[who])
    assert done.outcome.exit_code == 0, done
    assert scores() == before


@pytest.mark.parametrize("who", WHO)
async def test_the_keys_of_the_host_are_not_pressed(room: Room, who: str) -> None:
    """sysrq, with the letter that makes the kernel write its list of letters into its log."""

    def helps() -> int:
        done = subprocess.run(["dmesg"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.count("sysrq: HELP")

    before = await asyncio.to_thread(helps)
    code = """
try:
    open("/proc/sysrq-trigger", "w").write("h")
except OSError:
    pass
"""
    done = await room.python(code, **WHO[who])
    assert done.outcome.exit_code == 0, done
    assert await asyncio.to_thread(helps) == before


SHOW_STATUS = """
import json
import os
with open("/proc/self/status") as file:
    print(json.dumps(dict(line.rstrip("\\n").split(":\\t", 1) for line in file if ":\\t" in line)))
"""


async def read_status(room: Room, **options: Any) -> dict[str, str]:
    done = await room.python(SHOW_STATUS, **options)
    status: dict[str, str] = json.loads(done.stdout)
    return status


@pytest.mark.parametrize("who", ["user", "root"])
async def test_commands_have_no_capability_at_all(room: Room, who: str) -> None:
    status = await read_status(room, **WHO[who])
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd"):
        assert int(status[kind], 16) == 0, kind


async def test_the_agent_has_no_capability_towards_the_kernel(room: Room) -> None:
    status = await read_status(room, **WHO["agent"])
    # Nine are about files, ids and signals; after them (LINUX_IMMUTABLE, NET_ADMIN, SYS_ADMIN...) it is more.
    assert int(status["CapPrm"], 16) < 1 << 9
    assert int(status["CapBnd"], 16) < 1 << 9


@pytest.mark.parametrize("who", WHO)
async def test_native_commands_run_under_the_filter(rig: Rig, room: Room, who: str) -> None:
    if not rig.native:
        pytest.skip("the filter around gVisor is gVisor's own, outside")
    status = await read_status(room, **WHO[who])
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


async def test_gvisors_own_processes_run_under_a_filter(rig: Rig, room: Room) -> None:
    if rig.native:
        pytest.skip("about gVisor")
    filtered = set()
    for pid in rig.host_processes(room.name):
        status = read_host(f"/proc/{pid}/status")
        filtered.add("Seccomp:\t2" in status)
    assert filtered == {True}


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/home/user", "/dev/shm", "/var/tmp"])
async def test_setuid_programs_change_nothing(room: Room, folder: str) -> None:
    program = f"{folder}/as-root"
    script = f"cp /usr/bin/id {program} && chown 0:0 {program} && chmod 6755 {program} && ls -n {program}"
    done = await room.as_agent("bash", "-c", script)
    assert done.outcome.exit_code == 0, done
    assert done.stdout.startswith(b"-rwsr-sr-x"), "the program was to be setuid"
    user = room.place.user
    answers = [(await room.output(program, option)).strip() for option in ("-u", "-g", "-ru", "-rg")]
    assert answers == [str(user.uid), str(user.gid), str(user.uid), str(user.gid)]
    await room.as_agent("rm", program)


async def test_setuid_programs_of_the_toolchain_change_nothing(room: Room) -> None:
    listing = await room.output("find", "/usr/bin", "/usr/sbin", "/usr/local", "-perm", "-4000", "-type", "f")
    if not listing:
        pytest.skip("the machine has no setuid programs")
    code = """
import ctypes, os, sys
# The effective ids of the program, seen while it is stopped at its first instruction.
for path in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).ptrace(0, 0, 0, 0)
        os.execv(path, [path, "--version"])
    os.waitpid(pid, 0)
    with open(f"/proc/{pid}/status") as file:
        print([line.split()[1:] for line in file if line.startswith(("Uid", "Gid"))])
    os.kill(pid, 9)
    os.waitpid(pid, 0)
"""
    done = await room.python(code, *listing.split())
    assert done.outcome.exit_code == 0, done
    ids = [["1000"] * 4, ["1000"] * 4]
    assert done.stdout.decode().splitlines() == [str(ids)] * len(listing.split())


async def test_a_debugger_works(room: Room) -> None:
    """Though in gVisor it is not told of a program's system calls: then it could replace them."""
    steps = ("starti", "stepi", "info registers rip", "continue")
    words = [word for step in steps for word in ("-ex", step)]
    done = await room.run("gdb", "-q", "-nx", "-batch", *words, "--args", "/usr/bin/true")
    assert done.outcome.exit_code == 0, done
    assert b"Program stopped." in done.stdout
    assert b"exited normally" in done.stdout


SIGNAL_AGENT = """
import os
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
"""


@pytest.mark.parametrize("code", [SIGNAL_AGENT, "import os; os.kill(-1, 9)"], ids=["agent", "all"])
@pytest.mark.parametrize("who", WHO)
async def test_signals_to_the_agent_gain_nothing(rig: Rig, who: str, code: str) -> None:
    async with rig.room() as room:
        with contextlib.suppress(LinkError):  # root may kill what watches over its own command
            await rig.unless_dead(room.name, room.python(code, **WHO[who]))
        answer = await rig.unless_dead(room.name, room.run("echo", "still here"))
        if answer is None:
            # gVisor lets root of a sandbox kill its first process: the end of that sandbox, and of nothing else.
            assert not rig.native
            assert who != "user"
        else:
            assert answer.stdout == b"still here\n"


@pytest.mark.parametrize("who", WHO)
async def test_no_descriptor_of_the_agent_is_inherited(room: Room, who: str) -> None:
    code = "import os; print(sorted(int(name) for name in os.listdir('/proc/self/fd')))"
    done = await room.python(code, **WHO[who])
    assert done.stdout == b"[0, 1, 2, 3]\n", done  # 3 is the listing itself


async def test_the_default_user_cannot_reach_the_agents_socket(room: Room) -> None:
    code = "import socket; socket.socket(socket.AF_UNIX).connect('/run/k8e/agent.sock')"
    done = await room.python(code)
    assert b"PermissionError" in done.stderr, done


def test_the_probe_knows_every_namespace() -> None:
    kinds = {name.removesuffix("_for_children") for name in (path.name for path in Path("/proc/self/ns").iterdir())}
    assert kinds <= set(NAMESPACES)


async def test_namespaces_are_not_the_hosts(rig: Rig, room: Room) -> None:
    listing = await room.output("bash", "-c", "for n in /proc/self/ns/*; do echo $(basename $n) $(readlink $n); done")
    inside = dict(line.split(" ", 1) for line in listing.splitlines())
    host = {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}
    expected = {"user", "pid", "mnt", "ipc", "uts", "net", "cgroup"}
    if rig.native:
        assert expected <= set(inside)
    same = {name for name in expected & set(inside) if inside[name] == host[name]}
    assert not (same if rig.native else same - {"user"})

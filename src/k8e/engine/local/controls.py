"""What keeps a sandbox a sandbox: each control with a way to find out whether it holds, by trying to get past it.

A check returns what it saw. It raises `Broken` when the control does not hold and `Untested` when it does not apply.
Any other failure counts as broken as well: a control that could not be seen to hold is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from k8e.engine.local.bundle import AGENT_PATH, ID_COUNT, LINK_PATH
from k8e.engine.local.cgroup import hierarchies
from k8e.engine.local.decoys import Finished, Subject
from k8e.engine.local.far_end import BANNER, FarEnd
from k8e.engine.local.host_image import LOADER, TOOLS
from k8e.engine.local.network.addresses import INNER_INTERFACE
from k8e.engine.local.tool import find_tool
from k8e.link.errors import AgentError, LinkError, NotStarted
from k8e.link.model import Cause, ExecSpec, Identity, Process
from k8e.policy import NOTHING, HostList

_ROOT = Identity(0, 0)
_LOWEST_FOREIGN_ID = 65536  # below are the machine's own users
_SEARCH_DEADLINE = 8.0
_BUSY_ROUNDS = 10
_SHARED = {"/usr", TOOLS, AGENT_PATH, LOADER, "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}
_PRIVATE = {
    "/",
    "/proc",
    "/sys",
    "/dev",
    "/dev/pts",
    "/dev/shm",
    "/dev/mqueue",
    "/run",
    "/tmp",
    "/workspace",
    LINK_PATH,
}
_DEVICES = {"full", "null", "random", "tty", "urandom", "zero"}
_IN_DEV = _DEVICES | {"fd", "stdin", "stdout", "stderr", "ptmx", "pts", "shm", "mqueue", "console"}
_EMULATED = {"fuse", "net"}  # by gVisor's kernel, which has no way to the machine's
_CONTROLLERS = "the kernel's controller for it is off: see /proc/cgroups, and cgroup_enable= on its command line"
_PASSING = (
    "let the machine forward: the chains named above need a rule that accepts what comes from and goes to k8e-* "
    "(Docker: in its chain DOCKER-USER; ufw: `ufw route allow`)"
)
_UNEXPECTED = "do not use this runtime; this is a fault of ours or of the runtime: please report it with this output"


class Broken(Exception):
    """The control does not hold; says what was seen."""


class Untested(Exception):
    """The control does not apply; says why."""


@dataclass(frozen=True, slots=True)
class Control:
    name: str
    tried: str  # how
    check: Callable[[Subject], Awaitable[str]]
    hint: str = _UNEXPECTED  # what to do when it is broken


async def find_host_files(subject: Subject) -> str:
    """/usr is meant to be seen; no file was planted there."""
    pruned = ("(", "-path", "/proc", "-o", "-path", "/sys", "-o", "-path", "/usr", ")", "-prune")
    found = await subject.run(
        *("find", "/", *pruned, "-o", "-name", subject.decoys.token, "-print", "-quit"),
        strongest=True,
        seconds=_SEARCH_DEADLINE,
    )
    if found.stdout:
        raise Broken(f"a file of the machine is visible as {found.stdout.strip()}")
    if found.cause is Cause.TIMEOUT:
        raise Broken("the search did not end: there is far more to be seen than a sandbox has")
    if found.exit_code != 0:
        raise Broken(f"the search failed: {found.stderr.strip()[-200:]}")
    return "none of the planted files is there"


async def compare_mounts(subject: Subject) -> str:
    table = (await subject.sandbox.read_file(b"/proc/self/mountinfo")).decode(errors="replace")
    options = {fields[4]: fields[5].split(",") for fields in map(str.split, table.splitlines())}
    inside = {point for point in options if point.startswith("/proc/")} | {f"/dev/{name}" for name in _IN_DEV}
    if unknown := sorted(options.keys() - _PRIVATE - _SHARED - inside):
        raise Broken(f"mounted but not ours: {', '.join(unknown[:5])}")
    if writable := sorted(point for point in options.keys() & _SHARED if "ro" not in options[point]):
        raise Broken(f"writable: {', '.join(writable)}")
    for folder in sorted(options.keys() & {"/usr", TOOLS}):
        path = f"{folder}/{subject.decoys.token}".encode()
        try:
            await subject.sandbox.write_file(path, b"")
        except AgentError:
            continue
        await subject.sandbox.remove(path)
        raise Broken(f"a file could be written to {folder}")
    return f"{len(options)} mounts, all of them ours, the shared ones read-only"


async def find_host_processes(subject: Subject) -> str:
    pids = await subject.processes()
    for pid in pids:
        with contextlib.suppress(AgentError):  # gone already
            words = await subject.sandbox.read_file(f"/proc/{pid}/cmdline".encode())
            if subject.decoys.token.encode() in words:
                raise Broken(f"a process of the machine is visible as {pid}")
    first = await subject.sandbox.read_file(b"/proc/1/cmdline")
    if first.split(b"\0")[0] != AGENT_PATH.encode():
        raise Broken(f"process 1 is {first[:100]!r} instead of the agent")
    return f"process 1 is the agent; {len(pids)} in all"


async def list_interfaces(subject: Subject) -> str:
    table = (await subject.sandbox.read_file(b"/proc/net/dev")).decode(errors="replace")
    names = {line.partition(":")[0].strip() for line in table.splitlines()[2:]}
    if others := sorted(names - {"lo", INNER_INTERFACE}):
        raise Broken(f"there are {', '.join(others)}")
    return "only loopback and a wire of its own"


async def reach_host_loopback(subject: Subject) -> str:
    try:
        connection = await subject.sandbox.connect(port=subject.decoys.port)
    except AgentError as error:
        return f"a listener of the machine is out of reach: {error}"
    await connection.close()
    raise Broken(f"port {subject.decoys.port} of the machine's loopback can be reached")


async def reach_far_end(subject: Subject) -> str:
    """By name, and only while it is listed. Its address is private, so it is on the list as well as the name."""
    far = _far_end(subject)
    await subject.set_egress(HostList.parse([f"{far.name}:{far.port}", f"{far.address}:{far.port}"]))
    try:
        reached = await _greeting(subject, far.name, far.port)
        if reached.stdout.encode() != BANNER:
            chains = await asyncio.to_thread(find_foreign_drops)
            why = f"; others drop what is forwarded: {', '.join(chains)}" if chains else ""
            raise Broken(f"a listed name cannot be reached: {reached.stderr.strip()[-200:]}{why}")
        elsewhere = await _greeting(subject, str(far.address), far.port + 1)
        if "refused" not in elsewhere.stderr:
            raise Broken(f"another port is not refused: {elsewhere.stderr.strip()[-200:]}")
    finally:
        await subject.set_egress(NOTHING)
    after = await _greeting(subject, str(far.address), far.port)
    if after.stdout or "refused" not in after.stderr:
        raise Broken("what is not listed any more can be reached")
    return "a listed name is reached while it is listed, on its port"


async def ask_for_unlisted_name(subject: Subject) -> str:
    far = _far_end(subject)
    asked = await subject.run("getent", "hosts", far.name, seconds=_SEARCH_DEADLINE)
    if asked.exit_code == 0 or asked.cause is Cause.TIMEOUT:
        raise Broken(f"a name that is not listed is {'answered' if asked.exit_code == 0 else 'not refused at once'}")
    if far.name not in {refusal.host for refusal in await subject.refusals()}:
        raise Broken("the refusal is not told")
    return "a name that is not listed is refused at once, and told"


async def reach_metadata(subject: Subject) -> str:
    tried = await _greeting(subject, "169.254.169.254", 80)
    if tried.stdout or "refused" not in tried.stderr:
        raise Broken(f"169.254.169.254 is not refused: {(tried.stdout or tried.stderr).strip()[-200:]}")
    return "refused at once"


async def reach_machine(subject: Subject) -> str:
    far = _far_end(subject)
    tried = await _greeting(subject, str(far.machine), far.machine_port)
    if "refused" not in tried.stderr:
        raise Broken(f"a listener of the machine is not refused: {tried.stderr.strip()[-200:]}")
    return "a listener on an address of the machine is refused"


def _far_end(subject: Subject) -> FarEnd:
    if subject.far is None:
        raise Untested("there is nobody to reach")
    return subject.far


async def _greeting(subject: Subject, host: str, port: int) -> Finished:
    """What somebody says who is called."""
    return await subject.run(
        "bash", "-c", 'exec 3<>"/dev/tcp/$0/$1" && cat <&3', host, str(port), seconds=_SEARCH_DEADLINE
    )


def find_foreign_drops() -> list[str]:
    """Chains of others that drop what is forwarded unless they know better."""
    nft = find_tool("nft")
    if nft is None:
        return []
    listed = subprocess.run([nft, "-j", "list", "chains"], capture_output=True, timeout=_SEARCH_DEADLINE).stdout
    chains = [each["chain"] for each in json.loads(listed or b"{}").get("nftables", ()) if "chain" in each]
    return [
        f"{each['family']} {each['table']} {each['name']}"
        for each in chains
        if each.get("hook") == "forward" and each.get("policy") == "drop"
    ]


async def compare_devices(subject: Subject) -> str:
    names = {entry.name.decode(errors="replace") for entry in await subject.sandbox.list_dir(b"/dev")}
    allowed = _IN_DEV if subject.native else _IN_DEV | _EMULATED
    if others := sorted(names - allowed):
        raise Broken(f"there are {', '.join(others)}")
    made = await subject.run("mknod", "/tmp/device", "b", "7", "0", strongest=True)
    if made.exit_code == 0:
        raise Broken("a device node can be made")
    return f"{len(names & _DEVICES)} harmless devices; none can be made"


async def change_kernel_settings(subject: Subject) -> str:
    """Writes what is there already: if the control is broken, nothing of the machine changes."""
    script = 'value=$(cat "$0") && printf "%s\\n" "$value" > "$0"'
    for setting in ("kernel/core_pattern", "kernel/panic", "vm/swappiness"):
        written = await subject.run("sh", "-c", script, f"/proc/sys/{setting}", strongest=True)
        if written.exit_code == 0:
            raise Broken(f"/proc/sys/{setting} can be written")
    return "cannot be written"


async def read_capabilities(subject: Subject) -> str:
    for user in (subject.place.user, _ROOT):
        status = await subject.status_of_command(user)
        held = {name: value for name, value in status.items() if name.startswith("Cap")}
        if not held:
            raise Broken("/proc/self/status does not tell")
        if some := [f"{name} {value}" for name, value in held.items() if int(value, 16)]:
            raise Broken(f"a command of uid {user.uid} has {', '.join(some)}")
    return "none, for the user and for root of the sandbox"


async def gain_privileges(subject: Subject) -> str:
    """By a program that belongs to root and is set-uid. gVisor's status may not mention the flag; it has to obey it."""
    program = f"/home/user/{subject.decoys.token}"
    await subject.run("cp", "/usr/bin/id", program, strongest=True)
    await subject.run("chmod", "4755", program, strongest=True)
    told = await subject.run(program, "-u")
    await subject.sandbox.remove(program.encode())
    if told.stdout.strip() != str(subject.place.user.uid):
        raise Broken(f"a set-uid program runs as uid {told.stdout.strip() or told.stderr.strip()}")
    flag = (await subject.status_of_command(subject.place.user)).get("NoNewPrivs")
    if flag != "1" and (subject.native or flag is not None):
        raise Broken(f"NoNewPrivs is {flag}")
    return "a set-uid program gains nothing"


async def inspect_filter(subject: Subject) -> str:
    """Of what runs on the machine's kernel: in native sandboxes the commands, with gVisor its own processes."""
    if not subject.native:
        statuses = await asyncio.to_thread(subject.statuses_on_machine)
        if not statuses:
            raise Broken("no process of the sandbox was found")
        if bare := [status for status in statuses if (status["Seccomp"], status["NoNewPrivs"]) != ("2", "1")]:
            raise Broken(f"{len(bare)} of gVisor's {len(statuses)} processes have no filter")
        return f"all {len(statuses)} processes of gVisor have a filter"
    for user in (subject.place.user, _ROOT):
        mode = (await subject.status_of_command(user)).get("Seccomp")
        if mode != "2":
            raise Broken(f"Seccomp is {mode} for uid {user.uid}")
    if (await subject.run("unshare", "--user", "true", user=_ROOT)).exit_code == 0:
        raise Broken("a user namespace can be created")
    return "a filter is in place; user namespaces are refused"


async def read_id_mapping(subject: Subject) -> str:
    if not subject.native:
        raise Untested("gVisor has a kernel of its own; ids in there are not the machine's")
    table = (await subject.sandbox.read_file(b"/proc/self/uid_map")).decode()
    mapping = [tuple(map(int, line.split())) for line in table.splitlines()]
    if len(mapping) != 1 or mapping[0][0] != 0 or mapping[0][1] < _LOWEST_FOREIGN_ID or mapping[0][2] > ID_COUNT:
        raise Broken(f"ids are mapped as {' '.join(table.split())}")
    owners = {status["Uid"].split()[0] for status in await asyncio.to_thread(subject.statuses_on_machine)}
    if any(int(uid) < _LOWEST_FOREIGN_ID for uid in owners):
        raise Broken(f"its processes run as {', '.join(sorted(owners))} on the machine")
    return f"root of the sandbox is {mapping[0][1]} on the machine"


async def exhaust_cpu(subject: Subject) -> str:
    """On a busy machine nobody gets as much as the limit at once: goes on until the limit was felt."""
    wanted = f"{subject.limits.cpus:g} CPUs"
    before = await asyncio.to_thread(_read_cpu_counter, subject, "nr_throttled")
    for _ in range(_BUSY_ROUNDS):
        await asyncio.gather(*(subject.run("sh", "-c", "while :; do :; done", seconds=0.3) for _ in range(4)))
        if await asyncio.to_thread(_read_cpu_counter, subject, "nr_throttled") > before:
            return f"busy loops were held back to {wanted}"
    raise Broken(f"busy loops were not held back to {wanted}")


def _read_cpu_counter(subject: Subject, name: str) -> int:
    for hierarchy in hierarchies():
        with contextlib.suppress(FileNotFoundError):
            file = Path(hierarchy, subject.group, subject.name, "cpu.stat")
            counters = dict(line.split() for line in file.read_text().splitlines())
            if name in counters:
                return int(counters[name])
    raise Broken("no control group limits its CPU time")


async def read_file_limit(subject: Subject) -> str:
    told = await subject.run("sh", "-c", "ulimit -Hn", user=_ROOT)
    if not told.stdout.strip().isdigit() or int(told.stdout) > subject.limits.open_files:
        raise Broken(f"the limit is {told.stdout.strip()} instead of {subject.limits.open_files}")
    return f"at most {told.stdout.strip()}"


async def outlive_timeout(subject: Subject) -> str:
    """By leaving the session and the parent, and not listening to the polite signal."""
    before = await subject.processes()
    script = "trap '' TERM; (setsid sh -c 'trap \"\" TERM; sleep 600; :' &) ; setsid sleep 600 & sleep 600"
    done = await subject.run("sh", "-c", script, seconds=0.3)
    if done.cause is not Cause.TIMEOUT:
        raise Broken(f"the command ended by {done.cause.value} instead of its timeout")
    if left := await subject.processes() - before:
        raise Broken(f"{len(left)} processes outlived their command's timeout")
    return "nothing outlived a command that ran too long"


async def exhaust_disk(subject: Subject) -> str:
    count = subject.limits.disk // (1 << 20) + 16
    script = 'head -c "$0"M /dev/zero > fill; status=$?; stat -c %s fill; rm fill; exit $status'
    done = await subject.run("sh", "-c", script, str(count), seconds=_SEARCH_DEADLINE * 2)
    if done.exit_code == 0 or "No space left on device" not in done.stderr:
        raise Broken(f"{count} MiB were written to a disk of {subject.limits.disk >> 20}: {done.stderr.strip()[-200:]}")
    return f"full after {int(done.stdout) >> 20} of {subject.limits.disk >> 20} MiB"


async def exhaust_processes(subject: Subject) -> str:
    started: list[Process] = []
    try:
        for _ in range(subject.limits.pids + 1):
            started.append(await subject.sandbox.start(ExecSpec.of("/bin/sleep", "600", stdin=False)))
    except NotStarted as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM):
            raise
        return f"no more after {len(started)} commands, each of them with a supervisor"
    finally:
        for process in started:
            process.discard()
            await process.end(grace=0.0)
        for process in started:
            await process.wait()
    raise Broken(f"{len(started)} commands run at once, with a limit of {subject.limits.pids} processes")


async def exhaust_memory(subject: Subject) -> str:
    """The last check: gVisor's sandbox dies as a whole."""
    before = (await subject.health()).oom_kills
    amount = subject.limits.memory * 2
    hog = asyncio.create_task(subject.run("sh", "-c", f"head -c {amount} /dev/zero | tail -n 1 | wc -c"))
    try:
        while True:
            health = await subject.health()
            if health.oom_kills > before:
                whole = "" if health.alive else ", and with it the sandbox"
                return f"a command that took too much was killed{whole}"
            if hog.done():
                if (await subject.health()).oom_kills > before:
                    continue
                raise Broken(
                    f"{amount >> 20} MiB fit into {subject.limits.memory >> 20}: {hog.result().stdout.strip()}"
                )
            if not health.alive:
                raise Broken("the sandbox died, and not for lack of memory")
            # The kernel tells nobody who is not the group's owner; the hog needs a few tenths of a second.
            await asyncio.wait([hog], timeout=0.02)
    finally:
        hog.cancel()
        with contextlib.suppress(asyncio.CancelledError, LinkError):
            await hog


CONTROLS: tuple[Control, ...] = (
    Control("host files", "searched for files that were planted on the machine", find_host_files),
    Control("mounts", "compared the mount table, wrote to shared folders", compare_mounts),
    Control("host processes", "looked for a process of the machine in /proc", find_host_processes),
    Control("network interfaces", "read /proc/net/dev", list_interfaces),
    Control("host loopback", "connected to a listener on 127.0.0.1 of the machine", reach_host_loopback),
    Control(
        "listed host", "reached a host behind a wire, by name, before and after it was listed", reach_far_end, _PASSING
    ),
    Control("unlisted names", "asked for a name that is not listed", ask_for_unlisted_name),
    Control("metadata", "connected to the address of cloud metadata", reach_metadata),
    Control("machine's services", "connected to a listener on an address of the machine", reach_machine),
    Control("devices", "compared /dev, tried mknod", compare_devices),
    Control("kernel settings", "wrote to /proc/sys", change_kernel_settings),
    Control("capabilities", "read a command's own, as user and as root", read_capabilities),
    Control("no new privileges", "ran a set-uid program of root's", gain_privileges),
    Control("system call filter", "read its state, tried what it forbids", inspect_filter, "use a runc with seccomp"),
    Control("user namespace", "read the id mapping, inside and outside", read_id_mapping),
    Control("CPU limit", "ran a busy loop, read the throttling counter", exhaust_cpu, _CONTROLLERS),
    Control("open files limit", "read the hard limit", read_file_limit),
    Control("timeouts", "let a command with runaway children run too long", outlive_timeout),
    Control("disk limit", "wrote more than fits", exhaust_disk),
    Control("process limit", "started too many commands", exhaust_processes, _CONTROLLERS),
    Control("memory limit", "used twice the memory, watched for the kill", exhaust_memory, _CONTROLLERS),
)

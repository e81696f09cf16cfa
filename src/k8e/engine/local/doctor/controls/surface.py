"""Controls of the machine's surface: which files, mounts, processes, devices and settings are seen from inside."""

from __future__ import annotations

import contextlib

from k8e.engine.local.doctor.controls.control import SEARCH_DEADLINE, Broken
from k8e.engine.local.doctor.subject import Subject
from k8e.engine.local.roots.host_image import TOOLS
from k8e.engine.local.runtime.bundle import AGENT_PATH, LINK_PATH, LOADER
from k8e.link.errors import AgentError
from k8e.link.model import Cause

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


async def find_host_files(subject: Subject) -> str:
    """/usr is meant to be seen; no file was planted there."""
    pruned = ("(", "-path", "/proc", "-o", "-path", "/sys", "-o", "-path", "/usr", ")", "-prune")
    found = await subject.run(
        *("find", "/", *pruned, "-o", "-name", subject.decoys.token, "-print", "-quit"),
        strongest=True,
        seconds=SEARCH_DEADLINE,
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

"""Controls of limits: a sandbox cannot use more than its limits, of anything."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
from collections.abc import Iterator
from pathlib import Path

from k8e.engine.local.doctor.controls.control import ROOT, SEARCH_DEADLINE, Broken
from k8e.engine.local.doctor.subject import Subject
from k8e.engine.local.runtime.cgroup import hierarchies
from k8e.link.errors import AgentError, LinkError, NotStarted
from k8e.link.model import Cause, ExecSpec, Process

_BUSY_ROUNDS = 10
_LATE_LOOKS = 30


async def exhaust_cpu(subject: Subject) -> str:
    """On a busy machine a sandbox does not get as much as the limit at once: tries until it was throttled. On a very
    busy one it never is, and the limit that the kernel was given has to do as proof."""
    wanted = f"{subject.limits.cpus:g} CPUs"
    before = await asyncio.to_thread(_read_cpu_counter, subject, "nr_throttled")
    for _ in range(_BUSY_ROUNDS):
        await asyncio.gather(*(subject.run("sh", "-c", "while :; do :; done", seconds=0.3) for _ in range(4)))
        if await asyncio.to_thread(_read_cpu_counter, subject, "nr_throttled") > before:
            return f"busy loops were held back to {wanted}"
    if await asyncio.to_thread(_read_cpu_quota, subject) <= subject.limits.cpus:
        return f"the kernel holds it back to {wanted}; the machine is too busy to give it as much"
    raise Broken(f"busy loops were not held back to {wanted}")


def _read_cpu_counter(subject: Subject, name: str) -> int:
    for counters in _read_in_groups(subject, "cpu.stat"):
        pairs = dict(line.split() for line in counters.splitlines())
        if name in pairs:
            return int(pairs[name])
    raise Broken("no control group limits its CPU time")


def _read_cpu_quota(subject: Subject) -> float:
    """Reads the quota in CPUs; infinite where there is none. Version 1 has it in two files, with -1 for none."""
    quotas = [*_read_in_groups(subject, "cpu.max"), *_read_in_groups(subject, "cpu.cfs_quota_us")]
    quota, *period = (quotas or ["max"])[0].split()
    period = period or list(_read_in_groups(subject, "cpu.cfs_period_us"))
    return int(quota) / int(period[0]) if quota.isdigit() and period else math.inf


def _read_in_groups(subject: Subject, name: str) -> Iterator[str]:
    for hierarchy in hierarchies():
        with contextlib.suppress(FileNotFoundError):
            yield Path(hierarchy, subject.group, subject.name, name).read_text()


async def read_file_limit(subject: Subject) -> str:
    told = await subject.run("sh", "-c", "ulimit -Hn", user=ROOT)
    if not told.stdout.strip().isdigit() or int(told.stdout) > subject.limits.open_files:
        raise Broken(f"the limit is {told.stdout.strip()} instead of {subject.limits.open_files}")
    return f"at most {told.stdout.strip()}"


async def outlive_timeout(subject: Subject) -> str:
    """Tries it by leaving the process session and the parent, and by ignoring SIGTERM."""
    before = await subject.processes()
    script = "trap '' TERM; (setsid sh -c 'trap \"\" TERM; sleep 600; :' &) ; setsid sleep 600 & sleep 600"
    done = await subject.run("sh", "-c", script, seconds=0.3)
    if done.cause is not Cause.TIMEOUT:
        raise Broken(f"the command ended by {done.cause.value} instead of its timeout")
    left = [pid for pid in await subject.processes() - before if await _is_alive(subject, pid)]
    if left:
        raise Broken(f"{len(left)} processes outlived their command's timeout")
    return "nothing outlived a command that ran too long"


async def _is_alive(subject: Subject, pid: int) -> bool:
    """False for a zombie, which has no arguments any more, and for the agent's supervisor of the command, which has
    reported its end and, on a busy machine, ends itself a while later."""
    try:
        words = await subject.sandbox.read_file(f"/proc/{pid}/cmdline".encode())
    except AgentError:
        return False  # gone meanwhile
    return bool(words) and words != await subject.sandbox.read_file(b"/proc/1/cmdline")


async def exhaust_disk(subject: Subject) -> str:
    count = subject.limits.disk // (1 << 20) + 16
    script = 'head -c "$0"M /dev/zero > fill; status=$?; stat -c %s fill; rm fill; exit $status'
    done = await subject.run("sh", "-c", script, str(count), seconds=SEARCH_DEADLINE * 2)
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
    before = (await subject.observe()).oom_kills
    amount = subject.limits.memory * 2
    hog = asyncio.create_task(subject.run("sh", "-c", f"head -c {amount} /dev/zero | tail -n 1 | wc -c"))
    try:
        while True:
            seen = await subject.observe()
            if seen.oom_kills > before:
                whole = "" if seen.alive else ", and with it the sandbox"
                return f"a command that took too much was killed{whole}"
            if hog.done():
                if await _was_killed(subject, before):
                    continue
                raise Broken(
                    f"{amount >> 20} MiB fit into {subject.limits.memory >> 20}: {hog.result().stdout.strip()}"
                )
            if not seen.alive:
                raise Broken("the sandbox died, and not for lack of memory")
            # The kernel notifies only the group's owner; the hog needs a few tenths of a second.
            await asyncio.wait([hog], timeout=0.02)
    finally:
        hog.cancel()
        with contextlib.suppress(asyncio.CancelledError, LinkError):
            await hog


async def _was_killed(subject: Subject, before: int) -> bool:
    """A virtual machine counts its kills itself, and one that has just run out of memory answers late."""
    for _ in range(_LATE_LOOKS):
        if (await subject.observe()).oom_kills > before:
            return True
        await asyncio.sleep(0.1)
    return False

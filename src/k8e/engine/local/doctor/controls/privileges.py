"""Controls of privileges: what commands in a sandbox, and its root, may ask of a kernel."""

from __future__ import annotations

import asyncio

from k8e.engine import Runtime
from k8e.engine.local.doctor.controls.control import ROOT, Broken, Untested
from k8e.engine.local.doctor.subject import Subject
from k8e.engine.local.runtime.bundle import ID_COUNT

_LOWEST_FOREIGN_ID = 65536  # below are the machine's own users


async def read_capabilities(subject: Subject) -> str:
    for user in (subject.place.user, ROOT):
        status = await subject.status_of_command(user)
        held = {name: value for name, value in status.items() if name.startswith("Cap")}
        if not held:
            raise Broken("/proc/self/status does not tell")
        if some := [f"{name} {value}" for name, value in held.items() if int(value, 16)]:
            raise Broken(f"a command of uid {user.uid} has {', '.join(some)}")
    return "none, for the user and for root of the sandbox"


async def gain_privileges(subject: Subject) -> str:
    """Runs a program that belongs to root and is set-uid. gVisor may not show the flag, but has to obey it."""
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
    """Checks the processes that run on the machine's kernel: natively the commands, else gVisor's own, or the VMM."""
    if not subject.native:
        statuses = await asyncio.to_thread(subject.statuses_on_machine)
        if not statuses:
            raise Broken("no process of the sandbox was found")
        if bare := [status for status in statuses if (status["Seccomp"], status["NoNewPrivs"]) != ("2", "1")]:
            raise Broken(f"{len(bare)} of the runtime's {len(statuses)} processes have no filter")
        return f"all {len(statuses)} processes of the runtime have a filter"
    for user in (subject.place.user, ROOT):
        mode = (await subject.status_of_command(user)).get("Seccomp")
        if mode != "2":
            raise Broken(f"Seccomp is {mode} for uid {user.uid}")
    if (await subject.run("unshare", "--user", "true", user=ROOT)).exit_code == 0:
        raise Broken("a user namespace can be created")
    return "a filter is in place; user namespaces are refused"


async def read_id_mapping(subject: Subject) -> str:
    if subject.runtime is Runtime.GVISOR:
        raise Untested("gVisor has a kernel of its own; ids in there are not the machine's")
    root = await _find_root(subject) if subject.native else None
    owners = {status["Uid"].split()[0] for status in await asyncio.to_thread(subject.statuses_on_machine)}
    if not owners or any(int(uid) < _LOWEST_FOREIGN_ID for uid in owners):
        raise Broken(f"its processes run as {', '.join(sorted(owners))} on the machine")
    if root is None:
        return f"the VMM is {', '.join(sorted(owners))} on the machine"
    return f"root of the sandbox is {root} on the machine"


async def _find_root(subject: Subject) -> int:
    table = (await subject.sandbox.read_file(b"/proc/self/uid_map")).decode()
    mapping = [tuple(map(int, line.split())) for line in table.splitlines()]
    if len(mapping) != 1 or mapping[0][0] != 0 or mapping[0][1] < _LOWEST_FOREIGN_ID or mapping[0][2] > ID_COUNT:
        raise Broken(f"ids are mapped as {' '.join(table.split())}")
    return mapping[0][1]

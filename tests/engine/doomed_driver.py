"""Runs the engine and dies where it is told to: `python -m tests.engine.doomed_driver STATE RUN RUNTIME`.

Reads one JSON object per line from stdin, does it in a child of its own, and answers with one. The child is killed
(SIGKILL, nothing can clean up) when it enters the named function of the engine for the nth time; with "after", after
that many seconds. Where the steps are is not written down anywhere: a child that runs undisturbed reports them.

    {"do": "create", "name": "x"}                             -> {"ended": "finished", "steps": [...], "seconds": 0.3}
    {"do": "create", "name": "x", "step": "engine._build"}    -> {"ended": "killed"}
    {"do": "create", "name": "x", "shares": "y"}              "grounds": a directory as in grounds.py, which is mounted
    {"do": "destroy", "name": "x", "after": 0.05}             -> {"ended": "killed"} or finished

"stop" and "start" are told in the same way, "claim" of one that was made ahead and gets a list of hosts, and "bind",
with "grounds", of one that was made with slots. With "victim" it is not the child that is killed at the step, but every
process of that sandbox: the child goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import k8e.engine
from k8e.engine import Runtime, SandboxSpec, Shape
from k8e.engine.local import LocalEngine
from k8e.engine.local.vm.runtime import USUAL_VMS, VmOptions
from k8e.policy import HostList
from tests.engine.grounds import Grounds
from tests.engine.rig import LIMITS, find_report

SOURCE = os.path.dirname(k8e.engine.__file__) + "/local/"
# They only compute: to die there is to die before or after the call.
PURE = {"layout", "roots/roots", "roots/host_image", "runtime/bundle", "runtime/seccomp"}
PURE |= {"runtime/host_filter"}
PURE |= {f"network/{name}" for name in ("addresses", "admissions", "connection_limits", "expiry", "refusals", "rules")}
PURE |= {"network/netlink/elements"}
EGRESS = HostList.parse(["192.0.2.7", "198.51.100.0/24", "2001:db8::7", "name.invalid"])


class Steps:
    """Every function of the engine that is entered, in order, the first time it is."""

    def __init__(self, doom: str | None, victims: Callable[[], Iterable[int]]) -> None:
        self.seen: list[str] = []
        self._doom = doom
        self._victims = victims

    def notice(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(SOURCE):
            return
        module = frame.f_code.co_filename.removeprefix(SOURCE).removesuffix(".py")
        step = f"{module}.{frame.f_code.co_qualname}"
        if step not in self.seen and "<" not in step and "RootFiles._" not in step and module not in PURE:
            self.seen.append(step)
            if step == self._doom:
                for pid in self._victims():
                    os.kill(pid, signal.SIGKILL)


async def act(engine: LocalEngine, order: dict[str, Any], runtime: Runtime) -> None:
    mounts = Grounds(Path(order["grounds"])).mounts() if "grounds" in order else ()
    spec = SandboxSpec(runtime, order.get("image", "host"), LIMITS, egress=EGRESS, shape=Shape(mounts=mounts))
    spec = replace(spec, shares=order.get("shares", ""))
    if order["do"] == "bind":
        await engine.bind(order["name"], mounts)
    elif order["do"] == "claim":
        await engine.attach(order["name"])
        await engine.set_egress(order["name"], EGRESS)
        await engine.observe(order["name"])
    elif order["do"] in ("create", "start"):
        await getattr(engine, order["do"])(order["name"], spec)
    else:
        await getattr(engine, order["do"])(order["name"])
    await engine.close()


def run_child(engine: LocalEngine, order: dict[str, Any], runtime: Runtime, report: int) -> None:
    victim = order.get("victim")
    steps = Steps(order.get("step"), lambda: engine._cgroups.processes(victim) if victim else [os.getpid()])
    threading.setprofile(steps.notice)
    sys.setprofile(steps.notice)
    started = time.monotonic()
    try:
        asyncio.run(act(engine, order, runtime))
        answer = {"ended": "finished", "steps": steps.seen, "seconds": time.monotonic() - started}
    except k8e.engine.EngineError as error:
        answer = {"ended": "failed", "error": str(error)}
    sys.setprofile(None)
    os.write(report, json.dumps(answer).encode())
    os._exit(0)


def obey(engine: LocalEngine, order: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        run_child(engine, order, runtime, writer)
    os.close(writer)
    if "after" in order:
        handle = os.pidfd_open(pid)
        if not select.select([handle], [], [], order["after"])[0]:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
    os.waitpid(pid, 0)
    content = b""
    # Whatever the child started may hold the pipe no longer than the child: it is closed on exec.
    while chunk := os.read(reader, 65536):
        content += chunk
    os.close(reader)
    answer: dict[str, Any] = json.loads(content) if content else {"ended": "killed"}
    return answer


def main() -> None:
    state, run, name = sys.argv[1:]
    runtime = Runtime(name)
    virtual = USUAL_VMS
    if folder := os.environ.get("K8E_TEST_GUEST"):
        virtual = VmOptions(Path(folder), emulation=True, kvm=Path("/nonexistent"))
    engine = LocalEngine(Path(state), Path(run), virtual=virtual)

    async def prepare() -> None:
        """Makes what every child begins with: a runtime that was tried and a disk to copy."""
        report = await find_report(engine, runtime)
        assert report.available, report
        await engine.create("warm", SandboxSpec(runtime, limits=LIMITS))
        await engine.destroy("warm")
        await engine.close()  # a child has to open its own way to the kernel

    asyncio.run(prepare())
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(obey(engine, json.loads(line), runtime)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

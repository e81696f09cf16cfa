"""A cluster of one's own, from nothing, on machines that are made of namespaces of this one.

    python -m bench.members [--rounds 3] [--idle 60] [--keep FILE]

- from `k8e server --cluster` to its "ready", and to the first output of a sandbox, with all programs there;
- from `k8e agent` to its "ready", when the node takes pods;
- memory (PSS) and processor time of a server and of a worker that nothing runs on, beside the same of upstream's
  components among them.

Pages that both machines have count half in each, because the files are those of one real machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.samples import machine_facts
from tests.members.commands import Terminal, build_programs
from tests.members.machine import GROUPS, Machine, make_segment

ROOT = Path(__file__).resolve().parent.parent
# In no other process: what a bare cluster of the same versions has, too.
BARE: Final = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "containerd"),
    "pods and their shims",
)
OWN: Final = ("supervisor", "gateway", "forwarder", "node-helper")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def list_processes(machine: Machine) -> Iterator[int]:
    tops = [path for path in (GROUPS / machine.group, *GROUPS.glob(f"*/{machine.group}")) if path.is_dir()]
    for folder, _, _ in os.walk(tops[0]):
        with contextlib.suppress(OSError):
            yield from map(int, Path(folder, "cgroup.procs").read_text().split())


def name_process(pid: int) -> str:
    """The program that it belongs to."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    groups = Path(f"/proc/{pid}/cgroup").read_text()
    if "kubepods" in groups or "containerd-shim" in command[0]:
        return "pods and their shims"
    for line in environment:
        if line.startswith("K8E_PROGRAM="):
            return line.partition("=")[2]
    return "the machine of the test" if "tests.members.boot" in command else "supervisor"


def read_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def read_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def look(machine: Machine) -> tuple[dict[str, int], dict[int, tuple[str, int]]]:
    """Returns KiB by program, and each process's program and ticks."""
    memory: dict[str, int] = defaultdict(int)
    ticks: dict[int, tuple[str, int]] = {}
    for pid in list_processes(machine):
        with contextlib.suppress(OSError):  # it has ended
            name = name_process(pid)
            memory[name] += read_memory(pid)
            ticks[pid] = (name, read_ticks(pid))
    return memory, ticks


def measure_idle(machine: Machine, seconds: float) -> dict[str, dict[str, float]]:
    """Returns MiB and the share of one processor, by program."""
    _, before = look(machine)
    begin = time.monotonic()
    time.sleep(seconds)
    memory, after = look(machine)
    lasted = time.monotonic() - begin
    used: dict[str, float] = defaultdict(float)
    for pid, (name, ticks) in after.items():
        used[name] += (ticks - before.get(pid, (name, 0))[1]) / _TICKS / lasted
    names = [name for name in memory if name != "the machine of the test"]
    return {name: {"mib": memory[name] / 1024, "processor": used[name]} for name in sorted(names)}


def wait_for(terminal: Terminal, text: str, begin: float) -> float:
    while text not in terminal.said:
        if time.monotonic() - begin > 300:
            raise SystemExit(f"{text!r} was not said: {terminal.said}")
        time.sleep(0.02)
    return time.monotonic() - begin


def run_round(programs: Path, folder: Path, idle: float) -> dict[str, Any]:
    with make_segment(folder) as segment:
        server = Terminal(segment.make("one"), programs)
        settings = r"[kubernetes]\nrequests = 0.1\n"
        server.machine.run("sh", "-c", f"mkdir /etc/k8e && printf '{settings}' > /etc/k8e/k8e.toml")
        begin = time.monotonic()
        server.start("server", "--cluster")
        found: dict[str, Any] = {"server ready": wait_for(server, "ready after", begin)}
        done = server.ask("sandbox", "run", "echo there")
        assert done["stdout"] == "there\n", done
        found["first sandbox"] = time.monotonic() - begin
        token = server.machine.run("cat", "/var/lib/k8e/server/node-token").stdout.strip()
        worker = Terminal(segment.make("two"), programs)
        begin = time.monotonic()
        worker.start("agent", K8E_URL=f"https://{server.machine.address}:6443", K8E_TOKEN=token)
        found["worker ready"] = wait_for(worker, "ready after", begin)
        if idle:
            time.sleep(20)  # the first minute's work is done
            found["server"] = measure_idle(server.machine, idle)
            found["worker"] = measure_idle(worker.machine, idle)
        return found


def add_up(programs: dict[str, dict[str, float]], names: tuple[str, ...]) -> tuple[float, float]:
    chosen = [programs[name] for name in names if name in programs]
    return sum(each["mib"] for each in chosen), sum(each["processor"] for each in chosen)


def render(rounds: list[dict[str, Any]]) -> str:
    lines = ["| seconds | " + " | ".join(f"{number}." for number in range(1, len(rounds) + 1)) + " |"]
    lines.append("|---" * (len(rounds) + 1) + "|")
    for name in ("server ready", "first sandbox", "worker ready"):
        lines.append(f"| {name} | " + " | ".join(f"{each[name]:.1f}" for each in rounds) + " |")
    last = rounds[-1]
    if "server" in last:
        lines += ["", "| idle | MiB | % of one processor |", "|---|---|---|"]
        for kind in ("server", "worker"):
            for name, each in last[kind].items():
                lines.append(f"| {kind}: {name} | {each['mib']:.0f} | {100 * each['processor']:.1f} |")
            for told, names in (("upstream's", BARE), ("k8e's own", OWN)):
                mib, processor = add_up(last[kind], names)
                lines.append(f"| **{kind}: {told}** | **{mib:.0f}** | **{100 * processor:.1f}** |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.members", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds; only in the last round; 0: not at all")
    parser.add_argument("--keep", type=Path, help="a file for all figures, as JSON")
    arguments = parser.parse_args()
    folder = ROOT / "build" / "members-programs"
    folder.mkdir(parents=True, exist_ok=True)
    programs = build_programs(folder)
    facts, rounds = machine_facts(), list[dict[str, Any]]()
    place = ROOT / "build" / "members-bench"
    for number in range(1, arguments.rounds + 1):
        place.mkdir(parents=True, exist_ok=True)
        try:
            rounds.append(run_round(programs, place, arguments.idle if number == arguments.rounds else 0))
        finally:
            shutil.rmtree(place, ignore_errors=True)
        print(json.dumps({name: value for name, value in rounds[-1].items() if isinstance(value, float)}), flush=True)
    facts |= {"load after": machine_facts()["load"]}
    print(facts, render(rounds), sep="\n\n")
    if arguments.keep:
        arguments.keep.write_text(json.dumps({"facts": facts, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()

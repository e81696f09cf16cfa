"""Finds what an engine may leave on a machine, without the engine's own code: a test that asked the engine what it
forgot would believe it."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import socket
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e.engine.local.layout import Layout
from k8e.engine.local.network.addresses import BLOCK

CGROUPS = Path("/sys/fs/cgroup")
LEASES = Path("/run/k8e-network")
# Where runsc puts its control socket when it finds the place that we gave it taken.
STRAY_SOCKETS = (Path("/run"), Path("/tmp"))


@dataclass(frozen=True, slots=True)
class Trace:
    kind: str
    what: str


def read_mounts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Where each mount of a namespace is, what of its file system it shows, and where that comes from."""
    for line in path.read_bytes().split(b"\n"):
        if line:
            words = [os.fsdecode(word.decode("unicode_escape").encode("latin-1")) for word in line.split(b" ")]
            yield words[4], words[3], words[words.index("-") + 2]


def mount_points() -> Iterator[str]:
    return (point for point, _, _ in read_mounts(Path("/proc/self/mountinfo")))


def living_processes() -> Iterator[tuple[int, Path]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            folder = Path("/proc", name)
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state not in "ZX":  # the dead are the machine's init's business
                yield int(name), folder


def _holds(folder: Path, places: Iterable[bytes]) -> bool:
    """Whether a runtime's process that carries no name (`runc init`) is about ours: by the files that it has open."""
    try:
        if not os.path.basename(os.readlink(folder / "exe")).startswith(("runc", "runsc", "crun", "exe", "memfd:")):
            return False
        links = [os.readlink(os.fsencode(path)) for path in (folder / "fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith(place + b"/") for link in links for place in places)


def _processes(layout: Layout) -> Iterator[Trace]:
    places = (os.fsencode(layout.state), os.fsencode(layout.run))
    for pid, folder in living_processes():
        try:
            groups = (folder / "cgroup").read_text()
            words = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        belongs = f"/{layout.cgroup}/" in groups or _holds(folder, places)
        # A runtime or a tool on its way to make something of ours. (The tests' own drivers carry the paths as well.)
        works = any(place in words for place in places) and b"tests.engine" not in words and pid != os.getpid()
        if belongs or works:
            yield Trace("process", f"{pid} {words[:200]!r}")


def cgroup_parents(layout: Layout) -> list[Path]:
    """The engine's group in every hierarchy: one below the root in version 2, one for each controller in version 1."""
    tops = [CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())]
    return [top / layout.cgroup for top in tops if (top / layout.cgroup).is_dir()]


def _cgroups(layout: Layout) -> Iterator[Trace]:
    for parent in cgroup_parents(layout):
        for group, _, _ in os.walk(parent):
            if Path(group) != parent:
                yield Trace("cgroup", group)


def _loop_devices(layout: Layout) -> Iterator[Trace]:
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = path.read_text().strip()
        except OSError:  # gone, or going
            continue
        if backing.startswith(os.fspath(layout.state)):
            yield Trace("loop device", f"{path.parts[3]} {backing}")


def _files(layout: Layout) -> Iterator[Trace]:
    if layout.sandboxes.is_dir():
        for name in os.listdir(layout.sandboxes):
            yield Trace("directory", f"sandboxes/{name}")
    for parent, _, names in os.walk(layout.run):
        for name in names:
            yield Trace("runtime state", os.path.join(parent, name))
    # runc keeps a directory for each sandbox.
    for root in (layout.run / "native", layout.run / "gvisor"):
        if root.is_dir():
            yield from (Trace("runtime state", str(path)) for path in root.iterdir() if path.is_dir())


def _stray_sockets(names: Iterable[str]) -> Iterator[Trace]:
    for folder in STRAY_SOCKETS:
        for name in names:
            path = folder / f"runsc-k8e-{name}.sock"
            if path.exists():
                yield Trace("stray socket", str(path))


def list_table(layout: Layout) -> list[dict[str, Any]] | None:
    """The engine's rules, as nft tells them. None: there are none."""
    done = subprocess.run(["nft", "-j", "list", "table", "inet", f"k8e_{layout.tag}"], capture_output=True)
    if done.returncode != 0:
        return None
    content: list[dict[str, Any]] = json.loads(done.stdout)["nftables"]
    return content


def list_guards() -> Iterator[str]:
    """The wires that routing rules of this machine are about, once for each family."""
    for family in ("-4", "-6"):
        done = subprocess.run(["ip", family, "-j", "rule"], capture_output=True)
        yield from (each["iif"] for each in json.loads(done.stdout or b"[]") if "iif" in each)


def _list_leases(kind: str) -> Iterator[tuple[int, str]]:
    """The number of each lease in this network namespace, and the tag of the engine that has it. Other namespaces have
    wires of the same numbers."""
    # Not Path.glob: it fails when a ledger goes away meanwhile.
    ledger = os.stat("/proc/thread-self/ns/net").st_ino
    for path in glob.glob(f"{LEASES}/{ledger}/{kind}-*"):
        with contextlib.suppress(FileNotFoundError):
            yield int(path.rpartition("-")[2]), os.readlink(path).split()[0]


def _network(layout: Layout) -> Iterator[Trace]:
    numbers = set()
    yield from (Trace("lease", f"wire-{number}") for number, tag in _list_leases("wire") if tag == layout.tag)
    for each in list_table(layout) or ():
        for kind in ("set", "map"):
            name = each.get(kind, {}).get("name", "")
            if name == "wires":
                numbers = {wire.removeprefix("k8e-") for wire in each[kind].get("elem", ())}
            if name == "live" or "_" in name:
                yield from (Trace("set element", f"{name} {element}") for element in each[kind].get("elem", ()))
    guarded = set(list_guards())
    # Blocks that this engine gave back may be another engine's by now: the tests of several clones share a machine.
    foreign = {number for number, tag in _list_leases("block") if tag != layout.tag}
    for number in numbers:
        if int(number) // BLOCK in foreign:
            continue
        if f"k8e-{number}" in guarded:
            yield Trace("routing rule", f"k8e-{number}")
        with contextlib.suppress(OSError):
            yield Trace("interface", f"k8e-{number} is {socket.if_nametoindex(f'k8e-{number}')}")


def find_traces(layout: Layout, names: Iterable[str] = ()) -> list[Trace]:
    """Everything of an engine's sandboxes on this machine; the names only help to find what lies elsewhere."""
    found = [*_processes(layout), *_cgroups(layout), *_loop_devices(layout), *_files(layout), *_stray_sockets(names)]
    found += _network(layout)
    top = os.fspath(layout.state)
    found += [Trace("mount", point) for point in mount_points() if point.startswith(top + "/")]
    return found


async def wait_for_no_traces(layout: Layout, names: Iterable[str] = (), deadline: float = 20.0) -> None:
    """The kernel lets go of loop devices and dying processes a moment after it was told to."""
    known = list(names)
    end = asyncio.get_running_loop().time() + deadline
    while left := await asyncio.to_thread(find_traces, layout, known):
        assert asyncio.get_running_loop().time() < end, f"left behind: {left}"
        await asyncio.sleep(0.02)

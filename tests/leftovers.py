"""What a run of the tests has left on the machine. Known by the folders it made, so that whatever else runs here at the
same time, another run of the suite included, is not its business; and by which test made them, to know whom to ask."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from k8e.engine.local.layout import Layout
from tests.engine.traces import CGROUPS, LEASES, living_processes, read_mounts

PATIENCE = 20.0  # the kernel ends processes and lets go of mounts a moment after it was told to
NAMED_NETWORKS = Path("/run/netns")
UNKNOWN = "no folder of a test tells which one"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Names on the machine that carry no folder's: what was there before a run is not the run's."""

    names: frozenset[str]

    @classmethod
    def look(cls) -> Surroundings:
        return cls(frozenset([*_stray_interfaces(), *_named_networks()]))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def _describe(folder: Path) -> str:
    """All that tells what a process is about: a daemon by its environment, an agent, which has neither that nor a
    command line that would tell, by the file that it writes its complaints to."""
    links = []
    for name in ("cwd", "fd/1", "fd/2"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(folder / name))
    return "\0".join([_read(folder / "cmdline"), _read(folder / "environ"), *links])


def _named(places: Iterable[str], text: str) -> str | None:
    """The first of them that a text names, as a whole: /tmp/k8e-a is not meant by /tmp/k8e-ab."""
    for place in places:
        at = text.find(place)
        while at >= 0:
            after = text[at + len(place) : at + len(place) + 1]
            if place.endswith("/") or not (after.isalnum() or after in ("_", "-", ".")):
                return place
            at = text.find(place, at + 1)
    return None


def _processes() -> Iterator[tuple[str, str]]:
    for pid, folder in living_processes():
        if pid != os.getpid():
            yield f"process {pid} {_read(folder / 'cmdline')[:200]!r}", _describe(folder)


def _mounts() -> Iterator[tuple[str, str]]:
    """In every mount namespace that a process keeps; what is mounted there, or comes from, a folder."""
    seen = set()
    for pid, folder in living_processes():
        with contextlib.suppress(OSError):
            namespace = os.readlink(folder / "ns/mnt")
            if namespace not in seen:
                seen.add(namespace)
                own = namespace == os.readlink("/proc/self/ns/mnt")
                for point, root, source in read_mounts(folder / "mountinfo"):
                    where = point if own else f"{point} (in the namespace of process {pid})"
                    yield f"mount {where}", f"{point}\0{root}\0{source}"


def _loop_devices() -> Iterator[tuple[str, str]]:
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        backing = _read(path).strip()
        yield f"loop device {path.parts[3]} {backing}", backing


def _leases() -> Iterator[tuple[str, str, str]]:
    """Name, tag of the engine, and what else it says."""
    for path in (*LEASES.glob("*/wire-*"), *LEASES.glob("*/block-*")):
        with contextlib.suppress(OSError):
            tag, _, rest = os.readlink(path).partition(" ")
            yield path.name, tag, rest


def _rules() -> dict[str, list[str]]:
    """Tables of engines, with their sets."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(["nft", "-j", "list", "sets"], capture_output=True, text=True)
        for each in json.loads(done.stdout or '{"nftables": []}')["nftables"]:
            if "set" in each:
                found.setdefault(each["set"]["table"], []).append(each["set"]["name"])
        done = subprocess.run(["nft", "-j", "list", "tables"], capture_output=True, text=True)
        for each in json.loads(done.stdout or '{"nftables": []}')["nftables"]:
            if "table" in each:
                found.setdefault(each["table"]["name"], [])
    return found


def _stray_interfaces() -> Iterator[str]:
    """Wires that no engine has a lease for."""
    leased = {name.removeprefix("wire-") for name, _, _ in _leases()}
    for _, name in socket.if_nameindex():
        if name.startswith("k8e-") and name.removeprefix("k8e-") not in leased:
            yield f"interface {name}"


def _named_networks() -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        yield from (f"network namespace {name}" for name in os.listdir(NAMED_NETWORKS))


def _states(folder: str) -> Iterator[Path]:
    """Where engines of a test may have had their state."""
    names = {"", "s"}
    with contextlib.suppress(OSError):
        names |= {entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)}
    yield from (Path(folder, name) for name in sorted(names))


def _of_engines() -> dict[str, list[str]]:
    """What carries an engine's tag and no path, by tag."""
    found: dict[str, list[str]] = {}
    for top in (CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())):
        for group in top.glob("k8e-*"):
            found.setdefault(group.name.removeprefix("k8e-"), []).append(f"control group {group}")
    for table, sets in _rules().items():
        words = f"rules {table} (sets: {', '.join(sorted(sets)) or 'none'})"
        found.setdefault(table.removeprefix("k8e_"), []).append(words)
    interfaces = {name for _, name in socket.if_nameindex()}
    for name, tag, rest in _leases():
        found.setdefault(tag, []).append(f"lease {name} {rest}")
        if (wire := name.replace("wire-", "k8e-")) in interfaces:
            found[tag].append(f"interface {wire}")
    return found


def find_leftovers(folders: dict[str, str], before: Surroundings | None = None) -> list[str]:
    """Of those who made these folders; with `before`, also what carries no folder's name and was not there then."""
    found = []
    for what, text in (*_processes(), *_mounts(), *_loop_devices()):
        if folder := _named(folders, text):
            found.append(f"{folders[folder]}: {what} ({folder})")
    engines = _of_engines()
    for folder, test in folders.items() if engines else ():
        for state in _states(folder):
            found += [f"{test}: {what} ({folder})" for what in engines.get(Layout(state, state).tag, ())]
    if before is not None:
        found += [f"{UNKNOWN}: {name}" for name in sorted(Surroundings.look().names - before.names)]
    return found


def wait_for_none(folders: dict[str, str], before: Surroundings | None = None) -> list[str]:
    """What is still there in the end."""
    end = time.monotonic() + PATIENCE
    while (found := find_leftovers(folders, before)) and time.monotonic() < end:
        time.sleep(0.2)
    return found

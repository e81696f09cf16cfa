"""Builds components from Go modules into a cache: a folder for each component and fingerprint, complete or not there.

    ~/.cache/k8e/cluster/kubernetes-1a2b3c4d5e6f7a8b/kubelet, kubectl, ...

A build that was cut off goes on where Go's own cache has got to. Registries and proxies are those that `go` is
configured for on this machine; what they send is checked against the pins.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

from k8e.cluster.components import ADDONS, CILIUM, COMPONENTS, Component
from k8e.cluster.errors import BuildFailed

Say = Callable[[str], None]
_PROGRESS: Final = 10.0  # seconds between two lines about one component
_LAST: Final = 2000  # characters of the compiler's output that an error contains


@dataclass(frozen=True, slots=True)
class Components:
    """The programs and files of all components, wherever each lies."""

    folders: Mapping[str, Path]  # by component

    @classmethod
    def parse(cls, body: Mapping[str, str]) -> Self:
        return cls({name: Path(folder) for name, folder in body.items()})

    @property
    def body(self) -> dict[str, str]:
        return {name: str(folder) for name, folder in self.folders.items()}

    def program(self, name: str) -> Path:
        return self.folders[_owner(name).name] / name

    def has(self, name: str) -> bool:
        """Whether a program is there; add-ons may be left out."""
        return _owner(name).name in self.folders

    def file(self, component: str, name: str) -> Path:
        return self.folders[component] / name

    @property
    def path(self) -> str:
        """The programs' folders, as a PATH in which components find each other."""
        return ":".join(str(folder) for folder in self.folders.values())


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "k8e", "cluster")


def find_components(cache: Path, wanted: Sequence[Component] = COMPONENTS) -> Components | None:
    """Returns the components if all that are wanted are built, with those add-ons that are."""
    folders = {component.name: _folder(cache, component) for component in wanted}
    if not all(folder.is_dir() for folder in folders.values()):
        return None
    addons = {component.name: _folder(cache, component) for component in ADDONS}
    return Components({**folders, **{name: folder for name, folder in addons.items() if folder.is_dir()}})


def build_components(cache: Path, say: Say, *, cilium: bool = False, addons: bool = False) -> Components:
    """Builds what is missing, one component after the other: a compilation uses all cores anyway."""
    wanted = (*COMPONENTS, *([CILIUM] if cilium else ()), *(ADDONS if addons else ()))
    _build_missing(wanted, cache, say)
    found = find_components(cache, wanted)
    assert found is not None
    return found


def build_tool(tool: Component, cache: Path, say: Say) -> Path:
    """Builds a program that no cluster needs, but its users; returns its folder."""
    _build_missing((tool,), cache, say)
    return _folder(cache, tool)


def _build_missing(components: Sequence[Component], cache: Path, say: Say) -> None:
    if all(_folder(cache, component).is_dir() for component in components):
        return
    cache.mkdir(parents=True, exist_ok=True)
    go = _find_go()
    with _alone(cache, say):
        for number, component in enumerate(components, 1):
            if not _folder(cache, component).is_dir():
                title = f"{component.name} {component.version} ({number} of {len(components)})"
                _build(go, component, cache, title, say)


def _owner(program: str) -> Component:
    return next(component for component in (*COMPONENTS, *ADDONS, CILIUM) if program in component.packages)


def _folder(cache: Path, component: Component) -> Path:
    return cache / f"{component.name}-{component.fingerprint}"


def _find_go() -> str:
    """Looks also where Go's own installer puts it, which is often not on the PATH of a service."""
    go = shutil.which("go") or shutil.which("/usr/local/go/bin/go")
    if go is None:
        hint = "install Go 1.26 or newer, so that `go` is on the PATH, and try again"
        raise BuildFailed("go_missing", "the cluster's components are built with Go, which is not installed", hint=hint)
    return go


@contextlib.contextmanager
def _alone(cache: Path, say: Say) -> Iterator[None]:
    """Two builds at once would do the same work twice."""
    with open(cache / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build in {cache}")
            fcntl.flock(file, fcntl.LOCK_EX)
        # Folders of builds that were killed: the lock says that none is under way.
        for partial in cache.glob(".partial-*"):
            shutil.rmtree(partial)
        yield


def _build(go: str, component: Component, cache: Path, title: str, say: Say) -> None:
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache) as temporary:
        work, result = Path(temporary, "module"), Path(temporary, "result")
        shutil.copytree(component.folder, work)
        result.mkdir()
        say(f"{title}: fetching its modules")
        source = _fetch(go, component, work)
        if component.patch is not None:
            _apply_patch(go, component, source, work)
        for name in component.files:
            shutil.copyfile(source / name, result / Path(name).name)
        for name in component.folders:
            shutil.copytree(source / name, result / Path(name).name, copy_function=shutil.copyfile)
            _make_writable(result / Path(name).name)
        _compile(go, component, work, result, title, say)
        result.rename(_folder(cache, component))


def _environment() -> dict[str, str]:
    # readonly: a module that is not in go.sum, or is not what go.sum says, ends the build.
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off"}


def _fetch(go: str, component: Component, work: Path) -> Path:
    """Returns the folder of the module, in Go's own cache."""
    done = subprocess.run(
        [go, "mod", "download", "-json", component.module],
        cwd=work,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise _failure(component, done.stdout + done.stderr, "go mod download")
    return Path(json.loads(done.stdout)["Dir"])


def _apply_patch(go: str, component: Component, source: Path, work: Path) -> None:
    """Patches a copy of the whole module: Go does not let a single file of a module be replaced."""
    patch = component.patch
    assert patch is not None
    copy = work / "patched"
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    _make_writable(copy)
    path = copy / patch.file
    text = path.read_text()
    if text.count(patch.old) != 1:
        raise _failure(component, f"{patch.file} is not the one that the patch was made for", "patch")
    path.write_text(text.replace(patch.old, patch.new))
    subprocess.run([go, "mod", "edit", f"-replace={component.module}=./patched"], cwd=work, check=True)


def _make_writable(top: Path) -> None:
    """Go's cache is read-only, and so are copies of its folders."""
    for folder, _, _ in os.walk(top):
        os.chmod(folder, 0o755)


def _compile(go: str, component: Component, work: Path, result: Path, title: str, say: Say) -> None:
    version = component.version
    major, minor = version.removeprefix("v").split(".")[:2]
    words = {"version": version, "major": major, "minor": minor}
    settings = [f"-X {name}={value.format(**words)}" for name, value in component.settings.items()]
    packages = {name: _package(component, path) for name, path in component.packages.items()}
    command = [go, "build", "-v", "-trimpath", "-o", f"{result}/", f"-tags={','.join(component.tags)}"]
    command += ["-ldflags", " ".join(["-s -w", *settings]), *packages.values()]
    begin = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=work,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        output = _follow(process.stderr, title, say)
    if process.returncode != 0:
        raise _failure(component, output, "go build")
    for name, package in packages.items():
        (result / _program(package)).rename(result / name)
    say(f"{title}: built in {time.monotonic() - begin:.0f} s")


def _follow(stream: IO[str], title: str, say: Say) -> str:
    """Says how far the compiler has got, which names each package that it begins, and returns the end of its output."""
    last, begin = "", time.monotonic()
    spoken = begin
    for count, line in enumerate(stream, 1):
        last = (last + line)[-_LAST:]
        if (now := time.monotonic()) > spoken + _PROGRESS:
            say(f"{title}: {count} packages, {now - begin:.0f} s")
            spoken = now
    return last


def _package(component: Component, path: str) -> str:
    if path.startswith("./"):
        return path
    return "/".join([component.module, *([path] if path else [])])


def _program(package: str) -> str:
    """The name that Go gives to a program: the last part of its package that is not a major version."""
    parts: Iterable[str] = reversed(package.split("/"))
    return next(part for part in parts if not (part.startswith("v") and part[1:].isdigit()))


def _failure(component: Component, output: str, step: str) -> BuildFailed:
    return BuildFailed(
        "component_not_built",
        f"{component.name} {component.version} cannot be built: {step} failed",
        detail=output[-_LAST:].strip(),
        hint="what is built already is kept: correct the cause and run the same command again",
    )

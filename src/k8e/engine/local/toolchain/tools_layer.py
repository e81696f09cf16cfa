"""The tools layer: what sandboxes get beside the machine's own toolchain, read-only at /opt/k8e.

    python/pip    unpacked from the wheel that Python itself carries, for machines whose Python has none
    node/, bin/   tsx, from npm, by the lock beside this file

`python -m k8e.engine.local.toolchain.tools_layer [TARGET]` makes it, as root, and does nothing when it is there. TARGET
is a link to a folder beside it: replacing it is one rename, and sandboxes that run keep the folder they started with.
Programs that the machine lacks (Node, npm) are left out and named.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from k8e.engine.local.disk.tree import set_modes
from k8e.engine.local.system.tool import find_tool
from k8e.engine.local.toolchain.package_clients import SYSTEM_PYTHON

TARGET = Path("/var/lib/k8e/tools")
RECORD = "layer.json"
# Where Debian keeps the wheels that it took out of ensurepip.
_DEBIAN_WHEELS = Path("/usr/share/python-wheels")
_DATA = resources.files("k8e.engine.local.toolchain").joinpath("tools_data")
_FORMAT = 1  # of the layer; raise it to have every machine make it anew
_NPM_DEADLINE = 300.0

Say = Callable[[str], None]


class ToolsFailed(Exception):
    """A part of the layer cannot be made."""


@dataclass(frozen=True, slots=True)
class Ingredients:
    """The parts that a layer is made from. A layer made from the same parts is the same."""

    python: str | None  # the sandbox's interpreter, e.g. python3.11: bytecode is made for it
    wheels: tuple[Path, ...]  # of pip, the newest first
    npm: str | None
    lock: bytes

    @classmethod
    def find(cls) -> Ingredients:
        python = os.path.basename(os.path.realpath(SYSTEM_PYTHON)) if SYSTEM_PYTHON.exists() else None
        npm = find_tool("npm") if find_tool("node") else None
        return cls(python, tuple(find_pip_wheels()), npm, _DATA.joinpath("package-lock.json").read_bytes())

    def fingerprint(self) -> str:
        words = [str(_FORMAT), platform.machine(), str(self.python), *(wheel.name for wheel in self.wheels)]
        words += ["npm" if self.npm else "no npm", hashlib.sha256(self.lock).hexdigest()]
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of a layer; `missing` explains to people which are left out and why."""

    path: Path
    made_from: str
    pip: str | None
    tsx: str | None
    missing: tuple[str, ...]


def find_pip_wheels() -> list[Path]:
    """pip is one wheel for every Python 3, so the newest that this machine has is the one to try first."""
    folders = [Path(os.path.realpath(os.__file__)).parent / "ensurepip" / "_bundled", _DEBIAN_WHEELS]
    folders += sorted(Path("/usr/lib").glob("python3*/ensurepip/_bundled"))
    found = {wheel.name: wheel for folder in folders for wheel in folder.glob("pip-*-py3-none-any.whl")}
    return sorted(found.values(), key=_wheel_version, reverse=True)


def _wheel_version(wheel: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", wheel.name.split("-")[1]))


def install(target: Path = TARGET, say: Say = lambda text: None, *, retry: bool = False) -> Layer:
    """Makes the layer if it is not there. `retry`: also if it is there but something could not be had then."""
    target.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ingredients = Ingredients.find()
        current = read_layer(target)
        if current is not None and current.made_from == ingredients.fingerprint() and not (retry and current.missing):
            return current
        if current is None and target.exists():
            raise ToolsFailed(f"{target} is in the way: not a layer of ours")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            layer = _make(Path(scratch, "layer"), ingredients, say)
            return _publish(layer, target, Path(scratch))


def read_layer(target: Path = TARGET) -> Layer | None:
    try:
        record = json.loads((target / RECORD).read_text())
        return Layer(target.resolve(), record["made_from"], record["pip"], record["tsx"], tuple(record["missing"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _make(folder: Path, ingredients: Ingredients, say: Say) -> Layer:
    versions: dict[str, str | None] = {}
    missing = []
    for part in ("bin", "python", "node"):
        (folder / part).mkdir(parents=True)
    for name, add in (("pip", _add_pip), ("tsx", _add_tsx)):
        try:
            versions[name] = add(folder, ingredients, say)
        except ToolsFailed as error:
            versions[name] = None
            missing.append(f"{name}: {error}")
            say(f"left out {name}: {error}")
    layer = Layer(folder, ingredients.fingerprint(), versions["pip"], versions["tsx"], tuple(missing))
    record = {"made_from": layer.made_from, "pip": layer.pip, "tsx": layer.tsx, "missing": layer.missing}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    set_modes(folder)
    return layer


def _add_pip(layer: Path, ingredients: Ingredients, say: Say) -> str:
    if ingredients.python is None:
        raise ToolsFailed(f"there is no {SYSTEM_PYTHON}, which sandboxes would use")
    if not ingredients.wheels:
        raise ToolsFailed("this machine has no wheel of it (Debian and Ubuntu: apt-get install python3-venv)")
    complaints = []
    for wheel in ingredients.wheels:
        say(f"unpacking {wheel.name}")
        shutil.rmtree(layer / "python")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(layer / "python")
        version = ".".join(map(str, _wheel_version(wheel)))
        try:
            # An older pip than the interpreter, or the other way round, shows here.
            told = _run([SYSTEM_PYTHON, "-I", "-S", layer / "python" / "pip", "--version"], cwd=layer)
        except ToolsFailed as error:
            complaints.append(f"{wheel.name}: {error}")
            continue
        if not told.startswith(f"pip {version} "):
            complaints.append(f"{wheel.name} says {told.strip()!r}")
            continue
        # Sandboxes cannot write it there and would compile it for every command. The paths in it are theirs.
        command: list[str | Path] = [
            SYSTEM_PYTHON,
            "-I",
            "-S",
            "-m",
            "compileall",
            "-q",
            "--invalidation-mode",
            "unchecked-hash",
        ]
        _run([*command, "-s", layer / "python", "-p", "/opt/k8e/python", "-f", layer / "python" / "pip"], cwd=layer)
        return version
    raise ToolsFailed("; ".join(complaints))


def _add_tsx(layer: Path, ingredients: Ingredients, say: Say) -> str:
    if ingredients.npm is None:
        raise ToolsFailed("node and npm are not installed for all users (as /usr/bin/node, /usr/bin/npm)")
    for name in ("package.json", "package-lock.json"):
        (layer / "node" / name).write_bytes(_DATA.joinpath(name).read_bytes())
    say("installing tsx from the lock")
    with tempfile.TemporaryDirectory(prefix="k8e-npm-") as cache:
        command = [ingredients.npm, "ci", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--cache", cache]
        _run([*command, "--no-update-notifier", "--loglevel=error"], cwd=layer / "node", deadline=_NPM_DEADLINE)
    (layer / "bin" / "tsx").symlink_to("../node/node_modules/.bin/tsx")
    told = _run([layer / "bin" / "tsx", "-e", "const answer: number = 42; console.log(answer)"], cwd=layer)
    if told != "42\n":
        raise ToolsFailed(f"it computes {told!r} instead of 42")
    package = json.loads((layer / "node" / "node_modules" / "tsx" / "package.json").read_text())
    return str(package["version"])


def _run(argv: Sequence[str | Path], cwd: Path, deadline: float = 60.0, env: Mapping[str, str] | None = None) -> str:
    """Runs it with the machine's configuration (mirror, certificate) and without the caller's own PATH: sandboxes see
    the toolchain of all users."""
    variables = {**os.environ, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **(env or {})}
    words = [os.fspath(word) for word in argv]
    try:
        done = subprocess.run(
            words, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolsFailed(str(error)) from error
    if done.returncode != 0:
        complaint = done.stderr.strip()[-800:] or f"exit status {done.returncode}"
        raise ToolsFailed(f"{os.path.basename(words[0])}: {complaint}")
    return done.stdout


def _publish(layer: Layer, target: Path, scratch: Path) -> Layer:
    final = target.with_name(f"{target.name}-{secrets.token_hex(4)}")
    before = target.resolve()
    layer.path.rename(final)
    link = scratch / "link"
    link.symlink_to(final.name)
    link.rename(target)
    # The one before may still be in use by sandboxes that run; those before that hardly.
    for old in target.parent.glob(f"{target.name}-*"):
        if old.is_dir() and old not in (final, before):
            shutil.rmtree(old)
    return replace(layer, path=final)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m k8e.engine.local.toolchain.tools_layer", description="Make the tools layer"
    )
    parser.add_argument("target", nargs="?", type=Path, default=TARGET)
    parser.add_argument("--retry", action="store_true", help="try again what could not be had the last time")
    options = parser.parse_args(argv)

    def say(text: str) -> None:
        sys.stderr.write(f"tools: {text}\n")

    try:
        layer = install(options.target, say, retry=options.retry)
    except (ToolsFailed, OSError) as error:
        say(str(error))
        return 1
    # Without it a sandbox's Python cannot install anything; without tsx one language is missing, which was said.
    return 1 if layer.pip is None and SYSTEM_PYTHON.exists() else 0


if __name__ == "__main__":
    sys.exit(main())

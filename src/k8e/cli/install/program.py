"""The program for every user: a copy of the environment that k8e was installed into, and links to its commands.

pipx and uv install below the home of the user who calls them, and others cannot enter root's. So the distributions that
k8e needs are copied, each file checked against the hash in its record, into a folder that root owns. The copy is tried
before a link is turned to it, in one rename; a copy that does not work changes nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from k8e.cli.install.places import COMMANDS, CURRENT, LIBRARY, PROGRAMS, is_trusted
from k8e.cli.process import Failure

FORMAT = 2  # of the copy; raise it to have every machine make it anew
LOADABLE = "import k8e.daemon.server, k8e.doors.grpc.gateway, k8e.doors.mcp.endpoint, k8e.engine.local.engine"
# Without `site`, which takes a quarter of Python's start to find out what is known here.
SCRIPT = "#!{python} -IS\nimport sys\nsys.path.append({library!r})\nfrom {module} import main\nmain()\n"
ABOUT = "import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_config_var('SOABI'))"


def is_checkout() -> bool:
    told = metadata.distribution("k8e").read_text("direct_url.json")
    return bool(told and json.loads(told).get("dir_info", {}).get("editable"))


def find_distributions(name: str = "k8e") -> list[metadata.Distribution]:
    """k8e and all that it needs, by name. What only an extra or another platform needs is not there, and left out."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        key = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if key in found:
            continue
        try:
            found[key] = metadata.distribution(key)
        except metadata.PackageNotFoundError:
            continue
        needed = [text for text in found[key].requires or () if "extra ==" not in text]
        waiting += [match[0] for text in needed if (match := re.match(r"[A-Za-z0-9._-]+", text))]
    return [found[key] for key in sorted(found)]


def find_python() -> Path:
    """An interpreter that every user can run and root alone can change, of the version that the libraries are for."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    base = Path(os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable))
    wanted = f"{sys.version_info[:2]} {sysconfig.get_config_var('SOABI')}"
    for path in (base, Path("/usr/bin", version), Path("/usr/local/bin", version)):
        if is_trusted(path) and os.access(path, os.X_OK):
            told = subprocess.run([path, "-I", "-S", "-c", ABOUT], capture_output=True, text=True, check=False)
            if told.stdout.strip() == wanted:
                return path
    raise Failure(
        "python_private",
        "other users cannot run the Python that k8e was installed with",
        detail=f"{base} is not root's alone or not open to them, and /usr/bin has no {version}",
        hint="install k8e with the distribution's Python: `uv tool install --python /usr/bin/python3 k8e`, or pipx",
    )


def name_copy(distributions: list[metadata.Distribution], python: Path) -> str:
    total = hashlib.sha256(f"{FORMAT} {python}".encode())
    for distribution in distributions:
        total.update((distribution.read_text("RECORD") or "").encode())
    return f"{metadata.version('k8e')}-{total.hexdigest()[:12]}"


def install_program() -> Path | None:
    """Returns the new copy; None when the one that is used is the same already. Raises Failure or OSError."""
    python, distributions = find_python(), find_distributions()
    final = LIBRARY / name_copy(distributions, python)
    if CURRENT.exists() and os.path.realpath(CURRENT) == os.fspath(final):
        return None
    LIBRARY.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not is_trusted(LIBRARY):
        raise in_the_way(LIBRARY, "users other than root can change it, or a folder above it")
    if not final.exists():
        with tempfile.TemporaryDirectory(dir=LIBRARY, prefix=".new-") as scratch:
            draft = Path(scratch, "copy")
            copy_environment(distributions, python, draft, final)
            try_copy(draft)
            draft.rename(final)
    turn_link(CURRENT, Path(final.name))
    return final


def copy_environment(distributions: list[metadata.Distribution], python: Path, draft: Path, final: Path) -> None:
    library = Path("lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    (draft / "bin").mkdir(parents=True)
    (draft / library).mkdir(parents=True)
    (draft / "bin" / "python").symlink_to(python)
    (draft / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
    for distribution in distributions:
        for source, name, digest in list_files(distribution):
            content = source.read_bytes()
            if digest and digest != hashlib.sha256(content).digest():
                raise Failure(
                    "install_damaged",
                    f"{source} is not as it was installed",
                    hint="install k8e anew: `pipx reinstall k8e`, or `uv tool install --force k8e`",
                )
            target = draft / library / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o644)
    for name, module in PROGRAMS.items():
        script = draft / "bin" / name
        words = {"python": final / "bin" / "python", "library": os.fspath(final / library), "module": module}
        script.write_text(SCRIPT.format(**words))
    # Users cannot write bytecode there, and would compile it for every command.
    run(draft, "-m", "compileall", "-q", "-s", str(draft), "-p", str(final), str(draft / library), ends=(0, 1))
    for folder, _, files in os.walk(draft):
        os.chmod(folder, 0o755)
        for file in files:
            if not os.path.islink(os.path.join(folder, file)):
                os.chmod(os.path.join(folder, file), 0o755 if folder == os.fspath(draft / "bin") else 0o644)


def list_files(distribution: metadata.Distribution) -> Iterator[tuple[Path, str, bytes]]:
    """Its files: where each is, its name below the folder of libraries, its SHA-256. Not: commands and bytecode."""
    try:
        files = distribution.files or []
    except (TypeError, ValueError):
        files = []
    if not files:
        error = f"the record of {distribution.name} is missing or damaged"
        raise Failure("install_damaged", error, hint="install k8e anew: `pipx reinstall k8e`")
    for file in files:
        name = os.path.normpath(file)
        if name.startswith("..") or os.path.isabs(name) or name.endswith((".pyc", ".pth")):
            continue
        digest = base64.urlsafe_b64decode(file.hash.value + "=") if file.hash and file.hash.mode == "sha256" else b""
        yield Path(str(distribution.locate_file(file))), name, digest


def try_copy(draft: Path) -> None:
    run(draft, "-c", LOADABLE)


def run(draft: Path, *words: str, ends: tuple[int, ...] = (0,)) -> None:
    command = [os.fspath(draft / "bin" / "python"), "-I", *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", check=False)
    if done.returncode not in ends:
        raise Failure(
            "install_failed",
            "the copy of the program does not work, and was not taken",
            detail=done.stderr.strip()[-800:] or f"exit status {done.returncode}",
            hint="what was installed before is unchanged; install k8e anew and try again",
        )


def turn_link(link: Path, target: Path) -> None:
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(link)


def install_commands() -> list[Path]:
    """Puts links on every user's PATH; returns the new ones. A file that is not ours is left, and is an error."""
    made = []
    COMMANDS.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in PROGRAMS:
        link, target = COMMANDS / name, CURRENT / "bin" / name
        if link.is_symlink() and os.readlink(link) == os.fspath(target):
            continue
        if os.path.lexists(link):
            raise in_the_way(link, "it is not of this installation")
        turn_link(link, target)
        made.append(link)
    return made


def in_the_way(path: Path, cause: str) -> Failure:
    return Failure("in_the_way", f"{path} is in the way", detail=cause, hint=f"look at {path}, move it away, try again")


def remove_old_copies() -> None:
    """Those that no process uses: a daemon that runs loads parts of itself only when they are needed."""
    current = os.path.realpath(CURRENT)
    for path in LIBRARY.iterdir():
        if path.is_dir() and not path.is_symlink() and os.fspath(path) != current and not is_used(path):
            shutil.rmtree(path)


def is_used(copy: Path) -> bool:
    wanted = os.fsencode(copy) + b"/"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False

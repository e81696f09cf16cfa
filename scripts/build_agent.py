"""Builds the agent, its loader, the agent of pods (agent/pod/) and the first process of virtual machines
(agent/guest/). The one place that knows how: make, the wheel build and the tests all come here.

    build_agent.py dev       build/agent/k8e-agent           quick, static, for this machine, with its SHA-256 beside
                                                             it, k8e-agent-pod, k8e-loader.so and k8e-guest
    build_agent.py asan      build/agent/k8e-agent-asan      AddressSanitizer and UBSan, for the tests, and
                                                             k8e-agent-pod-asan
    build_agent.py release   build/release/k8e-agent-<arch>  both architectures, the same bytes wherever they are built,
                                                             k8e-agent-pod-<arch>, k8e-loader-<arch>.so and
                                                             k8e-guest-<arch>
    build_agent.py pin       release, then writes the hashes into src/k8e/link/binary.py

Only the standard library: the wheel build imports this file in an environment that has nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "agent"
BUILD = ROOT / "build"
PINS = ROOT / "src" / "k8e" / "link" / "binary.py"
PIN = re.compile(r'"(\w+)": "([0-9a-f]{64})"')
ARCHITECTURES = ("x86_64", "aarch64")
PREFIXES = ("", "pod_", "loader_", "guest_")  # of the keys of the pins

# One for all checkouts: each libc takes a core most of a minute.
ZIG_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k8e" / "zig"
ZIG = [sys.executable, "-m", "ziglang"]
ZIG_CC = [*ZIG, "cc"]
LANGUAGE = ["-std=c11"]
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wvla", "-Wstrict-prototypes", "-Wmissing-prototypes"]
# musl's ioctl takes an int, glibc's an unsigned long: no spelling of a request number pleases both.
WARNINGS += ["-Wno-sign-conversion"]
# Where we develop. A release is not stopped by a warning that only its compiler has.
PEDANTIC = ["-Werror"]
SMALL = ["-Os", "-static", "-s", "-ffunction-sections", "-fdata-sections"]
SMALL += ["-fno-asynchronous-unwind-tables", "-fno-unwind-tables"]  # no unwinding; clang wants both
SMALL_LINK = ["-Wl,--gc-sections", "-Wl,--build-id=none"]
DENSE = ["-Wl,-z,noseparate-code"]  # as zig's linker does it: no padding between code and constants
# No library of its own: it finds what it needs in the interpreter that it is loaded into.
LOADER = [
    "-Os",
    "-fPIC",
    "-ffunction-sections",
    "-fvisibility=hidden",
    "-fno-asynchronous-unwind-tables",
    "-fno-stack-protector",
]
LOADER_LINK = ["-shared", "-nostdlib", "-s", "-Wl,--gc-sections", "-Wl,--build-id=none", "-Wl,-soname,k8e-loader.so"]
SANITIZED = ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# The agent's own sources and those of agent/pod.
POD = ["-DK8E_POD"]
CRYPTO = ["-fstrip", "-fPIC", "-ffunction-sections", "-fno-unwind-tables"]
# zig cc turns UBSan traps on by itself. A release must not depend on the folder it was built in.
REPRODUCIBLE = ["-fno-sanitize=all", "-ffile-prefix-map=.=agent"]


class BuildFailed(Exception):
    pass


def find_sources(folder: Path) -> list[str]:
    sources = sorted(path.name for path in folder.glob("*.c"))
    if not sources:
        raise BuildFailed(f"no C sources in {folder}")
    return sources


def compile_agent(
    compiler: Sequence[str], flags: Sequence[str], folder: Path, target: Path, more: Sequence[str] = ()
) -> None:
    """Compiles from inside the source folder, so that no absolute name gets into the binary; replaces atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        command = [*compiler, *flags, "-o", str(partial), *find_sources(folder), *more]
        if subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL).returncode != 0:
            raise BuildFailed(f"compiling {target.name} failed")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def compile_crypto(folder: Path, target: Path, machine: str, mode: str) -> None:
    """The primitives of the pod's channel, out of Zig's library."""
    where = ["-target", f"{machine}-linux-musl", "-mcpu=baseline"]
    command = [*ZIG, "build-obj", "crypto.zig", *where, "-O", mode, *CRYPTO, f"-femit-bin={target}"]
    if subprocess.run(command, cwd=folder / "pod", stdin=subprocess.DEVNULL).returncode != 0:
        raise BuildFailed(f"compiling crypto.zig for {machine} failed")


def compile_pod(
    compiler: Sequence[str], flags: Sequence[str], folder: Path, target: Path, machine: str, mode: str = "ReleaseSmall"
) -> None:
    """The agent with the sources of agent/pod."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        crypto = Path(scratch, "crypto.o")
        compile_crypto(folder, crypto, machine, mode)
        sources = [f"pod/{name}" for name in find_sources(folder / "pod")]
        compile_agent(compiler, [*flags, *POD], folder, target, [*sources, str(crypto)])


def set_zig_cache() -> None:
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(ZIG_CACHE))
    os.environ.setdefault("ZIG_LOCAL_CACHE_DIR", os.environ["ZIG_GLOBAL_CACHE_DIR"])


def compile_loader(compiler: Sequence[str], flags: Sequence[str], folder: Path, target: Path) -> None:
    """Builds in two steps: without the libraries zig does not provide their headers either."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        objects = []
        for source in find_sources(folder):
            objects.append(str(Path(scratch, source).with_suffix(".o")))
            command = [*compiler, *flags, *LOADER, "-c", "-o", objects[-1], source]
            if subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL).returncode != 0:
                raise BuildFailed(f"compiling {source} for {target.name} failed")
        library = Path(scratch, target.name)
        if subprocess.run([*compiler, *LOADER_LINK, "-o", str(library), *objects]).returncode != 0:
            raise BuildFailed(f"linking {target.name} failed")
        library.replace(target)


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_kernel_headers() -> list[str]:
    """musl-gcc brings no <linux/...>: look in the system's headers, after musl's own."""
    triplet = subprocess.run(["gcc", "-print-multiarch"], capture_output=True, text=True, check=True).stdout.strip()
    return ["-idirafter", "/usr/include", "-idirafter", f"/usr/include/{triplet}"]


def build_dev(folder: Path, target: Path) -> None:
    compiler = os.environ.get("AGENT_CC") or next(filter(shutil.which, ("musl-gcc", "gcc")), None)
    if compiler is None:
        raise BuildFailed("no C compiler: run scripts/setup")
    if compiler == "gcc":
        print("no musl-gcc: linking glibc statically, the agent is some ten times larger", file=sys.stderr)
    flags = [*LANGUAGE, *WARNINGS, *PEDANTIC, *SMALL, *SMALL_LINK, *DENSE]
    if compiler == "musl-gcc":
        flags += find_kernel_headers()
    compile_agent([compiler], flags, folder, target)
    pod = target.with_name("k8e-agent-pod")
    set_zig_cache()
    compile_pod([compiler], flags, folder, pod, platform.machine())
    guest = target.with_name("k8e-guest")
    compile_agent([compiler], flags, folder / "guest", guest)
    library = target.with_name("k8e-loader.so")
    compile_loader(["gcc"], [*LANGUAGE, *WARNINGS, *PEDANTIC], folder / "park", library)
    # The host verifies these like a pin; it detects a broken or foreign file, not a user who may write here.
    for built in (target, pod, library, guest):
        built.with_name(built.name + ".sha256").write_text(hash_file(built) + "\n")


def build_asan(folder: Path, target: Path) -> None:
    flags = [*LANGUAGE, *WARNINGS, *PEDANTIC, *SANITIZED]
    compile_agent(["gcc"], flags, folder, target)
    set_zig_cache()
    pod = target.with_name("k8e-agent-pod-asan")
    compile_pod(["gcc"], flags, folder, pod, platform.machine(), "ReleaseSafe")


def build_release(folder: Path, target_folder: Path) -> dict[str, str]:
    """Both architectures; returns the SHA-256 of each file under its key in the pins."""
    set_zig_cache()
    targets = {name: target_folder / f"k8e-agent-{name}" for name in ARCHITECTURES}
    pods = {name: target_folder / f"k8e-agent-pod-{name}" for name in ARCHITECTURES}
    guests = {name: target_folder / f"k8e-guest-{name}" for name in ARCHITECTURES}
    libraries = {name: target_folder / f"k8e-loader-{name}.so" for name in ARCHITECTURES}
    library_flags = [*LANGUAGE, *WARNINGS, *REPRODUCIBLE]
    flags = [*LANGUAGE, *WARNINGS, *SMALL, *SMALL_LINK, *REPRODUCIBLE]
    # At once: the first time zig compiles a libc for each, which takes a core most of a minute.
    with ThreadPoolExecutor() as pool:
        builds = [
            pool.submit(compile_agent, [*ZIG_CC, "-target", f"{name}-linux-musl"], flags, source, built[name])
            for source, built in ((folder, targets), (folder / "guest", guests))
            for name in ARCHITECTURES
        ]
        builds += [
            pool.submit(compile_pod, [*ZIG_CC, "-target", f"{name}-linux-musl"], flags, folder, pod, name)
            for name, pod in pods.items()
        ]
        builds += [
            pool.submit(
                compile_loader, [*ZIG_CC, "-target", f"{name}-linux-gnu"], library_flags, folder / "park", library
            )
            for name, library in libraries.items()
        ]
    for build in builds:
        build.result()
    return {
        f"{prefix}{name}": hash_file(built[name])
        for prefix, built in zip(PREFIXES, (targets, pods, libraries, guests), strict=True)
        for name in ARCHITECTURES
    }


def read_pins(pins: Path = PINS) -> dict[str, str]:
    """From the text: the wheel build must not import the package it is building."""
    found = dict(PIN.findall(pins.read_text()))
    expected = [f"{prefix}{name}" for prefix in PREFIXES for name in ARCHITECTURES]
    if list(found) != expected:
        raise BuildFailed(f"{pins} pins {list(found)}, expected {expected}")
    return found


def write_pins(hashes: dict[str, str], pins: Path = PINS) -> None:
    text = pins.read_text()
    for key in read_pins(pins):
        text = re.sub(rf'"{key}": "[0-9a-f]{{64}}"', f'"{key}": "{hashes[key]}"', text)
    pins.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the agent.")
    parser.add_argument("what", choices=["dev", "asan", "release", "pin"])
    parser.add_argument("--sources", type=Path, default=SOURCES)
    parser.add_argument("--output", type=Path, help="file (dev, asan) or folder (release)")
    options = parser.parse_args()
    if options.what == "dev":
        build_dev(options.sources, options.output or BUILD / "agent" / "k8e-agent")
    elif options.what == "asan":
        build_asan(options.sources, options.output or BUILD / "agent" / "k8e-agent-asan")
    else:
        hashes = build_release(options.sources, options.output or BUILD / "release")
        if options.what == "pin":
            write_pins(hashes)
        for key, digest in hashes.items():
            print(f"{digest}  {key}")


if __name__ == "__main__":
    try:
        main()
    except BuildFailed as error:
        sys.exit(f"build_agent: {error}")

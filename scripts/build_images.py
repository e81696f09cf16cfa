"""Builds the two images of an installation on Kubernetes, without docker: OCI archives in FOLDER.

    build_images.py FOLDER      from the wheel in FOLDER: k8e-agent-VERSION.oci.tar and k8e-gateway-VERSION.oci.tar

The agent's image has the two programs that the wheel has, for both architectures, and nothing else. The gateway's has
Python from this machine's own distribution (mmdebstrap; no maintainer's script runs, no shell and no package tools
stay), the wheel and its locked dependencies, for this machine's architecture. It runs as a user of its own.

The same wheel, lock and packages of the distribution make the same bytes. Which packages they were stands in the
image's file /usr/share/k8e/packages.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from k8e.cluster.image import ARCHITECTURES, Image, make_archive, pack
from k8e.engine.local.images.base import choose_options, choose_sources, read_release

ROOT: Final = Path(__file__).resolve().parent.parent
PYTHON: Final = "/usr/bin/python3"  # the distribution's, on this machine and in the image
USER: Final = 10001
EPOCH: Final = "1700000000"  # no file is newer
TARGETS: Final = "$(ORIGIN)|$(CODENAME)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)|$(SOURCESENTRY)"
# What the packages that Python needs bring along for their own installation, and what nothing in the image reads.
LEFT_OUT: Final = re.compile(
    r"(dev|proc|sys|tmp|run|boot|home|media|mnt|opt|root|srv|var|etc/(apt|dpkg|cron|pam|debconf|perl|alternatives)[^/]*"
    r"|usr/share/(bash-completion|binfmts|bug|debconf|dpkg|gdb|info|keyrings|lintian|locale|man|menu|perl|perl5|pixmaps|applications|polkit-1|pam[^/]*)"
    r"|usr/share/doc/[^/]+/(?!copyright$).+"
    r"|(usr/)?(s?bin)/(?!python3|nft$).+"
    r"|usr/lib/(apt|dpkg|[^/]+/perl[^/]*)"
    r"|usr/lib/python3[^/]*/(idlelib|test|tkinter|turtledemo|ensurepip|lib2to3|pydoc_data))(/|$)"
)
START: Final = """\
#!/usr/bin/python3 -P
import sys
from k8e.cli import main
sys.exit(main())
"""
FILES: Final = {
    "etc/passwd": f"root:x:0:0:root:/:/usr/sbin/nologin\nk8e:x:{USER}:{USER}:k8e:/tmp:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\nk8e:x:{USER}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


class ImageFailed(Exception):
    pass


def say(text: str) -> None:
    print(f"images: {text}", file=sys.stderr, flush=True)


# The agent's ----------------------------------------------------------------------------------------------------------


def build_agent(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as content:
        images = []
        for machine in ARCHITECTURES:
            programs = {
                "k8e-agent-pod": content.read(f"k8e/_agent/k8e-agent-pod-{machine}"),
                "k8e-loader.so": content.read(f"k8e/_agent/k8e-loader-{machine}.so"),
            }
            layer = pack({path: (program, 0o755) for path, program in programs.items()}, {})
            images.append(Image(machine, [layer], ["/k8e-agent-pod"], env=(), user=f"{USER}:{USER}"))
    return make_archive(name, images, compress=True)


# The gateway's --------------------------------------------------------------------------------------------------------


def build_gateway(wheel: Path, name: str, version: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="k8e-images-", dir=ROOT / "build") as temporary:
        scratch = Path(temporary)
        say("Python, from the distribution's packages")
        distribution = fetch_distribution(scratch)
        say("the wheel and its dependencies")
        root = scratch / "root"
        install(wheel, root, scratch)
        compile_library(distribution, root, scratch)
        layers = [distribution, pack_folder(root)]
    image = Image(
        platform.machine(),
        layers,
        entrypoint=["/usr/local/bin/k8e"],
        command=["server", "--engine", "kubernetes"],
        env=("PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/tmp"),
        user=f"{USER}:{USER}",
        labels={"org.opencontainers.image.title": "k8e gateway", "org.opencontainers.image.version": version},
    )
    return make_archive(name, [image], compress=True)


def run(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise ImageFailed(f"{command[0]} failed: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def fetch_distribution(scratch: Path) -> bytes:
    """Returns the layer of Python and what it needs, out of the packages that this machine's own apt offers."""
    if shutil.which("mmdebstrap") is None:
        raise ImageFailed("mmdebstrap is missing: apt-get install mmdebstrap")
    release = read_release(Path("/etc/os-release").read_text())
    codename = release.get("VERSION_CODENAME", "")
    listing = run("apt-get", "indextargets", "--format", TARGETS, "Created-By: Packages")
    sources = choose_sources(listing, codename, lambda name: Path(name).read_text())
    if not sources:
        raise ImageFailed(f"apt knows no packages of {release.get('ID', '?')} {codename}: apt-get update")
    (scratch / "sources.list").write_text("".join(f"{source.line}\n" for source in sources))
    target = scratch / "distribution.tar"
    options = [f"--aptopt={option}" for option in choose_options(run("apt-config", "dump", "Acquire"))]
    # libstdc++6: of grpcio, whose wheel takes it for granted; nftables: of the helper of a node.
    run(
        *("mmdebstrap", f"--mode={'root' if os.geteuid() == 0 else 'unshare'}", "--variant=extract", "--format=tar"),
        *("--include=python3,libstdc++6,nftables", "--skip=output/dev", '--aptopt=APT::Sandbox::User "root"', *options),
        # What was downloaded, before it is unpacked: nothing is installed, so no database of packages has it.
        f'--extract-hook=cd "$1"/var/cache/apt/archives && ls *.deb > {scratch}/packages',
        *(codename, str(target), str(scratch / "sources.list")),
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8"},
    )
    return filter_layer(target, sorted((scratch / "packages").read_text().split()))


def filter_layer(archive: Path, packages: list[str]) -> bytes:
    result = io.BytesIO()
    with tarfile.open(archive) as source, tarfile.open(fileobj=result, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in source:
            member.name = member.name.removeprefix("./").strip("/")
            if not member.name or member.name == "." or LEFT_OUT.match(member.name):
                continue
            member.mode &= 0o755  # no set-uid bit, and nothing that others may write
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = int(EPOCH)
            member.pax_headers = {}
            if member.islnk():
                member.linkname = member.linkname.removeprefix("./")
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
        for folder in ("usr", "usr/share", "usr/share/k8e"):
            made = tarfile.TarInfo(folder)
            made.type, made.mode, made.mtime = tarfile.DIRTYPE, 0o755, int(EPOCH)
            target.addfile(made)
        content = "\n".join([*packages, ""]).encode()
        listing = tarfile.TarInfo("usr/share/k8e/packages")
        listing.size, listing.mtime = len(content), int(EPOCH)
        target.addfile(listing, io.BytesIO(content))
    return result.getvalue()


def install(wheel: Path, root: Path, scratch: Path) -> None:
    """The wheel and its dependencies, at the versions and hashes of the lock, where the distribution's Python looks."""
    minor = run(PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    packages = root / f"usr/local/lib/python{minor}/dist-packages"
    packages.mkdir(parents=True)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wanted = [
        f"k8e @ {wheel.as_uri()} --hash=sha256:{digest}\n",
        *choose_locked((ROOT / "requirements.lock").read_text()),
    ]
    (scratch / "wanted").write_text("".join(wanted))
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"),
        *("--require-hashes", "--no-deps", f"--requirement={scratch / 'wanted'}"),
        *("--only-binary=:all:", f"--python-version={minor}", "--implementation=cp", f"--target={packages}"),
    )
    shutil.rmtree(packages / "bin", ignore_errors=True)
    for record in packages.glob("k8e-*.dist-info/RECORD"):  # where the wheel lay on this machine is no part of it
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(line for line in lines if "direct_url.json" not in line))
        record.with_name("direct_url.json").unlink(missing_ok=True)
    compile_folder(packages, root)
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    start = root / "usr/local/bin/k8e"
    start.parent.mkdir(parents=True)
    start.write_text(START)
    start.chmod(0o755)


def choose_locked(lock: str) -> list[str]:
    """The lines of the lock about what k8e needs on Kubernetes; this environment, which has all of it, knows what that
    is."""
    needed: set[str] = set()
    waiting = [("k8e", frozenset({"", "kubernetes"}))]
    while waiting:
        name, extras = waiting.pop()
        for text in metadata.requires(name) or ():
            one = Requirement(text)
            applies = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
            if applies and (known := canonicalize_name(one.name)) not in needed:
                needed.add(known)
                waiting.append((known, frozenset({"", *one.extras})))
    blocks = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)
    chosen = [block for block in blocks if canonicalize_name(re.split(r"[=\[ ]", block, maxsplit=1)[0]) in needed]
    if len(chosen) < len(needed):
        raise ImageFailed("requirements.lock lacks something that k8e needs: make lock")
    return chosen


def compile_library(distribution: bytes, root: Path, scratch: Path) -> None:
    """The same for Python's own library, which a script of its package would have compiled."""
    library = scratch / "library"
    with tarfile.open(fileobj=io.BytesIO(distribution)) as layer:
        members = [each for each in layer if re.match(r"usr/lib/python3\.", each.name)]
        layer.extractall(library, members, filter="tar")
    compile_folder(library, library)
    for folder in library.rglob("__pycache__"):
        shutil.copytree(folder, root / folder.relative_to(library))


def compile_folder(folder: Path, root: Path) -> None:
    """The image's file system is read-only: what is not compiled now would be compiled at every start. The result names
    the source by its path below the root, and is valid whatever the source's time."""
    run(
        *(PYTHON, "-m", "compileall", "-q", "-s", str(root), "-p", "/", "--invalidation-mode", "unchecked-hash"),
        str(folder),
        env={**os.environ, "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": EPOCH},
    )


def pack_folder(root: Path) -> bytes:
    return pack(dict(list_files(root)), {})


def list_files(root: Path) -> Iterator[tuple[str, tuple[bytes, int]]]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(root)), (path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)


# ----------------------------------------------------------------------------------------------------------------------


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    wheels = sorted(folder.glob("k8e-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        say(f"no wheel in {folder}: make release")
        return 1
    wheel = wheels[-1]
    version = wheel.name.split("-")[1]
    try:
        for kind in ("agent", "gateway"):
            name = f"k8e.local/k8e-{kind}:{version}"
            archive = build_agent(wheel, name) if kind == "agent" else build_gateway(wheel, name, version)
            path = folder / f"k8e-{kind}-{version}.oci.tar"
            draft = path.with_name(f".{path.name}")
            draft.write_bytes(archive)
            draft.replace(path)
            print(f"{path} sha256:{hashlib.sha256(archive).hexdigest()} {len(archive) >> 10} KiB")
    except ImageFailed as failed:
        say(str(failed))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`k8e/base`: a Debian (or what this machine is) with the tools that agents use, out of the packages that the machine
itself is made of. It comes from the machine's own package sources, is checked with the machine's own keys, and needs
neither a registry nor docker; where the sources are a mirror on a disk it needs no network.

mmdebstrap makes it, in mount and process namespaces that are gone with it, and what it packs is unpacked as any layer
is. Maintainers' scripts run as root, as they did when this machine was installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from k8e.engine import EngineError
from k8e.engine.images import Image, Progress, Report
from k8e.engine.local.images import manifest as manifests
from k8e.engine.local.images.layers import unpack
from k8e.engine.local.images.limits import ImageLimits
from k8e.engine.local.images.store import Store
from k8e.engine.local.images.unfinished import Unfinished, go_on
from k8e.engine.local.system.tool import bound_to, find_tool, run_tool

PACKAGES: Final = (
    *("apt-utils", "bash", "ca-certificates", "curl", "file", "gcc", "git", "jq", "less", "libc6-dev", "make"),
    *("nodejs", "npm", "openssh-client", "patch", "procps", "python3", "python3-pip", "python3-venv"),
    *("ripgrep", "unzip", "wget", "xz-utils", "zip"),
)
_EPOCH: Final = "1700000000"  # no file is newer: the same packages make the same image
_DEADLINE: Final = 1800.0
_COLLECT: Final = 1.0  # seconds between two looks for packages that were downloaded
_LIST: Final = "$(ORIGIN)|$(CODENAME)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)|$(SOURCESENTRY)"
_STEP: Final = re.compile(r"I: ((?:running apt-get|downloading|extracting|installing|cleaning|creating) [^/]*?)\.*$")
_KEY: Final = re.compile(r"^(?:Signed-By:\s*|[^#\n]*\bsigned-by=)(/[^\s\],]+)", re.ASCII | re.MULTILINE | re.IGNORECASE)
_TRUSTED: Final = re.compile(r"^(?:Trusted:\s*|[^#\n]*\btrusted=)yes\b", re.ASCII | re.MULTILINE | re.IGNORECASE)
_SPACE: Final = 4 << 30  # bytes that have to be free before it begins
_WITHOUT: Final = ("doc", "info", "locale", "man", "lintian")  # of /usr/share
# Whatever was only for building, and whatever may be secret, does not stay: mmdebstrap copies the list of sources, and
# apt would find each of them twice.
_CLEAN: Final = (
    'rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap '
    '"$1"/etc/apt/sources.list.d/*building.list "$1"/etc/resolv.conf "$1"/etc/hostname && '
    'rm -rf "$1"/var/cache/debconf/*-old "$1"/var/log/*.log'
)
_ENV: Final = (
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("LANG", "C.UTF-8"),
)


@dataclass(frozen=True, slots=True)
class Source:
    uri: str
    suite: str
    component: str
    options: str = ""  # who vouches for it

    @property
    def line(self) -> str:
        """For building. Files of a disk are copied: within the new root they could not be seen."""
        uri = f"copy:{self.uri.removeprefix('file:')}" if self.uri.startswith("file:") else self.uri
        return f"deb {f'[{self.options}] ' if self.options else ''}{uri} {self.suite} {self.component}"

    @property
    def public(self) -> str:
        """Without what only this machine knows or has."""
        parts = urlsplit(self.uri)
        uri = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        return f"deb {uri} {self.suite} {self.component}"


def choose_sources(listing: str, codename: str, read: Callable[[str], str]) -> tuple[Source, ...]:
    """Of all that apt knows: the distribution itself, with its updates and fixes; no packages of others. `read` gives
    the text of one of apt's files, which has the key that the source is signed with."""
    found = []
    for line in listing.splitlines():
        origin, name, suite, component, uri, entry = line.split("|")
        if origin in ("Debian", "Ubuntu") and name.partition("-")[0] == codename and "backports" not in suite:
            text = read(entry.rpartition(":")[0])
            key, trusted = _KEY.search(text), _TRUSTED.search(text)
            options = [f"signed-by={key[1]}"] if key else ["trusted=yes"] if trusted else []
            found.append(Source(uri, suite, component, " ".join(options)))
    return tuple(dict.fromkeys(found))


def choose_options(dump: str) -> tuple[str, ...]:
    """How this machine's apt gets through to its sources: proxies, certificates, timeouts."""
    wanted = ("Acquire::http", "Acquire::https", "Acquire::Check-Valid-Until", "Acquire::Retries")
    return tuple(line for line in dump.splitlines() if line.startswith(wanted) and '""' not in line)


def read_release(text: str) -> Mapping[str, str]:
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value.strip("\"'") for name, equals, value in pairs if equals}


async def build_base(
    store: Store,
    limits: ImageLimits,
    report: Report,
    packages: Sequence[str] = PACKAGES,
    *,
    variant: str = "minbase",
    apt: Mapping[str, str] | None = None,
) -> Image:
    """For who has no minutes: fewer `packages`, and the variant `extract`, which has nothing else and starts nothing.
    `apt`: variables with which apt is asked, for another configuration than the machine's."""
    tool = find_tool("mmdebstrap")
    if tool is None:
        hint = "install mmdebstrap (Debian and Ubuntu: apt-get install mmdebstrap)"
        raise EngineError("image", "there is no mmdebstrap to build it with", hint)
    report(Progress("asking apt for its sources", 0, 0))
    release = read_release(await asyncio.to_thread(Path("/etc/os-release").read_text))
    codename = release.get("VERSION_CODENAME", "")
    listing = await run_tool(
        "apt-get", "indextargets", "--format", _LIST, "Created-By: Packages", capture=True, env=apt
    )
    sources = await asyncio.to_thread(choose_sources, listing, codename, lambda name: Path(name).read_text())
    if not sources:
        hint = "`apt-get update` first; the sources have to have the distribution that this machine is."
        raise EngineError("image", f"apt knows no packages of {release.get('ID', '?')} {codename}", hint)
    options = choose_options(await run_tool("apt-config", "dump", "Acquire", capture=True, env=apt))
    recipe = (variant, codename, options, packages, [source.line for source in sources])
    with store.scratch() as scratch, go_on(store.building, recipe, scratch) as unfinished:
        archive = unfinished.find_archive()
        if archive is None:
            _check_room(scratch)
            target = scratch / "base.tar"
            command = _describe(tool, variant, codename, options, packages, target, unfinished.hook)
            await _run(command, scratch, sources, report, unfinished)
            archive = unfinished.keep_archive(target)
        try:
            image = await _keep(store, limits, archive, report)
        except EngineError as error:
            if error.reason != "disk_full":
                unfinished.forget()  # it would fail again
            raise
        unfinished.forget()
        return image


def _check_room(scratch: Path) -> None:
    free = os.statvfs(scratch)
    if free.f_bavail * free.f_frsize < _SPACE:
        cause = f"there are less than {_SPACE >> 30} GiB free in {scratch.parent.parent}"
        raise EngineError("image", cause, "Make room: `k8e image prune`.", "disk_full")


def _describe(
    tool: str,
    variant: str,
    codename: str,
    options: Sequence[str],
    packages: Sequence[str],
    target: Path,
    packages_hook: str,
) -> list[str]:
    return [
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
        *(tool, "--mode=root", f"--variant={variant}", "--format=tar", "--skip=output/dev"),
        *((f"--include={','.join(packages)}",) if packages else ()),
        "--dpkgopt=force-unsafe-io",  # if the machine goes down, so does it
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _WITHOUT),
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        *(f"--aptopt={option}" for option in options),
        # The user _apt cannot walk into our directories: apt would say so, and go on as root all the same.
        '--aptopt=APT::Sandbox::User "root"',
        f"--setup-hook={packages_hook}",
        f"--customize-hook={_CLEAN}",
        f"--customize-hook=upload {target.with_name('sources.list')} /etc/apt/sources.list",
        *(codename, str(target), str(target.with_name("building.list"))),
    ]


async def _run(
    argv: Sequence[str], scratch: Path, sources: Sequence[Source], report: Report, unfinished: Unfinished
) -> None:
    (scratch / "building.list").write_text("".join(f"{source.line}\n" for source in sources))
    (scratch / "sources.list").write_text("".join(f"{source.public}\n" for source in sources))
    process = await asyncio.create_subprocess_exec(
        *bound_to(os.getpid(), argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LC_ALL": "C.UTF-8",
            "TMPDIR": str(scratch),
            "SOURCE_DATE_EPOCH": _EPOCH,
            "DEBIAN_FRONTEND": "noninteractive",
        },
        cwd="/",
        start_new_session=True,
    )
    assert process.stderr is not None
    words: list[str] = []
    collecting = asyncio.create_task(_collect(unfinished, scratch))
    try:
        async with asyncio.timeout(_DEADLINE):
            while line := await process.stderr.readline():
                text = line.decode(errors="replace").strip()
                if step := _STEP.match(text):
                    report(Progress(step[1], 0, 0))
                elif text and not text.startswith("I:"):
                    words = [*words[-20:], text]
            status = await process.wait()
    except (TimeoutError, ValueError) as error:
        raise EngineError("image", f"mmdebstrap did not come to an end: {type(error).__name__}") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        collecting.cancel()
        await asyncio.to_thread(unfinished.collect, scratch)
    if status != 0:
        causes = [line for line in words if line.startswith(("E:", "Err:"))] or words[-3:]
        hint = "Does `apt-get update` work? It uses the same sources."
        raise EngineError("image", f"mmdebstrap failed: {'; '.join(causes)[:1000]}", hint)


async def _collect(unfinished: Unfinished, scratch: Path) -> None:
    while True:
        await asyncio.sleep(_COLLECT)
        await asyncio.to_thread(unfinished.collect, scratch)


async def _keep(store: Store, limits: ImageLimits, archive: Path, report: Report) -> Image:
    from k8e.engine.local.images.puller import in_thread

    size = (await asyncio.to_thread(archive.stat)).st_size
    loop, stop = asyncio.get_running_loop(), threading.Event()
    made: list[Image] = []

    def tell(done: int) -> None:
        loop.call_soon_threadsafe(report, Progress("unpacking", done, size))

    def work() -> None:
        with archive.open("rb") as file, store.new_layer() as target:
            unpacked = unpack(file, size, target, limits, stop, tell)
            with store.wanting([unpacked.diff_id]):
                store.keep_layer(target, unpacked)
                config = write_configuration(unpacked.diff_id)
                digest, _ = manifests.write_manifest(config, [unpacked.diff_id])
                configuration = manifests.read_configuration(config, platform.machine(), limits)
                made.append(store.keep_image(digest, configuration))

    await in_thread(work, stop)
    return made[0]


def write_configuration(diff_id: str) -> bytes:
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    value = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": [f"{name}={text}" for name, text in _ENV], "Cmd": ["bash"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff_id}"]},
    }
    return json.dumps(value, sort_keys=True).encode()

"""`k8e/base` out of package sources: here those of a machine without a network, with a mirror on its disk."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from k8e.engine import EngineError
from k8e.engine.images import Progress
from k8e.engine.local.images import LocalImages, base
from k8e.engine.local.images.base import Source, build_base, choose_options, choose_sources, read_release
from k8e.engine.local.images.limits import USUAL
from k8e.engine.local.images.store import LOCK
from k8e.engine.local.system.tool import find_tool

CODENAME = read_release(Path("/etc/os-release").read_text()).get("VERSION_CODENAME", "")


@pytest.fixture(autouse=True)
def with_tools() -> None:
    if not all(find_tool(name) for name in ("mmdebstrap", "dpkg-deb", "apt-get")):
        pytest.skip("mmdebstrap or apt is not installed")


@pytest.fixture
def apt(tmp_path: Path) -> Mapping[str, str]:
    """A machine whose only source is a mirror on its disk, with one package."""
    package, mirror = tmp_path / "package", tmp_path / "mirror"
    (package / "DEBIAN").mkdir(parents=True)
    architecture = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, check=True, text=True)
    control = f"Package: k8e-demo\nVersion: 1\nArchitecture: {architecture.stdout.strip()}\n"
    control += "Maintainer: x <x@example.com>\nDescription: x\n"
    (package / "DEBIAN/control").write_text(control)
    (package / "usr/bin").mkdir(parents=True)
    (package / "usr/bin/demo").write_text("#!/bin/sh\necho demo\n")
    (package / "usr/bin/demo").chmod(0o755)
    pool = mirror / "pool"
    index = mirror / f"dists/{CODENAME}/main/binary-{architecture.stdout.strip()}"
    pool.mkdir(parents=True)
    index.mkdir(parents=True)
    deb = pool / "k8e-demo.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", package, deb], check=True, capture_output=True)
    content = deb.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    text = f"{control}Filename: pool/k8e-demo.deb\nSize: {len(content)}\nSHA256: {digest}\n".encode()
    lines = []
    for name, data in (("Packages", text), ("Packages.gz", gzip.compress(text))):
        (index / name).write_bytes(data)
        path = (index / name).relative_to(mirror / f"dists/{CODENAME}")
        lines.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {path}\n")
    release = f"Origin: Debian\nSuite: stable\nCodename: {CODENAME}\nComponents: main\n"
    release += f"Architectures: {architecture.stdout.strip()}\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n"
    (mirror / f"dists/{CODENAME}/Release").write_text(release + "".join(lines))
    folder = tmp_path / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb [trusted=yes] file://{mirror} {CODENAME} main\n")
    config = tmp_path / "apt.conf"
    config.write_text(
        f'Dir::Etc::sourcelist "{folder}/sources.list";\nDir::Etc::sourceparts "-";\nDir::Etc::parts "-";\n'
        f'Dir::State::lists "{folder}/lists";\nDir::Cache "{folder}/cache";\nAPT::Sandbox::User "root";\n'
    )
    environ = {"APT_CONFIG": str(config)}
    subprocess.run(["apt-get", "update", "-qq"], env={**os.environ, **environ}, check=True, capture_output=True)
    return environ


async def test_a_mirror_on_the_disk_is_enough_and_gives_the_same_twice(
    images: LocalImages, tmp_path: Path, apt: Mapping[str, str]
) -> None:
    heard: list[Progress] = []
    images.store.clean()

    async def make() -> str:
        image = await build_base(images.store, USUAL, heard.append, ("k8e-demo",), variant="extract", apt=apt)
        assert image.command == ("bash",)
        return image.digest

    first = await make()
    (top,) = images.store.layers_of(first)
    assert (top / "usr/bin/demo").read_text() == "#!/bin/sh\necho demo\n"
    steps = [progress.step for progress in heard]
    assert {"creating tarball", "unpacking"} <= set(steps)
    assert await make() == first
    assert list((tmp_path / "s/oci/work").iterdir()) == []


async def interrupt(images: LocalImages, apt: Mapping[str, str], step: str) -> None:
    """A build whose caller leaves at that step."""
    reached = asyncio.Event()

    def hear(progress: Progress) -> None:
        if progress.step.startswith(step):
            reached.set()

    making = asyncio.create_task(build_base(images.store, USUAL, hear, ("k8e-demo",), variant="extract", apt=apt))
    waiting = asyncio.create_task(reached.wait())
    await asyncio.wait({making, waiting}, return_when=asyncio.FIRST_COMPLETED)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await waiting


def list_unfinished(images: LocalImages) -> list[str]:
    return sorted(path.suffix for path in images.store.building.iterdir() if path.name != LOCK)


async def test_an_interrupted_build_goes_on_with_its_packages(
    images: LocalImages, tmp_path: Path, apt: Mapping[str, str]
) -> None:
    images.store.clean()
    await interrupt(images, apt, "extracting archives")
    assert list_unfinished(images) == [".deb"]
    (tmp_path / "mirror/pool/k8e-demo.deb").unlink()  # it cannot be had a second time
    image = await build_base(images.store, USUAL, print, ("k8e-demo",), variant="extract", apt=apt)
    (top,) = images.store.layers_of(image.digest)
    assert (top / "usr/bin/demo").exists()
    assert not list((top / "var/cache/apt/archives").glob("*.deb"))
    assert list_unfinished(images) == []


async def test_one_that_was_interrupted_at_the_end_has_only_the_end_to_do(
    images: LocalImages, apt: Mapping[str, str]
) -> None:
    images.store.clean()
    await interrupt(images, apt, "unpacking")
    assert ".tar" in list_unfinished(images)  # beside packages that were seen before they were used
    heard: list[Progress] = []
    await build_base(images.store, USUAL, heard.append, ("k8e-demo",), variant="extract", apt=apt)
    assert {progress.step for progress in heard} == {"asking apt for its sources", "unpacking"}
    assert list_unfinished(images) == []
    await interrupt(images, apt, "unpacking")
    assert images.store.retain(()) > 0
    assert list_unfinished(images) == [], "`k8e image prune` removes them"


async def test_the_image_s_own_apt_finds_each_source_once(
    images: LocalImages, tmp_path: Path, apt: Mapping[str, str]
) -> None:
    """And nothing that only this machine may know, such as a password: building needs it, and the image does not."""
    images.store.clean()
    image = await build_base(images.store, USUAL, print, (), variant="custom", apt=apt)
    (top,) = images.store.layers_of(image.digest)
    assert (top / "etc/apt/sources.list").read_text() == f"deb file://{tmp_path}/mirror/ {CODENAME} main\n"
    assert list((top / "etc/apt/sources.list.d").iterdir()) == []


async def test_apt_has_nothing_to_warn_of(
    images: LocalImages, tmp_path: Path, apt: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    images.store.clean()
    tool = tmp_path / "mmdebstrap"
    tool.write_text(f'#!/bin/bash\nexec {find_tool("mmdebstrap")} "$@" 2> >(tee {tmp_path}/said >&2)\n')
    tool.chmod(0o755)
    monkeypatch.setattr(base, "find_tool", lambda name: str(tool))
    await build_base(images.store, USUAL, print, ("k8e-demo",), variant="extract", apt=apt)
    said = [line for line in (tmp_path / "said").read_text().splitlines() if line.startswith(("I:", "W:"))]
    assert said
    # The variant of this test has no directories to mount anything at.
    assert [line for line in said if line.startswith("W:") and "skipping mounting" not in line] == []


async def test_what_apt_does_not_have_is_said(images: LocalImages, apt: Mapping[str, str]) -> None:
    images.store.clean()
    with pytest.raises(EngineError, match="no-such-package") as caught:
        await build_base(images.store, USUAL, print, ("no-such-package",), variant="extract", apt=apt)
    assert "apt-get update" in caught.value.hint


def test_which_sources_are_the_distributions() -> None:
    files = {
        "/a.sources": "Types: deb\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n",
        "/b.list": "# deb [signed-by=/commented] x\ndeb [arch=amd64 signed-by=/key.gpg] https://mirror.test x main\n",
        "/c.list": "deb [trusted=yes] file:/mirror x main\n",
        "/d.list": "deb http://plain.test x main\n",
    }
    listing = "\n".join(
        (
            "Debian|bookworm|bookworm|main|http://a.test/debian/|/a.sources:1",
            "Debian|bookworm|bookworm|main|http://a.test/debian/|/a.sources:1",
            "Debian|bookworm-security|bookworm-security|main|https://user:pw@mirror.test/d/|/b.list:2",
            "Debian|bookworm|bookworm|main|file:/mirror/|/c.list:1",
            "Debian|bookworm-updates|bookworm-updates|contrib|http://plain.test/|/d.list:1",
            "Debian Backports|bookworm-backports|bookworm-backports|main|http://a.test/|/a.sources:1",
            "Somebody|nodistro|nodistro|main|http://third.test/|/d.list:1",
            "Debian|trixie|trixie|main|http://a.test/|/a.sources:1",
        )
    )
    key = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg"
    found = choose_sources(listing, "bookworm", files.__getitem__)
    assert found == (
        Source("http://a.test/debian/", "bookworm", "main", key),
        Source("https://user:pw@mirror.test/d/", "bookworm-security", "main", "signed-by=/key.gpg"),
        Source("file:/mirror/", "bookworm", "main", "trusted=yes"),
        Source("http://plain.test/", "bookworm-updates", "contrib"),
    )
    assert found[1].line == "deb [signed-by=/key.gpg] https://user:pw@mirror.test/d/ bookworm-security main"
    assert found[1].public == "deb https://mirror.test/d/ bookworm-security main"


def test_proxies_are_the_machines() -> None:
    dump = 'Acquire "";\nAcquire::http "";\nAcquire::http::Proxy "http://p.test:3128";\nAcquire::Languages "none";\n'
    assert choose_options(dump) == ('Acquire::http::Proxy "http://p.test:3128";',)


@pytest.mark.skipif(not os.environ.get("K8E_SOAK"), reason="takes minutes and the network: make soak")
async def test_the_whole_base(images: LocalImages) -> None:
    image = await images.build_base(lambda _: None)
    (top,) = images.store.layers_of(image.digest)
    present = os.listdir(top / "usr/bin")
    for name in (
        "apt-extracttemplates",
        "bash",
        "python3",
        "pip3",
        "node",
        "npm",
        "git",
        "curl",
        "gcc",
        "make",
        "jq",
        "rg",
    ):
        assert name in present, name

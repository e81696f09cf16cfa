"""Behind a company's mirror: on a private address, with the company's own certificate, wanting no password. pip and npm
work out of the box, because the machine's are configured for it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import AsyncIterator, Iterator

import pytest

from k8e.engine import Runtime
from tests.egress.internet import Internet
from tests.egress.rig import Cell, Site
from tests.egress.zones import Zone
from tests.engine.tiny_images import add_image
from tests.engine.toolbox_image import pip_layer, toolbox_layer

pytestmark = pytest.mark.anyio

MIRROR = "mirror.corp.com"
ZONE: Zone = {
    MIRROR: {"A": ["10.66.0.80"]},
    "bad.corp.com": {"A": ["169.254.169.254", "127.0.0.1", "169.254.3.3"]},
    "other.corp.com": {"A": ["10.66.0.81"]},
}
SECRET = "s3cr3t-of-the-machine"


def make_wheel() -> bytes:
    files = {
        "k8e_sample.py": "WORD = 'from the mirror'\n",
        "k8e_sample-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: k8e-sample\nVersion: 1.0\n",
        "k8e_sample-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["k8e_sample-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return target.getvalue()


def make_tarball() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, text in {
            "package/package.json": json.dumps({"name": "k8e-sample", "version": "1.0.0", "main": "index.js"}),
            "package/index.js": "module.exports = 'from the mirror'\n",
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return target.getvalue()


@pytest.fixture(scope="module")
def mirror(internet: Internet) -> None:
    """The pages of a Python index and of an npm registry."""
    internet.put("/simple/k8e-sample/", b'<a href="k8e_sample-1.0-py3-none-any.whl">k8e_sample</a>', "text/html")
    internet.put("/simple/k8e-sample/k8e_sample-1.0-py3-none-any.whl", make_wheel(), "application/octet-stream")
    tarball = make_tarball()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    dist = {"tarball": f"https://{MIRROR}/npm/k8e-sample.tgz", "integrity": integrity}
    version = {"name": "k8e-sample", "version": "1.0.0", "main": "index.js", "dist": dist}
    packument = {"name": "k8e-sample", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    internet.put("/npm/k8e-sample", json.dumps(packument).encode(), "application/json")
    internet.put("/npm/k8e-sample.tgz", tarball, "application/octet-stream")


@pytest.fixture(scope="module", autouse=True)
def configured(internet: Internet) -> Iterator[None]:
    """The machine's pip and npm are, with a password that sandboxes must not learn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_INDEX_URL", f"https://someone:{SECRET}@{MIRROR}/simple/")
        patch.setenv("PIP_EXTRA_INDEX_URL", "https://bad.corp.com:8443/simple")
        patch.setenv("PIP_CERT", str(internet.authority))
        patch.setenv("npm_config_registry", f"https://someone:{SECRET}@{MIRROR}/npm/")
        patch.setenv("npm_config_cafile", str(internet.authority))
        yield


@pytest.fixture(scope="module")
async def cell(site: Site, mirror: None) -> AsyncIterator[Cell]:
    hosts = await site.engine.default_egress()
    assert {MIRROR, "bad.corp.com:8443", "github.com"} <= set(hosts.texts)
    async with site.cell(*hosts.texts, "other.corp.com") as cell:
        yield cell


async def test_pip_installs_from_the_mirror(cell: Cell) -> None:
    await cell.room.output("pip", "install", "--retries=0", "--no-deps", "k8e-sample")
    done = await cell.room.output("python3", "-c", "import k8e_sample; print(k8e_sample.WORD)")
    assert done == "from the mirror\n"


async def test_pip_of_an_image_installs_from_the_mirror_too(site: Site, mirror: None) -> None:
    """For its root and for its user, though its Python is one that the distribution does not want to be touched."""
    config = {"Env": ["PATH=/usr/bin"], "User": "worker" if site.runtime is Runtime.NATIVE else ""}
    layers = await asyncio.to_thread(lambda: (toolbox_layer(), pip_layer()))
    image = await add_image(site.engine, *layers, bare=True, **config)
    async with site.cell(MIRROR, image=image.digest) as cell:
        await cell.room.output("python3", "-m", "pip", "install", "--retries=0", "--no-deps", "k8e-sample")
        done = await cell.room.output("python3", "-c", "import k8e_sample; print(k8e_sample.WORD)")
        assert done == "from the mirror\n"


async def test_npm_installs_from_the_mirror(cell: Cell) -> None:
    await cell.room.output("npm", "install", "k8e-sample")
    done = await cell.room.output("node", "-e", "console.log(require('k8e-sample'))")
    assert done == "from the mirror\n"


async def test_other_names_do_not_lead_to_private_addresses(cell: Cell) -> None:
    """Nor does the mirror's to what no list opens."""
    assert await cell.reached(("tcp", MIRROR, 80)) == ["10.66.0.80"]
    got = await cell.attempt(("lookup", "other.corp.com"), ("lookup", "bad.corp.com"))
    assert [each[:5] for each in got] == ["!EAI_"] * 2
    got = await cell.attempt(("tcp", "10.66.0.81", 80), ("tcp", "10.66.0.80", 8080), ("tcp", "169.254.169.254", 8443))
    assert got == ["!ECONNREFUSED"] * 3


async def test_the_password_stays_outside(cell: Cell) -> None:
    done = await cell.room.run("grep", "-rslI", "-D", "skip", "-e", SECRET, "-e", "someone:", "/etc", "/home")
    assert done.stdout == b"", done
    shown = await cell.room.output("pip", "config", "list")
    assert f"https://{MIRROR}/simple/" in shown


async def test_a_new_daemon_knows_the_mirror_too(site: Site, cell: Cell) -> None:
    """Of a sandbox that another one made: its name may lead to a private address at once."""
    await site.engine.close()
    site.engine = site.make_engine()
    again = await site.enter(cell.room.name)
    assert await again.reached(("tcp", MIRROR, 80)) == ["10.66.0.80"]

"""agent-sandbox's own client (`k8s-agent-sandbox`, from the Python index, once, to build/) on a warm pool of ours: it
claims a pod, finds it ready and gives it back. What it wants of a pod beyond that, a server without authentication, our
agent does not offer (docs/kubernetes.md), and a gateway takes no notice of its claims."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from k8e.engine import Runtime
from k8e.engine.kubernetes import KubernetesEngine
from tests.kubernetes.engine.rig import ROOT, Site, new_name, open_engine, spec_of
from tests.kubernetes.engine.test_claims import eventually, fill, name_all, says_well

SPEC = spec_of(Runtime.NATIVE)
FOLDER = ROOT / "build" / "upstream-client"
PACKAGES = ("k8s-agent-sandbox[grpc]==1.0.8",)
PROGRAM = Path(__file__).with_name("upstream_client.py")


@pytest.fixture(scope="module")
def python() -> Path:
    interpreter, stamp = FOLDER / "bin" / "python", FOLDER / "packages"
    FOLDER.parent.mkdir(exist_ok=True)
    with open(FOLDER.parent / "upstream-client.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text().split() != [*PACKAGES]:
            run_uv("venv", "-q", "--clear", "--python", sys.executable, str(FOLDER))
            run_uv("pip", "install", "-q", "--python", str(interpreter), *PACKAGES)
            stamp.write_text("\n".join(PACKAGES))
    return interpreter


def run_uv(*words: str) -> None:
    done = subprocess.run([Path(sys.executable).with_name("uv"), *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
async def engine(site: Site) -> AsyncIterator[KubernetesEngine]:
    async with open_engine(site) as engine:
        yield engine
        await engine.keep_ready({})


async def read(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    assert process.stderr is not None
    line = await process.stdout.readline()
    assert line, (await process.stderr.read()).decode()
    told: dict[str, Any] = json.loads(line)
    return told


async def test_it_claims_a_pod_of_ours_and_gives_it_back(site: Site, engine: KubernetesEngine, python: Path) -> None:
    await fill(engine, SPEC, 2)
    (pool,) = await name_all(site, "sandboxwarmpools")
    warm = await name_all(site, "pods")
    process = await asyncio.create_subprocess_exec(
        *(str(python), str(PROGRAM), pool, site.kubectl.namespace),
        env={"PATH": os.environ["PATH"], "KUBECONFIG": str(site.cluster.place.kubeconfig)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        made = await read(process)
        assert made["pod"] in warm
        assert made["listed"] == [made["claim"]]
        assert made["status"][0] == "SandboxReady", made
        pod = await asyncio.to_thread(site.kubectl.get, f"pod/{made['pod']}")
        assert made["address"] == pod["status"]["podIP"]

        # Nothing listens where its two ways of running a command lead.
        assert await read(process) == {"legacy": "SandboxRequestError", "sandboxd": "RuntimeError"}

        # It is no sandbox of the gateway, and takes none from it.
        assert await engine.list() == []
        name = new_name()
        await engine.create(name, SPEC)
        assert await says_well(engine, name)
        assert await engine.find_address(name) != made["address"]
        await process.communicate(b"\n")
        assert process.returncode == 0
        assert await says_well(engine, name)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    async def is_gone() -> bool:
        return made["pod"] not in await name_all(site, "pods")

    await eventually(is_gone)

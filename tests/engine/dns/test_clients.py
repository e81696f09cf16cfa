"""Real clients and the answers: each C library's getaddrinfo, and programs with resolvers of their own.

They run with a resolv.conf of ours, which is mounted over the machine's in a namespace of their own."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k8e.engine.local.dns.resolv_conf import resolv_conf_for_sandbox
from tests.engine.dns.rig import Resolver, open_resolver
from tests.engine.dns.teacher import Teacher, open_teacher

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a resolv.conf and listens on port 53"),
]

SOURCE = Path(__file__).with_name("gai.c")
NODE = (
    "require('dns').{}('{}', {}(error, found) =>"
    " console.log(error ? error.code : [].concat(found).map(one => one.address || one).join('\\n')))"
)


@pytest.fixture(scope="module")
def musl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With the compiler that builds the agent. zig has musl too, but takes a minute to build it."""
    if shutil.which("musl-gcc") is None:
        pytest.skip("musl-gcc is not installed")
    program = tmp_path_factory.mktemp("musl") / "gai"
    subprocess.run(["musl-gcc", "-static", str(SOURCE), "-o", str(program)], check=True, capture_output=True)
    return str(program)


@pytest.fixture
async def teacher() -> AsyncIterator[Teacher]:
    async with open_teacher() as teacher:
        teacher.teach("both.example", "A", "8.8.4.1")
        teacher.teach("both.example", "AAAA", "2606:4700::1")
        teacher.teach("alias.example", "A", "8.8.4.2", aliases=["a.cdn.net", "b.cdn.net"])
        teacher.teach("half.example", "A", "10.0.0.1")
        teacher.teach("half.example", "AAAA", "2606:4700::2")
        teacher.teach("inward.example", "A", "127.0.0.1")
        yield teacher


@pytest.fixture
async def resolver(teacher: Teacher) -> AsyncIterator[Resolver]:
    async with open_resolver(teacher.server, port=53) as resolver:
        await resolver.serve("s1", "*.example")
        yield resolver


async def run(resolver: Resolver, tmp_path: Path, *argv: str) -> list[str]:
    own = tmp_path / "resolv.conf"
    own.write_text(resolv_conf_for_sandbox([resolver.addresses["s1"]]))
    script = 'mount --bind "$1" /etc/resolv.conf && shift && exec "$@"'
    process = await asyncio.create_subprocess_exec(
        "unshare", "--mount", "sh", "-c", script, "sh", str(own), *argv, stdout=asyncio.subprocess.PIPE
    )  # fmt: skip
    output, _ = await process.communicate()
    return sorted(output.decode().split())


PYTHON = (
    "import socket, sys\n"
    "try:\n"
    "    print(*{item[4][0] for item in socket.getaddrinfo(sys.argv[1], 443, type=socket.SOCK_STREAM)})\n"
    "except socket.gaierror as error:\n"
    "    print('again' if error.errno == socket.EAI_AGAIN else 'none')\n"
)


@pytest.mark.parametrize("library", ["glibc", "musl"])
async def test_getaddrinfo(
    resolver: Resolver, teacher: Teacher, tmp_path: Path, library: str, request: pytest.FixtureRequest
) -> None:
    client = [str(request.getfixturevalue("musl"))] if library == "musl" else [sys.executable, "-c", PYTHON]

    async def look_up(name: str) -> list[str]:
        return await run(resolver, tmp_path, *client, name)

    assert await look_up("both.example") == ["2606:4700::1", "8.8.4.1"]
    assert await look_up("alias.example") == ["8.8.4.2"]
    assert await look_up("half.example") == ["2606:4700::2"], "the private address took the public one along"
    assert await look_up("inward.example") == ["none"]
    asked = len(teacher.asked)
    before = len(resolver.refused)
    assert await look_up("evil.com") == ["none"], "refused for good, and not to be tried again"
    assert await look_up("single") == ["none"]
    assert len(teacher.asked) == asked
    # One question for each family and no more: no client tried again.
    assert resolver.refused[before:] == [
        ("s1", name, "name_not_listed") for name in ("evil.com", "single") for _ in "46"
    ]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_node_which_has_two_resolvers(resolver: Resolver, tmp_path: Path) -> None:
    async def look_up(function: str, name: str, options: str = "") -> list[str]:
        return await run(resolver, tmp_path, "node", "-e", NODE.format(function, name, options))

    assert await look_up("lookup", "both.example", "{all: true}, ") == ["2606:4700::1", "8.8.4.1"]
    assert await look_up("lookup", "evil.com") == ["ENOTFOUND"]
    assert await look_up("resolve4", "alias.example") == ["8.8.4.2"]
    assert await look_up("resolve4", "evil.com") == ["ENOTFOUND"]
    assert await look_up("resolve6", "half.example") == ["2606:4700::2"]

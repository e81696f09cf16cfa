"""An agent that may mount until there is somebody to be kept from it: in bare namespaces, where what it can do and what
it gave up is seen as the machine's kernel sees it."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator

import pytest

from devel.sandboxes import ASAN_AGENT, Variation
from k8e.link.errors import AgentError, Code
from k8e.link.model import ExecSpec
from tests.sandboxes import PATH, Linked, needs_root, open_sandbox

pytestmark = needs_root
ADMIN = 1 << 21
CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for call in (lambda: libc.mount(b"/tmp", b"/tmp", b"", 0x1000, None), lambda: libc.umount2(b"/tmp", 2)):
    ctypes.set_errno(0)
    print(call(), ctypes.get_errno(), end=" ")
"""


@pytest.fixture
async def linked() -> AsyncIterator[Linked]:
    """Sanitized, and with a mount to bind from: a tray, as in slots.py."""
    tray = ("--dir", "/run/tray", "--tmpfs", "/run/tray", "--dir", "/run/tray/0/kept", "--remount-ro", "/run/tray")
    variation = Variation(agent=ASAN_AGENT, bwrap=tray)  # in which it has all capabilities of root
    async with open_sandbox("bare", variation) as linked:
        yield linked


async def held(linked: Linked) -> dict[str, int]:
    status = (await linked.link.read_file(b"/proc/1/status")).decode()
    return {line.split()[0]: int(line.split()[1], 16) for line in status.splitlines() if line.startswith("Cap")}


async def denied(linked: Linked) -> None:
    with pytest.raises(AgentError) as raised:
        await linked.link.bind([(b"/tmp", b"/workspace")])
    assert (raised.value.code, raised.value.errno) == (Code.DENIED, errno.EPERM)
    with pytest.raises(AgentError) as raised:
        await linked.link.bind(last=b"/workspace")
    assert raised.value.code is Code.DENIED
    found = await held(linked)
    assert not any(found[name] & ADMIN for name in ("CapPrm:", "CapEff:", "CapBnd:"))


async def test_what_is_bound_is_there_and_read_only_where_it_should_be(linked: Linked) -> None:
    link = linked.link
    await link.bind([(b"/run/tray/0", b"/workspace"), (b"/workspace/kept", b"/workspace/kept")])
    with pytest.raises(AgentError) as raised:
        await link.write_file(b"/workspace/new", b"")
    assert raised.value.code is Code.READ_ONLY, "until all that is kept is in place"
    await link.bind(writable=[b"/workspace"], last=b"/run/tray")
    await link.write_file(b"/workspace/new", b"")
    for attempt in (
        link.write_file(b"/workspace/kept/file", b"x"),
        link.move(b"/workspace/kept", b"/workspace/x"),
        link.remove(b"/workspace/kept", recursive=True),
    ):
        with pytest.raises(AgentError) as raised:
            await attempt
        assert raised.value.code in (Code.READ_ONLY, Code.BUSY)
    with pytest.raises(AgentError) as raised:
        await link.stat(b"/run/tray")
    assert raised.value.code is Code.NOT_FOUND
    table = (await link.read_file(b"/proc/1/mountinfo")).decode()
    (options,) = [line.split()[5] for line in table.splitlines() if line.split()[4] == "/workspace/kept"]
    assert {"ro", "nosuid", "nodev"} <= set(options.split(","))
    assert "/run/tray" not in table
    await denied(linked)


async def test_the_first_command_ends_it_for_everybody(linked: Linked) -> None:
    assert (await held(linked))["CapEff:"] & ADMIN
    with pytest.raises(AgentError):  # nobody's first command has to work for that
        await linked.link.start(ExecSpec((b"/no/such/program",), env=(PATH,)))
    await denied(linked)
    for keep in (False, True):
        spec = ExecSpec((b"python3", b"-S", b"-c", CALLS.encode()), env=(PATH,), keep_capabilities=keep, stdin=False)
        assert (await linked.link.run(spec)).stdout == b"-1 1 -1 1 "


async def test_what_is_parked_before_cannot_either(linked: Linked) -> None:
    """A shell that plays the loader's part, with all that it may keep, and tries when it has its program."""
    script = f"printf P >&63; head -c1 <&63 >/dev/null; printf T >&63; exec 63>&-; exec python3 -S -c '{CALLS}'"
    parked = ExecSpec((b"bash", b"-c", script.encode()), env=(PATH,), keep_capabilities=True)
    await linked.link.park(parked, b"/usr/lib/none.so")
    await linked.link.bind([(b"/run/tray/0", b"/workspace")])  # the agent itself still can
    await linked.link.bind(last=b"/run/tray")
    process = await linked.link.start(ExecSpec(parked.argv, env=(PATH,), keep_capabilities=True, parked=True))
    assert process.handed_over
    assert (await process.stdout.read()) == b"-1 1 -1 1 "
    await process.wait()


async def test_what_cannot_be_bound_is_said(linked: Linked) -> None:
    for source, target, code in (
        (b"/run/tray/0", b"/no/such/target", Code.NOT_FOUND),
        (b"/run/tray/0", b"", Code.NOT_FOUND),
        (b"", b"/workspace", Code.INVALID),
        (b"/usr/bin/env", b"/workspace", Code.NOT_DIRECTORY),
        (b"/run/" + b"x" * 5000, b"/workspace", Code.NAME_TOO_LONG),
    ):
        with pytest.raises(AgentError) as raised:
            await linked.link.bind([(source, target)])
        assert raised.value.code is code, (source, target)
    await linked.link.bind([(b"/run/tray/0", b"/workspace")])


async def test_an_agent_that_never_could_says_so() -> None:
    async with open_sandbox("bare", Variation(bwrap=("--cap-drop", "CAP_SYS_ADMIN"))) as linked:
        with pytest.raises(AgentError) as raised:
            await linked.link.bind([(b"/tmp", b"/workspace")])
        assert raised.value.code is Code.DENIED

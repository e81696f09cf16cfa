"""Figures that a program shows with matplotlib come back as images, from parked interpreters too; and output that is
too much for a model is cut."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import tempfile
import time
from typing import Any

import pytest
from mcp import Client
from mcp_types import CallToolResult, ImageContent

from k8e.core.model import Chunk
from k8e.doors.mcp.resources import ALL, EACH, MOST, OutputRecorder, OutputResource, OutputResources
from k8e.doors.mcp.tools.figures import MAX_FIGURES, FigureNotices
from tests.cli.machine import DEADLINE, Machine
from tests.gateway.house import UnixConnection
from tests.mcp.agents import call, read, stdio_agent

pytestmark = pytest.mark.timeout(900)  # matplotlib is downloaded

NOTICE = b"k8e: figure saved as /tmp/k8e-figures/%s.png\n"
SHOW = """
import matplotlib.pyplot as plt
for number in range(2):
    plt.figure(figsize=(1, 1))
    plt.plot([1, 2, number])
    plt.show()
plt.show()
plt.savefig("after.png")
print(open("after.png", "rb").read(4)[1:])
"""
# The backend is chosen where the program chooses none, and leaves no trace in the module.
OWN = """
import sys
finders = len(sys.meta_path)
import json, matplotlib
loader = matplotlib.__loader__
print(finders - len(sys.meta_path), type(loader).__name__, matplotlib.__spec__.loader is loader)
matplotlib.use("agg")
import matplotlib.pyplot as plt
plt.figure()
print(matplotlib.get_backend().lower())
"""


def count_parked(machine: Machine) -> int:
    """Runs that a parked interpreter took."""
    with contextlib.closing(UnixConnection(str(machine.folder / "r" / "k8e.sock"))) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = re.search(r'^k8e_parked_total\{start="handed_over"\} (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 0


def images(result: CallToolResult) -> list[bytes]:
    return [base64.b64decode(block.data) for block in result.content if isinstance(block, ImageContent)]


@pytest.mark.usefixtures("index")
async def test_figures_that_are_shown_are_images(machine: Machine) -> None:
    async with stdio_agent(machine) as agent:
        made = await call(agent, "sandbox_create_session", runtime_class="native")
        session = {"session_id": made["session_id"]}
        # Without matplotlib nothing of it is loaded.
        code = "import sys; print([name for name in sys.modules if 'k8e' in name or 'matplotlib' in name])"
        assert (await run(agent, **session, language="python", code=code))["stdout"] == "[]\n"
        installed = await call(agent, "sandbox_pip_install", **session, packages=["matplotlib"])
        assert installed["exit_code"] == 0, installed
        # Until an interpreter took the program that was parked when matplotlib was there; one is parked in a pause.
        shown: list[bytes] = []
        before = count_parked(machine)
        deadline = time.monotonic() + 5 * DEADLINE
        while not shown or count_parked(machine) == before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.5)
            arguments = {**session, "language": "python", "code": SHOW, "timeout": 300}
            result = await agent.call_tool("sandbox_run", arguments)
            facts = read(result)
            assert (facts["exit_code"], facts["stdout"], facts["figures"]) == (0, "b'PNG'\n", 2), facts
            shown = images(result)
            assert shown[0].startswith(b"\x89PNG")
            assert shown[0] != shown[1]
        plain = await agent.call_tool(
            "sandbox_exec", {**session, "command": ["python3", "-c", SHOW, "x"], "timeout": 300}
        )
        assert images(plain) == shown
        own = await run(agent, **session, language="python", code=OWN, timeout=300)
        assert own["stdout"] == "1 SourceFileLoader True\nagg\n", own
        assert "figures" not in own


async def run(agent: Client, **arguments: Any) -> Any:
    return await call(agent, "sandbox_run", **arguments)


async def test_a_sandbox_that_names_figures_that_are_none_gains_nothing(machine: Machine) -> None:
    lines = "".join(f"echo '{(NOTICE % name).decode().strip()}'; " for name in (b"none", b"link", b"text", b"large"))
    make = (
        "mkdir -p /tmp/k8e-figures; cd /tmp/k8e-figures; ln -s /etc/passwd link.png; echo no > text.png; "
        "printf '\\211PNG\\r\\n\\032\\n' > large.png; truncate -s 3M large.png; mkfifo pipe.png; "
    )
    async with stdio_agent(machine) as agent:
        result = await agent.call_tool("sandbox_run", {"code": f"{make}{lines}echo '{(NOTICE % b'pipe').decode()}'"})
    facts = read(result)
    assert (facts["exit_code"], facts["figures"], facts["figures_left_out"]) == (0, 0, 5)
    assert images(result) == []


def test_notices_are_found_in_pieces_of_any_size() -> None:
    text = (
        b"before\n" + NOTICE % b"a1" + b"x" * 1000 + b"\n" + NOTICE % b"b2" + b"no " + NOTICE % b"c3" + NOTICE % b"../d"
    )
    for size in (1, 7, 100, len(text)):
        notices = FigureNotices()
        for start in range(0, len(text), size):
            notices.feed(Chunk(2, (text[start : start + size],)))
        assert notices.paths == ["/tmp/k8e-figures/a1.png", "/tmp/k8e-figures/b2.png"]
    assert MAX_FIGURES == 8


def test_a_program_that_prints_notices_without_end_takes_no_memory() -> None:
    notices = FigureNotices()
    for number in range(100):
        notices.feed(Chunk(1, (b"".join(NOTICE % b"%d-%d" % (number, each) for each in range(1000)),)))
    assert (len(notices.paths), notices.count) == (MAX_FIGURES, 100_000)
    assert notices.paths[-1] == "/tmp/k8e-figures/0-7.png"


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("character", ["a", "é", "€", "😀"])
def test_no_character_is_cut_in_two(character: str, shift: int) -> None:
    recorder = OutputRecorder(100)
    recorder.feed(b"." * shift + character.encode() * 1000)
    shown = recorder.show("stdout")
    assert list(shown) == ["stdout"]
    head, line, tail = shown["stdout"].split("\n")
    kept = len(head.encode()) + len(tail.encode())
    assert line == f"[{recorder.total - kept} of {recorder.total} bytes are left out here]"
    assert 100 - 6 <= kept <= 100
    assert set(head + tail) <= {".", character}
    recorder.drop()


def keep(outputs: OutputResources, sizes: list[int]) -> list[OutputResource]:
    kept = [OutputResource(tempfile.TemporaryFile(), size, size) for size in sizes]  # noqa: SIM115 - closed below
    for number, output in enumerate(kept):
        outputs.add(f"run-{number}", "stdout", output)
    return kept


@pytest.mark.parametrize("shared", [False, True])
def test_kept_outputs_are_few_and_have_few_bytes(*, shared: bool) -> None:
    """Each is an open file, however small."""
    outputs = OutputResources(shared=shared)
    kept = keep(outputs, [3] * (MOST + 10))
    assert [each.file.closed for each in kept] == [True] * 10 + [False] * MOST
    outputs.close()
    assert all(each.file.closed for each in kept)
    large = ALL // EACH
    kept = keep(outputs, [EACH] * large + [1])
    assert [each.file.closed for each in kept] == [True] + [False] * large
    outputs.close()

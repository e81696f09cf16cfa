"""The protocol is written down three times: its page, the agent's header, our modules. They say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from k8e.link import model
from k8e.link.codec import protocol, requests
from k8e.link.codec.frames import FrameType, GoodbyeReason
from k8e.link.errors import Code, Stage
from k8e.link.model import Scope

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agent-protocol.md").read_text()
HEADER = ROOT / "agent" / "wire.h"

LIMITS = ("MAX_DATA", "MAX_REQUEST", "MAX_CONTROL", "INPUT_WINDOW", "OUTPUT_WINDOW")
SIZES = ("MAGIC", "HEADER_SIZE", "NONCE_SIZE", "EXEC_FIXED", "FILE_FIXED", "PARK_FIXED", "MIN_WINDOW", "MAX_WINDOW")
EXEC_FLAGS = {
    "EXEC_PTY": requests.PTY,
    "EXEC_NO_STDIN": requests.NO_STDIN,
    "EXEC_DETACHED": requests.DETACHED,
    "EXEC_KEEP_CAPABILITIES": requests.KEEP_CAPABILITIES,
    "EXEC_PARKED": requests.PARKED,
}


def test_frame_types_are_those_of_the_page() -> None:
    written = {name: int(number) for number, name in re.findall(r"^\| (\d+) \| ([A-Z]+) \|", PAGE, re.MULTILINE)}
    assert written == {kind.name: kind.value for kind in FrameType}


def test_codes_are_those_of_the_page() -> None:
    table = PAGE[PAGE.index("## Codes") :]
    written = {name: int(number) for number, name in re.findall(r"\| (\d+) ([A-Z_]+) ", table)}
    assert written == {code.name: code.value for code in Code}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_those_of_the_page(name: str) -> None:
    found = re.search(rf"^\| `{name}` \| ([\d,]+) \|", PAGE, re.MULTILINE)
    assert found
    assert int(found[1].replace(",", "")) == getattr(protocol, name)


def test_the_rest_is_that_of_the_page() -> None:
    words = " ".join(PAGE.split())  # wherever its lines end
    assert f"`{protocol.MAGIC:#010x}`" in words
    assert f"{protocol.EXEC_FIXED} bytes are fixed" in words
    assert f"{protocol.FILE_FIXED} bytes are fixed" in words
    assert f"{protocol.PARK_FIXED} bytes are fixed" in words
    reasons = ", ".join(f"{reason.value} {reason.name.lower().replace('_', ' ')}" for reason in GoodbyeReason)
    assert reasons in words
    assert ", ".join(f"{stage.value} {stage.name.lower()}" for stage in Stage) in words
    assert f"is now {protocol.HIGHEST_GENERATION}" in words


def test_the_models_window_is_the_protocols() -> None:
    assert model.OUTPUT_WINDOW == protocol.OUTPUT_WINDOW


def constants_of_the_agent() -> dict[str, int]:
    """Every enum of wire.h, counted as C counts, and its numeric macros."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    found = {
        name: int(value.rstrip("u"), 0) for name, value in re.findall(r"#define (\w+) (0x[0-9a-f]+u?|\d+u?)\n", text)
    }
    for body in re.findall(r"enum \w*\s*\{(.*?)\}", text, flags=re.DOTALL):
        value = -1
        for item in filter(None, map(str.strip, body.split(","))):
            name, _, given = item.partition("=")
            value = int(given, 0) if given else value + 1
            found[name.strip()] = value
    return found


@pytest.mark.skipif(not HEADER.exists(), reason="no agent here")
def test_the_agent_says_the_same() -> None:
    agent = constants_of_the_agent()
    ours = {
        **{kind.name if kind is not FrameType.EOF else "EOF_": kind.value for kind in FrameType},
        **{code.name: code.value for code in Code},
        **{f"STAGE_{stage.name}": stage.value for stage in Stage},
        **{f"SCOPE_{scope.name}": scope.value for scope in Scope},
        **{reason.name: reason.value for reason in GoodbyeReason},
        **{name: getattr(protocol, name) for name in LIMITS},
        **{name: getattr(protocol, name) for name in SIZES},
        **EXEC_FLAGS,
        "GENERATION": protocol.HIGHEST_GENERATION,
        "OWN_ID": requests.OWN_ID,
        "KEEP_MODE": requests.KEEP_MODE,
        "EXITED": 1,
        "SIGNALLED": 2,
    }
    assert {name: agent.get(name) for name in ours} == ours

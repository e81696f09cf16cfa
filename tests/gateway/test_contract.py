"""The contract is kept: what clients rely on cannot change unnoticed, and nothing goes undocumented."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_proto
from tests.cli.machine import ROOT

PROTO = (ROOT / "proto" / "sandbox" / "v1" / "sandbox.proto").read_text()
EMPTY = "message DeleteApiKeyResponse"


def judge(folder: Path, text: str) -> list[str]:
    (folder / "changed.proto").write_text(text)
    file = check_proto.compile_file(folder, "changed.proto")
    recorded = set(check_proto.SURFACE.read_text().splitlines())
    return [*check_proto.find_faults(file), *check_proto.compare(recorded, set(check_proto.list_surface(file)))]


def test_as_it_is_there_is_nothing_to_say() -> None:
    assert check_proto.main([]) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("string session_id = 1;\n  // Where; relative", "string session_id = 9;\n  // Where; relative"),
        ("bytes stdout = 1;", "string stdout = 1;"),
        ("optional int32 exit_code = 3;", "int32 exit_code = 3;"),
        ("bytes stdout = 1;", "bytes output = 1;"),
        ("repeated string packages = 2;", "string packages = 2;"),
        ("map<string, string> env = 6;", "map<string, bytes> env = 6;"),
        ("STREAM_STDERR = 2", "STREAM_STDERR = 3"),
        ("returns (stream ExecFrame);\n  // As ExecStream", "returns (ExecFrame);\n  // As ExecStream"),
        ("rpc KillRun(KillRunRequest)", "rpc EndRun(KillRunRequest)"),
        ("message DeleteApiKeyResponse {}", "message DeletedApiKey {}"),
        ("  // The session that it ran in.\n", ""),
        ("double ttl = 10;", "double timeToLive = 10;"),
    ],
)
def test_what_would_break_a_client_is_found(tmp_path: Path, before: str, after: str) -> None:
    assert before in PROTO
    changed = PROTO.replace(before, after)
    if before.startswith("rpc KillRun"):
        changed = changed.replace("KillRunRequest", "EndRunRequest").replace("KillRunResponse", "EndRunResponse")
    if "DeletedApiKey" in after:
        changed = changed.replace("(DeleteApiKeyResponse)", "(DeletedApiKey)")
    assert judge(tmp_path, changed) != []


def test_what_is_added_breaks_no_client(tmp_path: Path) -> None:
    added = PROTO.replace(f"{EMPTY} {{}}", f"{EMPTY} {{\n  // More.\n  string more = 1;\n}}")
    assert judge(tmp_path, added) == []


def test_what_is_added_has_to_be_documented(tmp_path: Path) -> None:
    added = PROTO.replace(f"{EMPTY} {{}}", f"{EMPTY} {{\n  string more = 1;\n}}")
    assert judge(tmp_path, added) == ["DeleteApiKeyResponse.more: has no comment"]

"""`k8e sandbox cp`, `mkdir` and `rm`: with sandboxes and gateways that mean well and others."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from k8e.cli.client import SessionName
from k8e.cli.process import Failure
from k8e.cli.remote.trees import RemoteTrees
from k8e.cli.transfer.download import Download
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS
from tests.cli.machine import Machine


@pytest.fixture
def session(machine: Machine) -> Iterator[str]:
    name = machine.k8e("sandbox", "create").json["session_id"]
    yield name
    machine.k8e("sandbox", "destroy", name)


def inside(machine: Machine, session: str, script: str) -> str:
    done = machine.run(script, "--session-id", session)
    assert done.code == 0, done
    return str(done.json["stdout"])


def test_a_file_there_and_back(machine: Machine, session: str) -> None:
    content = os.urandom(3_000_000)
    source = machine.home / "a b\n.bin"
    source.write_bytes(content)
    source.chmod(0o755)
    there = machine.k8e("sandbox", "cp", str(source), f"{session}:copy")
    assert (there.code, there.json) == (0, {"ok": True, "bytes": len(content), "files": 1})
    assert inside(machine, session, "stat -c %a copy") == "755\n"
    back = machine.k8e("sandbox", "cp", f"{session}:copy", "back")
    assert (back.code, back.json) == (0, {"ok": True, "bytes": len(content), "files": 1})
    assert (machine.home / "back").read_bytes() == content
    assert stat.S_IMODE((machine.home / "back").stat().st_mode) == 0o755


def test_folders_keep_their_names_where_there_is_a_folder(machine: Machine, session: str) -> None:
    tree = machine.home / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    (tree / "deep" / os.fsdecode(b"\xff")).write_bytes(b"odd")
    (tree / "empty").write_bytes(b"")
    assert machine.k8e("sandbox", "mkdir", session, "there").json == {"ok": True, "path": "there"}
    for target in ("there", "new"):
        assert machine.k8e("sandbox", "cp", "tree", f"{session}:{target}").json == {"ok": True, "bytes": 3, "files": 2}
    assert inside(machine, session, "find there new -type d | sort").split() == [
        *("new", "new/deep", "new/deep/er", "there", "there/tree", "there/tree/deep", "there/tree/deep/er"),
    ]
    assert machine.k8e("sandbox", "cp", f"{session}:there/tree", ".").code == 0  # onto itself
    assert machine.k8e("sandbox", "cp", f"{session}:there", "fresh").code == 0
    assert (machine.home / "fresh" / "tree" / "deep" / os.fsdecode(b"\xff")).read_bytes() == b"odd"
    removed = machine.k8e("sandbox", "rm", session, "there")
    assert (removed.code, removed.json["code"]) == (1, "not_empty")
    assert machine.k8e("sandbox", "rm", session, "there", "-r").json == {"ok": True, "path": "there"}
    assert inside(machine, session, "ls") == "new\n"


def test_links_and_special_files_are_left_out_and_named(machine: Machine, session: str) -> None:
    inside(machine, session, "mkdir t; echo x > t/file; ln -s /etc/passwd t/link; mkfifo t/pipe")
    done = machine.k8e("sandbox", "cp", f"{session}:t", "t")
    assert (done.code, done.json["code"], done.json["ok"]) == (1, "entries_left_out", False)
    assert (done.json["files"], done.json["bytes"]) == (1, 2)
    assert sorted(one["path"] for one in done.json["left_out"]) == ["link", "pipe"]
    assert os.listdir(machine.home / "t") == ["file"]
    (machine.home / "t" / "link").symlink_to("/etc/passwd")
    done = machine.k8e("sandbox", "cp", "t", f"{session}:back")
    assert (done.code, done.json["code"], done.json["files"]) == (1, "entries_left_out", 1)
    assert inside(machine, session, "ls back") == "file\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["a", "b"], "usage"),
        (["x:a", "y:b"], "usage"),
        (["none", "SID:x"], "source_unreadable"),
        (["SID:none", "x"], "file_not_found"),
        (["SID:/etc/passwd", "no/such/folder/"], "destination_unusable"),
        (["none:x", "x"], "session_not_found"),
    ],
)
def test_mistakes_are_named(machine: Machine, session: str, words: list[str], code: str) -> None:
    done = machine.k8e("sandbox", "cp", *(word.replace("SID", session) for word in words))
    assert (done.code, done.json["code"]) == (1, code)
    assert done.json["hint"]


def test_a_sandbox_that_changes_while_it_is_read_writes_nothing_elsewhere(machine: Machine, session: str) -> None:
    """Directories become links and files and back again, all the time."""
    swap = (
        "cd /workspace; mkdir -p t/d; echo x > t/d/f; while :; do mv t/d t/e; ln -s /etc t/d; rm t/d; mv t/e t/d; done"
    )
    run = machine.run(swap, "--background", "--timeout", "5m", "--session-id", session).json["run_id"]
    outside = machine.home / "outside"
    outside.mkdir()
    (machine.home / "target").mkdir()
    (machine.home / "target" / "trap").symlink_to(outside)
    for number in range(5):
        done = machine.k8e("sandbox", "cp", f"{session}:t", f"target/{number}")
        assert done.code in (0, 1), done
        for found in (machine.home / "target").rglob("*"):
            assert found == machine.home / "target" / "trap" or not found.is_symlink()
    trapped = machine.k8e("sandbox", "cp", f"{session}:t", "target/trap/x")
    assert trapped.code in (0, 1)  # the user named the way through the link
    machine.k8e("sandbox", "kill", run)
    inside(machine, session, "rm -rf t; mkdir trap; echo x > trap/f")
    refused = machine.k8e("sandbox", "cp", f"{session}:", "target")
    assert (refused.code, refused.json["code"]) == (1, "destination_refused")
    assert not (outside / "f").exists()


class HostileGateway(grpc.GenericRpcHandler):
    """Answers GetTree with these entries, and every download with bytes."""

    def __init__(self, *entries: pb.FileInfo) -> None:
        self.entries = entries

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        answer = {"GetTree": self.get_tree, "DownloadFile": self.download}[name]
        method = METHODS[name]
        make = grpc.unary_stream_rpc_method_handler if name == "DownloadFile" else grpc.unary_unary_rpc_method_handler
        return make(answer, method.request.FromString, lambda message: message.SerializeToString())

    def get_tree(self, request: Any, context: Any) -> pb.GetTreeResponse:
        return pb.GetTreeResponse(top=pb.FileInfo(path="/evil", type="directory"), entries=self.entries)

    def download(self, request: Any, context: Any) -> Iterator[pb.DownloadFileResponse]:
        yield pb.DownloadFileResponse(content=b"evil")


class Client(RemoteTrees):
    def __init__(self, endpoint: str) -> None:
        self.place, self.endpoint = "there", endpoint
        self._channel = grpc.insecure_channel(endpoint)
        self._known = False


def file(path: str, **fields: Any) -> pb.FileInfo:
    return pb.FileInfo(**{"path": path, "type": "file", "size": 4, "permissions": 0o6777, **fields})


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ([file("../evil")], "name_refused"),
        ([file("/etc/evil")], "name_refused"),
        ([file("a/../../evil")], "name_refused"),
        ([file("x", path_bytes=b"../evil")], "name_refused"),
        ([file("", path_bytes=b"")], "name_refused"),
        ([file("a\0b")], "name_refused"),
        ([file("trap/evil")], "destination_refused"),
        ([file("trap", type="directory"), file("trap/evil")], "destination_refused"),
        ([file("a"), file("a/evil")], "destination_refused"),
        ([file("big", size=-(1 << 62))], "file_grows"),
    ],
)
def test_a_hostile_gateway_writes_nothing_elsewhere(tmp_path: Path, entries: list[pb.FileInfo], code: str) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / "trap").symlink_to(outside)
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[HostileGateway(*entries, file("last"))])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        client = Client(f"127.0.0.1:{port}")
        try:
            with pytest.raises(Failure) as caught:
                Download(client, SessionName("s"), ".").copy(str(target))
        finally:
            client._channel.close()
            server.stop(None).wait()
    assert caught.value.code == code
    assert sorted(tmp_path.iterdir()) == [outside, target]
    assert list(outside.iterdir()) == []
    assert all(path.name in ("trap", "a") for path in target.iterdir())
    assert not any(path.stat().st_mode & 0o7000 for path in target.rglob("*") if path.is_file())


def test_what_is_copied_has_no_power_of_its_own(machine: Machine, session: str) -> None:
    inside(machine, session, "echo x > f; chmod 6777 f")
    assert machine.k8e("sandbox", "cp", f"{session}:f", "f").code == 0
    assert (machine.home / "f").stat().st_mode & 0o7000 == 0


def test_a_list_shows_what_lies_beside_a_directory_that_is_too_deep(machine: Machine, session: str) -> None:
    inside(machine, session, "for i in $(seq 200); do mkdir d && cd d; done; cd /workspace; echo x > z")
    done = machine.k8e("sandbox", "list", session)
    assert done.code == 0, done
    found = {one["path"]: one for one in done.json["files"]}
    assert found["/workspace/z"]["type"] == "file"
    assert [path for path, one in found.items() if one.get("unreadable")] == ["/workspace/" + "/".join(["d"] * 128)]
    inside(machine, session, "rm -r d")

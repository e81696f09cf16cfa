"""Files between this machine and a sandbox: from paths, file objects and folders, in parts, in time, and in little
memory. TypeScript's are in sdk/typescript/test/files.test.ts."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from sandbox_client import (
    AsyncSandboxClient,
    DeadlineExceeded,
    Failed,
    InvalidArgument,
    NotFound,
    SandboxClient,
)
from sandbox_client._local_files import TargetFolder
from tests.cli.machine import Machine, wait_until
from tests.cli.test_silence import is_stopped
from tests.sdk.conftest import TYPESCRIPT

MIB = 1 << 20
SIZE = 192 * MIB


def make_tree(top: Path) -> None:
    (top / "deep" / "er").mkdir(parents=True)
    (top / "empty").mkdir()
    (top / "a").write_bytes(b"a")
    (top / "a").chmod(0o755)
    (top / "deep" / "er" / "b c").write_bytes(b"b" * (5 * MIB))
    (top / os.fsdecode(b"\xff")).write_bytes(b"no text")
    (top / "link").symlink_to("/etc/passwd")
    os.mkfifo(top / "fifo")


def test_a_folder_goes_in_and_comes_out_without_its_links(client: SandboxClient, session: str, tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    sent = client.upload(session, tmp_path / "in", "copies")
    assert (sent.bytes, sent.files) == (8 + 5 * MIB, 3)
    assert sent.skipped == (str(tmp_path / "in" / "fifo"), str(tmp_path / "in" / "link"))
    listed = client.exec(session, "cd copies; ls -F | LC_ALL=C sort; ln -s /etc/passwd outside; mkfifo pipe")
    assert listed.raw_stdout == b"a*\ndeep/\nempty/\n\xff\n"
    got = client.download(session, "copies", tmp_path / "out")
    assert (got.bytes, got.files) == (8 + 5 * MIB, 3)
    assert sorted(got.skipped) == ["outside", "pipe"]
    assert (tmp_path / "out" / "deep" / "er" / "b c").read_bytes() == b"b" * (5 * MIB)
    assert (tmp_path / "out" / os.fsdecode(b"\xff")).read_bytes() == b"no text"
    assert (tmp_path / "out" / "empty").is_dir()
    assert [os.access(tmp_path / "out" / name, os.X_OK) for name in ("a", "deep/er/b c")] == [True, False]
    assert not (tmp_path / "out" / "outside").exists()


def test_a_file_goes_in_and_comes_out_by_path_and_by_file_object(
    client: SandboxClient, session: str, tmp_path: Path
) -> None:
    content = os.urandom(3 * MIB + 1)
    (tmp_path / "source").write_bytes(content)
    assert client.upload(session, tmp_path / "source", "new/file").bytes == len(content)
    assert client.download(session, "new/file", tmp_path / "made" / "target").bytes == len(content)
    assert (tmp_path / "made" / "target").read_bytes() == content
    with open(tmp_path / "source", "rb") as file:
        file.seek(MIB)
        assert client.upload(session, file, "rest").bytes == len(content) - MIB
    target = io.BytesIO()
    assert client.download(session, "rest", target).bytes == len(content) - MIB
    assert target.getvalue() == content[MIB:]


def test_an_empty_folder_is_a_folder(client: SandboxClient, session: str, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert client.upload(session, tmp_path / "none", "none").files == 0
    assert client.download(session, "/workspace/none", tmp_path / "made").files == 0
    assert (tmp_path / "made").is_dir()


async def test_the_awaited_client_copies_the_same(machine: Machine, session: str, tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    async with AsyncSandboxClient() as mine:
        assert (await mine.upload(session, tmp_path / "in", "/tmp/awaited")).files == 3
        assert (await mine.download(session, "/tmp/awaited/", tmp_path / "out")).bytes == 8 + 5 * MIB
        assert await mine.read_bytes(session, "/tmp/awaited/a", offset=1) == b""


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [(0, 4, b"0123"), (4, None, b"456789"), (8, 100, b"89"), (10, None, b""), (99, 1, b""), (3, 0, b"")],
)
def test_a_part_of_a_file(
    client: SandboxClient, session: str, offset: int, length: int | None, expected: bytes
) -> None:
    client.write_file(session, "ten", "0123456789")
    assert client.read_bytes(session, "ten", offset=offset, length=length) == expected


def test_a_part_of_a_file_that_is_not_there_or_cannot_be(client: SandboxClient, session: str) -> None:
    with pytest.raises(NotFound):
        client.read_bytes(session, "nothing", length=0)
    with pytest.raises(InvalidArgument, match="offset"):
        client.read_bytes(session, "ten", offset=-1)


class Broken(io.RawIOBase):
    """A file that breaks in its middle."""

    def __init__(self) -> None:
        self.pieces = 3

    def read(self, size: int = -1) -> bytes:
        self.pieces -= 1
        if not self.pieces:
            raise OSError("the disk is gone")
        return b"x" * size


@pytest.mark.parametrize("source", [Broken(), io.StringIO("text")], ids=["breaks", "is text"])
def test_of_a_source_that_cannot_be_read_no_part_becomes_a_file(
    client: SandboxClient, session: str, source: IO[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((OSError, TypeError), match=r"the disk is gone|binary mode"):
        client.upload(session, source, "part")
    with pytest.raises(NotFound):
        client.read_bytes(session, "part")
    assert capfd.readouterr().err == ""


def test_uploads_that_break_off_again_and_again_leave_nothing(client: SandboxClient, session: str) -> None:
    """Whichever comes first at the daemon: the end of the stream or the end of the call."""
    for number in range(40):
        source: IO[bytes] = Broken()  # type: ignore[assignment]
        with pytest.raises(OSError, match="the disk is gone"):
            client.upload(session, source, f"part-{number}")
    assert not [each for each in client.list_files(session) if "part-" in each.path]


async def test_so_it_does_for_the_awaited_client(machine: Machine, session: str) -> None:
    async with AsyncSandboxClient() as mine:
        source: IO[bytes] = Broken()  # type: ignore[assignment]
        with pytest.raises(OSError, match="the disk is gone"):
            await mine.upload(session, source, "part")
        with pytest.raises(NotFound):
            await mine.read_bytes(session, "part")


def test_file_calls_have_deadlines(machine: Machine, client: SandboxClient, session: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    os.kill(machine.daemon_pid, signal.SIGSTOP)
    try:
        wait_until(lambda: is_stopped(machine.daemon_pid))
        for call in (
            lambda: client.read_bytes(session, "ten", timeout=0.2),
            lambda: client.write_file(session, "ten", "x", timeout=0.2),
            lambda: client.list_files(session, timeout=0.2),
            lambda: client.upload(session, tmp_path, "folder", timeout=0.2),
            lambda: client.download(session, "ten", tmp_path / "g", timeout=0.2),
        ):
            with pytest.raises(DeadlineExceeded):
                call()
    finally:
        os.kill(machine.daemon_pid, signal.SIGCONT)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    with pytest.raises(DeadlineExceeded, match="longer timeout"):
        client.read_bytes(session, "ten", timeout=0)
    with pytest.raises(InvalidArgument, match="timeout"):
        client.read_bytes(session, "ten", timeout=float("nan"))


def test_a_path_in_place_of_a_time_is_explained(client: SandboxClient, session: str) -> None:
    with pytest.raises(InvalidArgument, match=r"list_files\(session_id, path='/tmp'\)"):
        client.list_files(session, "/tmp")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [b"../out", b"a/../../out", b"/etc/x", b"", b".", b"a//b", b"x\0y"])
def test_names_of_a_hostile_sandbox_do_not_leave_the_folder(tmp_path: Path, name: bytes) -> None:
    folder = TargetFolder(tmp_path / "in")
    with pytest.raises(Failed, match="is no name"), folder.replace(name):
        pytest.fail("it was opened")
    with pytest.raises(Failed, match="is no name"):
        folder.make(name)
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


def test_links_of_this_machine_are_not_followed_and_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "secret").write_bytes(b"kept")
    folder = TargetFolder(tmp_path / "in")
    (tmp_path / "in" / "way").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "file").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError), folder.replace(b"way/x"):  # noqa: PT011 - ELOOP or ENOTDIR
        pytest.fail("it was opened")
    with folder.replace(b"file") as file:
        file.write(b"new")
    assert (tmp_path / "secret").read_bytes() == b"kept"
    assert (tmp_path / "in" / "file").read_bytes() == b"new"
    assert list((tmp_path / "elsewhere").iterdir()) == []


PROGRAM = """
import sys
from sandbox_client import SandboxClient
sid, source, target = sys.argv[1:]

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

with SandboxClient() as client:
    client.write_file(sid, "warm", b"x" * (8 << 20))
    client.read_bytes(sid, "warm")
    before = peak()
    assert client.upload(sid, source, "big").bytes == client.download(sid, "big", target).bytes
    print(peak() - before)
"""


NODE_PROGRAM = """
import { readFileSync } from "node:fs";
import { SandboxClient } from "k8e-sandbox-client";
const [sid, source, target] = process.argv.slice(1);
const peak = () => Number(/VmHWM:\\s+(\\d+)/.exec(readFileSync("/proc/self/status", "utf8"))[1]) * 1024;
const client = new SandboxClient();
await client.writeFile(sid, "warm", Buffer.alloc(8 << 20));
await client.readBytes(sid, "warm");
const before = peak();
const sent = await client.upload(sid, source, "big");
const got = await client.download(sid, "big", target);
if (sent.bytes !== got.bytes) throw new Error("not the same");
console.log(peak() - before);
await client.close();
"""


def find_peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("language", ["python", "typescript"])
def test_a_large_file_takes_little_memory_of_client_and_daemon(
    machine: Machine,
    client: SandboxClient,
    session: str,
    tmp_path: Path,
    language: str,
    request: pytest.FixtureRequest,
) -> None:
    """Both once took more than half of it."""
    source, target = tmp_path / "source", tmp_path / "target"
    with open(source, "wb") as file:
        file.truncate(SIZE)
    if language == "python":
        command = [sys.executable, "-c", PROGRAM]
    elif shutil.which("npm") is None:
        pytest.skip("no npm here")
    else:
        request.getfixturevalue("built")
        (tmp_path / "node_modules").mkdir()
        (tmp_path / "node_modules" / "k8e-sandbox-client").symlink_to(TYPESCRIPT)
        command = ["node", "--input-type=module", "-e", NODE_PROGRAM]
    Path(f"/proc/{machine.daemon_pid}/clear_refs").write_text("5")  # its peak is what it has now
    before = find_peak(machine.daemon_pid)
    env = {**os.environ, "PYTHONPATH": str(TYPESCRIPT.parent / "python")}
    words = [*command, session, str(source), str(target)]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    client.exec(session, "rm big")
    daemon = find_peak(machine.daemon_pid) - before
    assert target.stat().st_size == SIZE
    assert (int(done.stdout) < SIZE / 2, daemon < SIZE / 2) == (True, True), (done.stdout, daemon)
    target.unlink()

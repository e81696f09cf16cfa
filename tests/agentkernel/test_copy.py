"""`agentkernel cp`, with sandboxes that mean well and others."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.cli.process import Failure
from k8e.cli.transfer.destination import Destination, split_name
from tests.agentkernel.machine import Kernel


@pytest.fixture
def box(kernel: Kernel) -> Iterator[str]:
    kernel.k8e("sandbox", "create", "--session-id", "copies")
    yield "copies"
    kernel.k8e("sandbox", "destroy", "copies")


def inside(kernel: Kernel, name: str, script: str) -> bytes:
    done = kernel.call("exec", name, "bash", "-c", script)
    assert done.code == 0, done
    return done.stdout


def read_tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (stat.S_IMODE(path.stat().st_mode), path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


class TestFiles:
    def test_there_and_back(self, kernel: Kernel, box: str) -> None:
        content = os.urandom(3_000_000)
        source = kernel.home / "a b\n.bin"
        source.write_bytes(content)
        source.chmod(0o755)
        assert kernel.call("cp", str(source), f"{box}:copy").code == 0
        assert inside(kernel, box, "stat -c %a copy; wc -c < copy") == b"755\n3000000\n"
        assert kernel.call("cp", f"{box}:copy", "back").code == 0
        assert (kernel.home / "back").read_bytes() == content
        assert stat.S_IMODE((kernel.home / "back").stat().st_mode) == 0o755

    def test_into_a_folder_it_keeps_its_name(self, kernel: Kernel, box: str) -> None:
        (kernel.home / "file").write_text("x")
        inside(kernel, box, "mkdir there")
        for target in ("there", "new/", "/tmp"):
            assert kernel.call("cp", "file", f"{box}:{target}").code == 0
        assert inside(kernel, box, "cat there/file new/file /tmp/file") == b"xxx"
        (kernel.home / "here").mkdir()
        assert kernel.call("cp", f"{box}:there/file", "here").code == 0
        assert (kernel.home / "here" / "file").read_text() == "x"

    def test_larger_than_a_message(self, kernel: Kernel, box: str) -> None:
        inside(kernel, box, "head -c 80000000 /dev/zero > large")
        assert kernel.call("cp", f"{box}:large", "large").code == 0
        assert (kernel.home / "large").stat().st_size == 80_000_000
        assert kernel.call("cp", "large", f"{box}:again").code == 0
        assert inside(kernel, box, "cmp large again; wc -c < again") == b"80000000\n"

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (("nowhere", "copies:x"), b"source_unreadable"),
            (("copies:nowhere", "x"), b"file_not_found"),
            (("a", "b"), b"usage"),
            (("copies:a", "copies:b"), b"usage"),
            (("copies:a",), b"usage"),
            (("other:a", "b"), b"session_not_found"),
            (("copies:/etc/passwd", "no/such/folder"), b"destination_unusable"),
        ],
    )
    def test_what_cannot_be(self, kernel: Kernel, box: str, words: tuple[str, ...], code: bytes) -> None:
        done = kernel.call("cp", *words)
        assert (done.code, b"[" + code + b"]" in done.stderr) == (1, True), done
        assert os.listdir(kernel.home) == []


class TestFolders:
    def test_there_and_back(self, kernel: Kernel, box: str) -> None:
        tree = kernel.home / "tree"
        (tree / "sub" / "empty").mkdir(parents=True)
        (tree / "sub" / "run").write_text("#!/bin/sh\n")
        (tree / "sub" / "run").chmod(0o755)
        (tree / os.fsdecode(b"odd\xff")).write_bytes(b"\0\xff")
        assert kernel.call("cp", "tree", f"{box}:copy").code == 0
        assert inside(kernel, box, "cd copy && find . | sort") == b".\n./odd\xff\n./sub\n./sub/empty\n./sub/run\n"
        assert kernel.call("cp", f"{box}:copy", "back").code == 0
        assert read_tree(kernel.home / "back") == read_tree(tree)
        assert (kernel.home / "back" / "sub" / "empty").is_dir()
        # Into what is there already, under its own name; and only what is in it.
        assert kernel.call("cp", f"{box}:copy", "back").code == 0
        assert read_tree(kernel.home / "back" / "copy") == read_tree(tree)
        (kernel.home / "into").mkdir()
        assert kernel.call("cp", f"{box}:.", "into").code == 0
        assert read_tree(kernel.home / "into" / "copy") == read_tree(tree)

    def test_links_of_ours_are_not_followed(self, kernel: Kernel, box: str) -> None:
        (kernel.home / "tree").mkdir()
        (kernel.home / "tree" / "link").symlink_to("/etc/shadow")
        os.mkfifo(kernel.home / "tree" / "pipe")
        done = kernel.call("cp", "tree", f"{box}:copy")
        assert (done.code, done.stderr.count(b"left out")) == (1, 2)
        assert inside(kernel, box, "ls -A copy") == b""

    def test_a_link_swapped_in_meanwhile_is_not_followed(self, kernel: Kernel, box: str) -> None:
        """As a sandbox can that has the same folder: here one that does nothing else."""
        tree, outside, spare = kernel.home / "tree", kernel.home / "outside", kernel.home / "spare"
        for folder in (tree / "d", outside):
            folder.mkdir(parents=True)
        for number in range(20):
            (tree / f"a{number}").mkdir()
        (outside / "x").write_text("secret-of-the-machine")
        (tree / "d" / "x").write_text("plain")
        over = threading.Event()

        def swap() -> None:
            while not over.is_set():
                os.rename(tree / "d", spare)
                os.symlink(outside, tree / "d")
                os.unlink(tree / "d")
                os.rename(spare, tree / "d")

        swapping = threading.Thread(target=swap)
        swapping.start()
        try:
            for number in range(4):
                kernel.call("cp", "tree", f"{box}:copy{number}")
        finally:
            over.set()
            swapping.join()
        assert inside(kernel, box, "cat /workspace/copy*/d/x 2> /dev/null || true").replace(b"plain", b"") == b""
        assert kernel.call("cp", "tree", f"{box}:last").code == 0
        assert inside(kernel, box, "cat last/d/x") == b"plain"


class TestHostile:
    def test_links_and_special_files_are_left_out(self, kernel: Kernel, box: str) -> None:
        script = "mkdir t; cd t; ln -s /etc/passwd file; ln -s / dir; mkfifo pipe; echo real > real; ln real hard"
        inside(kernel, box, script)
        done = kernel.call("cp", f"{box}:t", "back")
        assert (done.code, sorted(os.listdir(kernel.home / "back"))) == (1, ["hard", "real"])
        assert done.stderr.count(b"left out") == 3

    def test_a_link_on_our_side_is_not_written_through(self, kernel: Kernel, box: str) -> None:
        """As a sandbox could leave it in a project that it has mounted."""
        outside = kernel.home / "outside"
        outside.mkdir()
        (outside / "file").write_text("ours")
        back = kernel.home / "back" / "t"
        back.mkdir(parents=True)
        (back / "sub").symlink_to(outside)
        (back / "file").symlink_to(outside / "file")
        inside(kernel, box, "mkdir -p t/sub; echo theirs > t/file; echo theirs > t/sub/file")
        done = kernel.call("cp", f"{box}:t", "back")
        assert (done.code, b"[destination_refused]" in done.stderr) == (1, True)
        assert (outside / "file").read_text() == "ours"

    def test_no_right_beyond_the_usual_comes_along(self, kernel: Kernel, box: str) -> None:
        inside(kernel, box, "cp /bin/true suid; chmod 6777 suid")
        assert kernel.call("cp", f"{box}:suid", "x").code == 0
        assert stat.S_IMODE((kernel.home / "x").stat().st_mode) & 0o7000 == 0

    def test_devices_and_pipes_do_not_hang(self, kernel: Kernel, box: str) -> None:
        for path in ("/dev/zero", "/dev/stdin"):
            assert kernel.call("cp", f"{box}:{path}", "x").code == 1
        inside(kernel, box, "mkfifo pipe")
        assert kernel.call("cp", f"{box}:pipe", "x").code == 1
        assert os.listdir(kernel.home) == []

    @pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", "", ".", "..", "a/", "a\0b"])
    def test_names_that_lead_elsewhere_are_refused(self, name: str) -> None:
        with pytest.raises(Failure) as caught:
            split_name(name)
        assert caught.value.body["code"] == "name_refused"

    def test_what_breaks_off_leaves_nothing(self, tmp_path: Path) -> None:
        def break_off() -> Iterator[bytes]:
            yield b"half"
            raise Failure("connection_lost", "gone", hint="again")

        (tmp_path / "file").write_text("whole")
        landing = Destination(str(tmp_path))
        with pytest.raises(Failure):
            landing.write(["file"], break_off(), 0o644)
        landing.close()
        assert ((tmp_path / "file").read_text(), os.listdir(tmp_path)) == ("whole", ["file"])

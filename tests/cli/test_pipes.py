"""`k8e` as a part of a pipe: input that comes bit by bit, programs and files of any size."""

from __future__ import annotations

import hashlib
import os
import re
import select
import subprocess
from pathlib import Path

import pytest

from tests.cli.machine import K8E, Machine
from tests.mcp.agents import pipes

SIZE = 160 << 20
MEMORY = 48 << 20  # for data of a process that has to do with a file of SIZE


def test_input_is_handed_over_as_it_comes(machine: Machine) -> None:
    code = "while read line; do echo got $line; done; echo end >&2; exit 5"
    with machine.start("sandbox", "run", "-i", code, "--timeout", "60") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for word in (b"one", b"two"):
            process.stdin.write(word + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"got " + word + b"\n"
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait() == 5


def test_input_that_is_not_read_waits(machine: Machine) -> None:
    """The daemon and the sandbox hold a bounded part of it, and the writer is stopped."""
    ours, writer = os.pipe()
    try:
        os.write(writer, b"first\n")
        code = "read line; echo $line; sleep 1000"
        with machine.start("sandbox", "run", "-i", code, "--timeout", "60", stdin=ours) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"first\n"
            os.set_blocking(writer, False)
            assert fill(writer) < 64 << 20
            process.kill()
    finally:
        os.close(ours)
        os.close(writer)


def fill(descriptor: int) -> int:
    """Writes until nothing is taken for a while, which on a slow machine may be too early and never too late."""
    sent = 0
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while poll.poll(1000) and sent < 64 << 20:
        sent += os.write(descriptor, bytes(1 << 16))
    return sent


@pytest.mark.parametrize("language", ["bash", "python", "node"])
def test_code_on_standard_input_may_be_long(machine: Machine, language: str) -> None:
    code = {"bash": "echo $((6*7))\n#", "python": "print(6*7)\n#", "node": "console.log(6*7)\n//"}[language]
    done = machine.run("--lang", language, stdin=code.encode() + b"x" * (2 << 20))
    assert (done.code, done.json["stdout"]) == (0, "42\n")


def test_the_limit_of_code_is_said(machine: Machine) -> None:
    done = machine.run(stdin=b"#" * ((16 << 20) + 1))
    assert (done.code, done.json["code"]) == (1, "invalid_argument")
    assert str(16 << 20) in done.json["error"]
    assert done.json["hint"]


def test_a_user_is_named(machine: Machine) -> None:
    assert machine.run("id -un", "--user", "root").json["stdout"] == "root\n"
    done = machine.run("true", "--user", "no_such_user")
    assert (done.code, done.json["code"], done.json["field"]) == (1, "user_not_found", "user")


def test_a_part_of_a_file_is_read(machine: Machine) -> None:
    machine.run("seq 0 9 | tr -d '\\n' > digits")
    session = machine.session()
    for words, content in ((["2-4"], "234"), (["7-"], "789"), (["8-100"], "89"), (["20-30"], "")):
        assert machine.k8e("sandbox", "read", session, "digits", "--range", *words).json["content"] == content
        assert machine.k8e("sandbox", "read", session, "digits", "--raw", "--range", *words).stdout == content.encode()
    for wrong in ("5", "-5", "4-2", "a-b", "1-2-3"):
        done = machine.k8e("sandbox", "read", session, "digits", f"--range={wrong}")
        assert (done.code, done.json["code"]) == (1, "usage"), wrong


def test_a_file_is_written_in_place(machine: Machine) -> None:
    machine.run("echo 1 > file; ln file other; stat -c %i file > inode")
    session = machine.session()
    assert machine.k8e("sandbox", "write", session, "file", stdin=b"2\n").code == 0
    assert machine.k8e("sandbox", "write", session, "file", "--mode", "a", stdin=b"3\n").code == 0
    done = machine.run("cat other; stat -c %i file | cmp - inode && chmod 400 file")
    assert (done.json["stdout"], done.code) == ("2\n3\n", 0)
    for mode in ("w", "a"):
        done = machine.k8e("sandbox", "write", session, "file", "--mode", mode, stdin=b"4\n")
        assert (done.code, done.json["code"]) == (1, "permission_denied")


def test_a_large_file_needs_little_memory(machine: Machine, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        for number in range(SIZE >> 20):
            file.write(number.to_bytes(4, "big") * (1 << 18))
    machine.run("true")
    session = machine.session()
    with pipes(machine) as agent:  # the daemon loads the SDK some seconds after its start if no client connects before
        agent.start()
    Path(f"/proc/{machine.daemon_pid}/clear_refs").write_text("5")  # from now on it counts anew
    before = peak_memory(machine.daemon_pid)
    with source.open("rb") as file:
        done = limited(machine, "sandbox", "write", session, "large", stdin=file)
    assert (done.returncode, f'"bytes": {SIZE}'.encode() in done.stdout) == (0, True), done
    with target.open("wb") as output:
        done = limited(machine, "sandbox", "read", session, "large", "--raw", stdout=output)
    assert done.returncode == 0, done
    assert peak_memory(machine.daemon_pid) - before < MEMORY
    assert digest(target) == digest(source)
    # In one message it would not fit, which is said.
    refused = machine.k8e("sandbox", "read", session, "large")
    assert (refused.code, refused.json["code"]) == (1, "too_big")
    machine.run("rm large")


def limited(machine: Machine, *words: str, **streams: object) -> subprocess.CompletedProcess[bytes]:
    """`k8e` with so much memory for its data and no more."""
    command = ["bash", "-c", f'ulimit -d {MEMORY >> 10}; exec "$@"', "-", str(K8E), *words]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **streams}
    return subprocess.run(command, env=machine.env, cwd=machine.home, timeout=300, **pipes)  # type: ignore[call-overload, no-any-return]


def peak_memory(pid: int) -> int:
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) << 10


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

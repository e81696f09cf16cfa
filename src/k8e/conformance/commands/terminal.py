"""Commands on a terminal."""

from __future__ import annotations

import hashlib
import signal

from k8e.conformance.counters import counters
from k8e.conformance.registry import check
from k8e.conformance.subject import (
    Subject,
    command,
    complete,
    ended,
    equal,
    find_processes,
    finish,
    holds,
    python,
    read_through,
    unique_mark,
)
from k8e.link.model import Cause, TerminalSize

SIZE = TerminalSize(33, 101)


@check()
async def check_terminal_is_one(subject: Subject) -> None:
    code = """
import os
print([os.isatty(fd) for fd in range(3)], os.ttyname(0).startswith("/dev/pts/"), os.tcgetpgrp(0) == os.getpgrp())
print(os.getsid(0) == os.getpid())
"""
    done = await complete(subject, python(subject, code, terminal=SIZE))
    equal("output", done.stdout, b"[True, True, True] True True\r\nTrue\r\n")
    ended("python", done, exit_code=0)


@check()
async def check_terminal_can_be_opened_by_its_name(subject: Subject) -> None:
    # As programs do that ask for a password, also when they are not root.
    code = "import os; os.write(os.open(os.ttyname(0), os.O_RDWR), b'by name')"
    done = await complete(subject, python(subject, code, terminal=SIZE))
    ended("python", done, exit_code=0)
    equal("output", done.stdout, b"by name")


@check()
async def check_without_a_terminal_there_is_none(subject: Subject) -> None:
    code = """
import os
print([os.isatty(fd) for fd in range(3)])
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError as error:
    print("no terminal")
"""
    done = await complete(subject, python(subject, code))
    equal("output", done.stdout, b"[False, False, False]\nno terminal\n")


@check()
async def check_terminal_has_its_size(subject: Subject) -> None:
    done = await complete(subject, command(subject, "stty", "size", terminal=SIZE))
    equal("size", done.stdout, b"33 101\r\n")


@check()
async def check_resize_is_told(subject: Subject) -> None:
    code = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print("ready", flush=True)
while signal.sigwait([signal.SIGWINCH]):
    size = os.get_terminal_size(0)
    os.write(1, b"%d %d\\n" % (size.lines, size.columns))
"""
    process = await subject.sandbox.start(python(subject, code, terminal=SIZE))
    equal("before", await read_through(process.stdout, b"\n"), b"ready\r\n")
    for rows, columns in ((50, 132), (1, 1), (24, 80)):
        await process.resize(TerminalSize(rows, columns))
        # A size may be told more than once; what counts is that the new one is.
        await read_through(process.stdout, b"%d %d\r\n" % (rows, columns))
    await process.end(grace=1)
    await finish(process)


@check()
async def check_terminal_echoes(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "cat", terminal=SIZE))
    await process.write(b"hello\n")
    got = b""
    while got.count(b"\n") < 2:
        got += await process.stdout.read()
    equal("echo, then cat", got, b"hello\r\nhello\r\n")
    await process.write(b"\x04")
    equal("output after ^D", await process.stdout.read(), b"")
    equal("exit code", (await process.wait()).exit_code, 0)


@check()
async def check_closed_stdin_types_the_end(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "cat", terminal=SIZE))
    await process.write(b"line\n")
    await process.close_stdin()
    done = await finish(process)
    ended("cat", done, exit_code=0)
    equal("lines", done.stdout.count(b"line\r\n"), 2)


@check()
async def check_ctrl_c_interrupts(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sh", "-c", "echo ready; exec sleep 1000", terminal=SIZE))
    await read_through(process.stdout, b"ready\r\n")
    await process.write(b"\x03")
    done = await finish(process)
    ended("sleep", done, signal=signal.SIGINT)
    equal("cause", done.outcome.cause, Cause.ITSELF)


@check()
async def check_ctrl_c_interrupts_the_foreground_only(subject: Subject) -> None:
    code = """
import signal, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
signal.signal(signal.SIGINT, lambda *_: None)
print("ready", flush=True)
print("child", child.wait(), flush=True)
sys.exit(4)
"""
    process = await subject.sandbox.start(python(subject, code, terminal=SIZE))
    await read_through(process.stdout, b"ready\r\n")
    await process.write(b"\x03")
    done = await finish(process)
    holds("the child died of the interrupt", b"child -2\r\n" in done.stdout, done.stdout)
    ended("the command, which handled it", done, exit_code=4)


@check()
async def check_terminal_merges_stderr(subject: Subject) -> None:
    done = await complete(subject, command(subject, "sh", "-c", "echo out; echo err >&2; exit 5", terminal=SIZE))
    ended("sh", done, exit_code=5)
    equal("streams", (done.stdout, done.stderr), (b"out\r\nerr\r\n", b""))
    equal("byte counts", (done.outcome.stdout_bytes, done.outcome.stderr_bytes), (len(done.stdout), 0))


@check()
async def check_terminal_in_raw_mode_is_binary_clean(subject: Subject) -> None:
    total = 512 << 10
    # gVisor's terminal hears ^C, ^Z and ^\\ in raw mode too; that is not ours to check.
    content = counters(0, total).translate(bytes.maketrans(b"\x03\x1a\x1c", b"\xf3\xfa\xfc"))
    code = """
import hashlib, os, sys, termios, tty
tty.setraw(0)
os.write(1, b"R")
digest, left = hashlib.sha256(), int(sys.argv[1])
while left:
    data = os.read(0, 65536)
    digest.update(data)
    left -= len(data)
os.write(1, digest.digest())
"""
    process = await subject.sandbox.start(python(subject, code, str(total), terminal=SIZE))
    equal("ready", await process.stdout.read(), b"R")
    await process.write(content)
    got = b""
    while len(got) < 32 and (chunk := await process.stdout.read()):
        got += chunk
    equal("hash", got, hashlib.sha256(content).digest())
    ended("python", await finish(process), exit_code=0)


@check()
async def check_flood_on_a_terminal_is_exact(subject: Subject) -> None:
    done = await complete(subject, command(subject, "sh", "-c", "stty -opost; seq 1 200000", terminal=SIZE))
    expected = b"".join(b"%d\n" % number for number in range(1, 200_001))
    holds("output is the same", done.stdout == expected, (len(done.stdout), done.stdout[-30:]))


@check()
async def check_last_output_on_a_terminal_is_never_lost(subject: Subject) -> None:
    for number in range(30):
        done = await complete(subject, command(subject, "sh", "-c", f"echo {number}; exit 3", terminal=SIZE))
        equal(f"output of run {number}", done.stdout, b"%d\r\n" % number)
        ended(f"run {number}", done, exit_code=3)


@check()
async def check_terminal_command_is_ended_with_its_tree(subject: Subject) -> None:
    mark = unique_mark()
    script = f"trap '' HUP TERM; sleep 1000 {mark.decode()} & echo ready; sleep 1000 {mark.decode()}"
    process = await subject.sandbox.start(command(subject, "sh", "-c", script, terminal=SIZE))
    await read_through(process.stdout, b"ready\r\n")
    await process.end(grace=0.2)
    done = await finish(process)
    ended("sh", done, signal=signal.SIGKILL)
    equal("processes left", await find_processes(subject, mark), [])


@check()
async def check_last_output_is_kept_for_the_next_client(subject: Subject) -> None:
    keep, total = 64 << 10, 3 << 20
    script = f"stty -echo -opost; head -c {total} /dev/zero | tr '\\0' x; printf end; exec cat"
    process = await subject.sandbox.start(
        command(subject, "sh", "-c", script, terminal=SIZE, detached=True, window=1 << 20)
    )
    await process.detach()
    first = await subject.sandbox.attach(process.id, hold=True, keep=keep)
    await read_through(first.stdout, b"end")
    equal("read", first.stdout.position, total + 3)
    await first.write(b"typed\n")
    await read_through(first.stdout, b"typed\n")
    await first.detach()
    second = await subject.sandbox.attach(process.id, hold=True, keep=keep)
    again = await read_through(second.stdout, b"typed\n")
    holds("as much as was to be kept, and not all", keep <= len(again) <= 4 * keep, len(again))
    holds("it is the end", again.endswith(b"xxxendtyped\n"), again[-20:])
    await second.write(b"\x04")
    equal("output after ^D", await second.stdout.read(), b"")
    equal("exit code", (await second.wait()).exit_code, 0)
    await subject.sandbox.release(process.id)

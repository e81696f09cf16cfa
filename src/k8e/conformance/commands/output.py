"""Both output streams: every byte, in order, at any speed, and no more in memory than a window."""

from __future__ import annotations

import hashlib
import os
import signal

from k8e.conformance.counters import WRITE_COUNTERS, CounterStream
from k8e.conformance.registry import check
from k8e.conformance.subject import (
    Subject,
    command,
    complete,
    ended,
    equal,
    finish,
    holds,
    python,
    run,
    run_python,
    together,
)
from k8e.link.model import CommandInfo, Process


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def find_command(subject: Subject, process: Process) -> CommandInfo:
    for info in await subject.sandbox.commands():
        if info.id == process.id:
            return info
    raise AssertionError(f"command {process.id} is not in the list")


@check()
async def check_streams_are_separate(subject: Subject) -> None:
    done = await run(subject, "sh", "-c", "echo to stdout; echo to stderr >&2")
    equal("streams", (done.stdout, done.stderr), (b"to stdout\n", b"to stderr\n"))


@check()
async def check_no_output_is_empty(subject: Subject) -> None:
    done = await run(subject, "true")
    ended("true", done, exit_code=0)
    equal("streams", (done.stdout, done.stderr), (b"", b""))


@check()
async def check_output_without_newline_arrives_at_once(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sh", "-c", 'printf prompt; read line; printf "$line"'))
    equal("before the answer", await process.stdout.read(), b"prompt")
    await process.write(b"answer\n")
    equal("after it", (await finish(process)).stdout, b"answer")


@check()
async def check_5_mib_of_stderr_before_any_stdout(subject: Subject) -> None:
    # Read in turn, as simple callers do: stdout to its end first would deadlock with one shared window.
    code = "import os\nfor _ in range(80): os.write(2, b'e' * 65536)\nos.write(1, b'done')"
    done = await run_python(subject, code)
    ended("5 MiB of stderr", done, exit_code=0)
    equal("lengths", (len(done.stdout), len(done.stderr)), (4, 80 * 65536))
    equal("stderr", done.stderr.strip(b"e"), b"")


@check()
async def check_interleaved_streams_keep_their_order(subject: Subject) -> None:
    code = "import os\nfor n in range(20000):\n os.write(1, b'o%d\\n' % n)\n os.write(2, b'e%d\\n' % n)"
    done = await run_python(subject, code)
    ended("interleaved writes", done, exit_code=0)
    for name, content in (("o", done.stdout), ("e", done.stderr)):
        expected = "".join(f"{name}{number}\n" for number in range(20_000)).encode()
        holds(f"stream {name} has all its lines in order", content == expected, (len(content), content[-40:]))


@check()
async def check_every_byte_value_comes_through(subject: Subject) -> None:
    done = await run_python(subject, "import os\nfor fd in (1, 2): os.write(fd, bytes(range(256)) * 3)")
    equal("stdout", done.stdout, bytes(range(256)) * 3)
    equal("stderr", done.stderr, bytes(range(256)) * 3)


@check()
async def check_invalid_utf8_and_control_bytes_come_through(subject: Subject) -> None:
    odd = b"\xc3\x28\xff\xfe\x00\x00\r\n\r\x1b]0;title\x07\x04\x03\x1a\xed\xa0\x80\xf0\x9f\x98"
    done = await run_python(subject, f"import os; os.write(1, {odd!r})")
    equal("stdout", done.stdout, odd)


@check()
async def check_utf8_may_be_split_anywhere(subject: Subject) -> None:
    text = "aä€😀".encode() * 500
    done = await run_python(subject, f"import os\nfor byte in {text!r}: os.write(1, bytes([byte]))")
    holds("bytes are the same", done.stdout == text, (len(done.stdout), done.stdout[:40]))


@check()
async def check_random_bytes_come_through(subject: Subject) -> None:
    code = """
import hashlib, os
digest = hashlib.sha256()
for _ in range(128):
    block = os.urandom(65521)
    digest.update(block)
    with os.fdopen(os.dup(1), "wb") as out:
        out.write(block)
os.write(2, digest.hexdigest().encode())
"""
    done = await run_python(subject, code)
    equal("length", len(done.stdout), 128 * 65521)
    equal("SHA-256", hashlib.sha256(done.stdout).hexdigest().encode(), done.stderr)


@check()
async def check_one_very_long_line(subject: Subject) -> None:
    done = await run(subject, "head", "-c", str(32 << 20), "/dev/zero")
    equal("length", len(done.stdout), 32 << 20)
    equal("content", done.stdout.strip(b"\0"), b"")


@check()
async def check_closed_streams_end_early_and_the_command_goes_on(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sh", "-c", "echo out; exec >&- 2>&-; read line; exit 6"))
    equal("stdout", await process.stdout.read(), b"out\n")
    equal("end of stdout", await process.stdout.read(), b"")
    equal("end of stderr", await process.stderr.read(), b"")
    await process.write(b"go on\n")
    outcome = await process.wait()
    equal("exit code", outcome.exit_code, 6)


@check(deadline=240)
async def check_bulk_output_with_a_slow_reader_in_flat_memory(subject: Subject) -> None:
    process = await subject.sandbox.start(python(subject, WRITE_COUNTERS, str(subject.bulk)))
    stream, before, peak, reads = CounterStream(), resident_bytes(), 0, 0
    while chunk := await process.stdout.read():
        stream.take(chunk)
        reads += 1
        if reads % 256 == 0:
            # A slow reader: it does something else between two reads.
            ended("a command in between", await run(subject, "true"), exit_code=0)
            peak = max(peak, resident_bytes() - before)
    process.discard()
    outcome = await process.wait()
    equal("exit code", outcome.exit_code, 0)
    stream.complete("stdout", subject.bulk)
    equal("byte count", outcome.stdout_bytes, subject.bulk)
    holds("host memory grows by less than 48 MiB", peak < 48 << 20, f"{peak >> 20} MiB")


@check()
async def check_reader_that_stops_stops_the_command(subject: Subject) -> None:
    for window in (16 << 10, 256 << 10):
        total = 64 << 20
        process = await subject.sandbox.start(python(subject, WRITE_COUNTERS, str(total), window=window))
        stream = CounterStream()
        stream.take(await process.stdout.read())
        # Time enough for a flood to show, without a clock: other commands come and go.
        for _ in range(20):
            ended("another command", await run(subject, "true"), exit_code=0)
        info = await find_command(subject, process)
        holds("the command is still running", info.running, info)
        most = process.stdout.position + window
        holds(f"at most {most} bytes left the command's pipe", info.stdout_bytes <= most, info.stdout_bytes)
        await stream.take_all(process.stdout)
        stream.complete("stdout", total)
        process.discard()
        equal("exit code", (await process.wait()).exit_code, 0)


@check()
async def check_unread_stderr_does_not_hold_up_stdout(subject: Subject) -> None:
    # More than a window on stderr would stop the command; a little less must not delay the other stream.
    code = "import os\nos.write(2, b'e' * 60000)\nfor _ in range(256): os.write(1, b'o' * 65536)"
    process = await subject.sandbox.start(python(subject, code))
    got = 0
    while chunk := await process.stdout.read():
        got += len(chunk)
    equal("stdout", got, 256 * 65536)
    done = await finish(process)
    equal("stderr", len(done.stderr), 60_000)


@check(deadline=120)
async def check_floods_on_both_streams(subject: Subject) -> None:
    code = WRITE_COUNTERS.replace("os.write(fd, block)", "os.write(fd, block[: 4096 + at % 5000])")
    both = f"""
import os, sys
if os.fork() == 0:
    sys.argv[2:] = ["2"]
{code}"""
    total = subject.bulk // 8
    process = await subject.sandbox.start(python(subject, both, str(total), drain=30.0))
    streams = CounterStream(), CounterStream()
    await together(streams[0].take_all(process.stdout), streams[1].take_all(process.stderr))
    outcome = await process.wait()
    streams[0].complete("stdout", total)
    streams[1].complete("stderr", total)
    equal("byte counts", (outcome.stdout_bytes, outcome.stderr_bytes), (total, total))


@check()
async def check_slow_reader_of_one_command_does_not_slow_another(subject: Subject) -> None:
    stuck = [await subject.sandbox.start(command(subject, "yes", window=16 << 10)) for _ in range(4)]
    done = await complete(subject, python(subject, WRITE_COUNTERS, str(16 << 20)))
    ended("the other command", done, exit_code=0)
    equal("its output", len(done.stdout), 16 << 20)
    for process in stuck:
        await process.end(grace=0.5)
        process.discard()
        equal("signal of the stuck command", (await process.wait()).signal, signal.SIGTERM)


@check()
async def check_discarded_output_flows_on(subject: Subject) -> None:
    process = await subject.sandbox.start(python(subject, WRITE_COUNTERS, str(16 << 20)))
    process.discard()
    outcome = await process.wait()
    equal("exit code", outcome.exit_code, 0)
    equal("byte count", outcome.stdout_bytes, 16 << 20)

"""How a command ended: every exit code, every signal, and never one for the other."""

from __future__ import annotations

import signal

from k8e.conformance.registry import check
from k8e.conformance.subject import Subject, ended, equal, holds, run, run_python, together
from k8e.link.model import Cause

DEADLY_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGKILL,
    signal.SIGUSR1,
    signal.SIGSEGV,
    signal.SIGUSR2,
    signal.SIGPIPE,
    signal.SIGALRM,
    signal.SIGTERM,
    signal.SIGXCPU,
    signal.SIGVTALRM,
    signal.SIGSYS,
)


@check()
async def check_exit_code_is_exact(subject: Subject) -> None:
    async def exit_with(code: int) -> None:
        done = await run(subject, "sh", "-c", f"exit {code}")
        ended(f"exit {code}", done, exit_code=code)
        equal(f"cause of exit {code}", done.outcome.cause, Cause.ITSELF)

    for start in range(0, 256, 16):
        await together(*(exit_with(code) for code in range(start, start + 16)))


@check()
async def check_signal_is_exact(subject: Subject) -> None:
    async def die_of(number: signal.Signals) -> None:
        done = await run(subject, "sh", "-c", f"kill -{number:d} $$")
        ended(f"death by {number.name}", done, signal=number)
        equal(f"cause of death by {number.name}", done.outcome.cause, Cause.ITSELF)

    await together(*(die_of(number) for number in DEADLY_SIGNALS))


@check()
async def check_real_time_signal_is_exact(subject: Subject) -> None:
    for number in (34, 50, 64):
        done = await run_python(subject, "import os, sys; os.kill(os.getpid(), int(sys.argv[1]))", str(number))
        ended(f"death by signal {number}", done, signal=number)


@check()
async def check_exit_above_128_is_not_a_signal(subject: Subject) -> None:
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
        done = await run(subject, "sh", "-c", f"exit {128 + number}")
        ended(f"exit {128 + number}", done, exit_code=128 + number)


@check()
async def check_signal_after_output_keeps_the_output(subject: Subject) -> None:
    done = await run(subject, "sh", "-c", "printf out; printf err >&2; kill -9 $$")
    ended("kill -9 of itself", done, signal=signal.SIGKILL)
    equal("output before it", (done.stdout, done.stderr), (b"out", b"err"))


@check()
async def check_last_output_before_exit_is_never_lost(subject: Subject) -> None:
    # The exit and the last bytes reach the agent at the same time: it has to read once more after the exit.
    for number in range(100):
        done = await run(subject, "sh", "-c", f"echo {number}; echo {number} >&2; exit 3")
        ended(f"run {number}", done, exit_code=3)
        equal(f"output of run {number}", (done.stdout, done.stderr), (b"%d\n" % number,) * 2)


@check()
async def check_outcome_counts_bytes(subject: Subject) -> None:
    done = await run(subject, "sh", "-c", "printf 12345; printf 123 >&2")
    equal("byte counts", (done.outcome.stdout_bytes, done.outcome.stderr_bytes), (5, 3))


@check()
async def check_outcome_measures_time_and_memory(subject: Subject) -> None:
    code = """
import time
keep = bytearray(48 << 20)
for page in range(0, len(keep), 4096):
    keep[page] = 1
while time.process_time() < 0.3:
    pass
"""
    outcome = (await run_python(subject, code)).outcome
    equal("exit code", outcome.exit_code, 0)
    holds("0.3 s of processor are at least 0.2 s", outcome.user_seconds + outcome.system_seconds >= 0.2, outcome)
    holds("wall clock is not less than 0.2 s", outcome.wall_seconds >= 0.2, outcome)
    holds("wall clock is not a day", outcome.wall_seconds < 86400, outcome)
    # A runtime that does not count (gVisor) says 0; one that counts must not say less than was touched.
    holds("resident memory is 0 (not counted) or more than 48 MiB", not 0 < outcome.max_rss_kib < 48 << 10, outcome)


@check()
async def check_signal_of_a_child_is_not_the_commands(subject: Subject) -> None:
    done = await run(subject, "sh", "-c", "sh -c 'kill -9 $$'; exit 4")
    ended("a shell whose child was killed", done, exit_code=4)


@check()
async def check_replacing_itself_by_exec_keeps_the_status(subject: Subject) -> None:
    done = await run(subject, "sh", "-c", "exec sh -c 'exec sh -c \"echo third; exit 42\"'")
    ended("the third program in one process", done, exit_code=42)
    equal("its output", done.stdout, b"third\n")


@check()
async def check_exit_of_the_main_thread_is_not_the_end(subject: Subject) -> None:
    # The process goes on without its first thread, and its status is what the last thread says.
    code = """
import ctypes, os, platform, threading, time
def last():
    time.sleep(0.3)
    os.write(1, b"last")
    os._exit(7)
threading.Thread(target=last).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 1)
"""
    done = await run_python(subject, code)
    equal("output of the last thread", done.stdout, b"last")
    ended("a process whose main thread went first", done, exit_code=7)

"""The environment of a command: exactly what was asked for, and nothing of the agent's."""

from __future__ import annotations

import json
import resource
from dataclasses import replace

from k8e.conformance.registry import check
from k8e.conformance.subject import (
    Subject,
    command,
    complete,
    ended,
    equal,
    holds,
    prepare,
    python,
    run,
    run_python,
)
from k8e.link.model import AGENT, Identity, Rlimit

SHOW_ARGV = "import os; os.write(1, open('/proc/self/cmdline', 'rb').read())"
AWKWARD = (
    b"",
    b"two words",
    b"'single' \"double\" `back`",
    b"$HOME ${PATH} $(id) $$ !!",
    b"line\nbreak\r\n\ttab",
    b"back\\slash \\n \\0",
    b"-leading",
    b"--",
    b"--help",
    b"*?[a-z]~{a,b}",
    b";|&<>()#",
    b"=",
    b"\x01\x02\x1b[31m\x7f",
    b"\xff\xfe\x80 not UTF-8",
    "ünïcödé \N{SNOWMAN}".encode(),
    b"",
)


async def shown_argv(subject: Subject, *words: bytes) -> list[bytes]:
    spec = python(subject, SHOW_ARGV, *words)
    done = await complete(subject, spec)
    ended("a program that shows its arguments", done, exit_code=0)
    holds("arguments end with NUL", done.stdout.endswith(b"\0"), done.stdout[-20:])
    return done.stdout[:-1].split(b"\0")[len(spec.argv) - len(words) :]


@check()
async def check_argv_is_exact(subject: Subject) -> None:
    equal("arguments", await shown_argv(subject, *AWKWARD), list(AWKWARD))


@check()
async def check_argv_takes_100_kib_arguments(subject: Subject) -> None:
    words = [bytes([65 + number]) * (100 << 10) for number in range(10)]
    got = await shown_argv(subject, *words)
    equal("lengths", [len(word) for word in got], [len(word) for word in words])
    holds("arguments are the same", got == words, [word[:10] for word in got])


@check()
async def check_argv_takes_10000_arguments(subject: Subject) -> None:
    words = [b"%d" % number for number in range(10_000)]
    holds("arguments are the same", await shown_argv(subject, *words) == words, "others")


@check()
async def check_argv0_is_what_was_given(subject: Subject) -> None:
    done = await run(subject, "sh", "-c", 'printf %s "$0"', "-odd name\n")
    equal("$0 given to sh -c", done.stdout, b"-odd name\n")
    spec = command(subject, "cat", "/proc/self/cmdline")
    equal("argv[0] found in PATH", (await complete(subject, spec)).stdout, b"cat\0/proc/self/cmdline\0")


@check()
async def check_env_is_exact(subject: Subject) -> None:
    env = (
        (b"PATH", subject.path),
        (b"EMPTY", b""),
        (b"EQUALS", b"a=b=c="),
        (b"LINES", b"one\ntwo\n"),
        (b"BYTES", b"\xff\x80\x01"),
        (b"DOLLAR", b"$PATH 'quoted' \\"),
        (b"odd name.with-dashes", b"1"),
        (b"LONG", b"x" * 100_000),
    )
    done = await run(subject, "cat", "/proc/self/environ", env=env)
    equal("environment", done.stdout.split(b"\0"), [*(b"=".join(pair) for pair in env), b""])


@check()
async def check_empty_env_is_empty(subject: Subject) -> None:
    # The program is found all the same: there is a default PATH.
    equal("environment", (await run(subject, "cat", "/proc/self/environ", env=())).stdout, b"")


@check()
async def check_path_of_the_given_env_finds_the_program(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkdir bin; printf '#!/bin/sh\\necho mine\\n' > bin/id; chmod 755 bin/id")
    done = await run(subject, "id", env=((b"PATH", subject.inside(b"bin")),))
    equal("output", done.stdout, b"mine\n")


@check()
async def check_cwd_is_exact(subject: Subject) -> None:
    for name in (b"plain", b"two words\nand a line", b"\xff\xfe", b"x" * 255):
        where = subject.inside(name)
        await subject.sandbox.mkdir(where, identity=subject.user)
        equal("cwd", (await run_python(subject, "import os; os.write(1, os.getcwdb())", cwd=where)).stdout, where)


@check()
async def check_relative_program_starts_from_the_cwd(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "printf '#!/bin/sh\\necho here\\n' > tool; chmod 755 tool")
    equal("output", (await run(subject, "./tool")).stdout, b"here\n")


@check()
async def check_umask_is_applied(subject: Subject) -> None:
    for mask in (0o022, 0o077, 0o000, 0o027):
        done = await run(subject, "sh", "-c", "umask", umask=mask)
        equal("umask", int(done.stdout, 8), mask)


@check()
async def check_ids_and_groups_are_applied(subject: Subject) -> None:
    code = "import os, json; print(json.dumps([os.getresuid(), os.getresgid(), sorted(os.getgroups())]))"
    for groups in ((), (7, 4242, 60_000)):
        who = Identity(uid=12_345, gid=23_456, groups=groups)
        done = await run_python(subject, code, identity=who, cwd=b"/")
        ended("showing ids", done, exit_code=0)
        equal("ids", json.loads(done.stdout), [[12_345] * 3, [23_456] * 3, list(groups)])


@check()
async def check_agents_own_identity_is_root(subject: Subject) -> None:
    done = await run(subject, "id", "-u", identity=AGENT)
    equal("uid", done.stdout, b"0\n")


@check()
async def check_rlimits_are_applied(subject: Subject) -> None:
    limits = (
        Rlimit(resource.RLIMIT_NOFILE, 64, 128),
        Rlimit(resource.RLIMIT_CORE, 0, 0),
        Rlimit(resource.RLIMIT_FSIZE, 1 << 20, 1 << 20),
        Rlimit(resource.RLIMIT_CPU, 500, 600),
    )
    code = "import json, resource, sys; print(json.dumps([resource.getrlimit(int(n)) for n in sys.argv[1:]]))"
    done = await run_python(subject, code, *(str(limit.resource) for limit in limits), rlimits=limits)
    ended("showing limits", done, exit_code=0)
    equal("limits", json.loads(done.stdout), [[limit.soft, limit.hard] for limit in limits])


@check()
async def check_rlimits_take_effect(subject: Subject) -> None:
    code = """
import os, resource
try:
    while True:
        os.dup(1)
except OSError as error:
    os.write(1, error.strerror.encode())
"""
    done = await run_python(subject, code, rlimits=(Rlimit(resource.RLIMIT_NOFILE, 32, 32),))
    equal("output", done.stdout, b"Too many open files")


SHOW_PRIVILEGES = """
import ctypes
fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(*sorted({int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if name in fields}))
print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))
"""


@check()
async def check_command_has_no_capabilities(subject: Subject) -> None:
    for who in (subject.user, AGENT):
        done = await run_python(subject, SHOW_PRIVILEGES, identity=who)
        ended("showing privileges", done, exit_code=0)
        equal(f"capabilities and no_new_privs of uid {who.uid}", done.stdout.split(), [b"0", b"1"])


@check()
async def check_capabilities_are_kept_on_request(subject: Subject) -> None:
    spec = replace(python(subject, SHOW_PRIVILEGES, identity=AGENT), keep_capabilities=True)
    done = await complete(subject, spec)
    ended("showing privileges", done, exit_code=0)
    kept = done.stdout.splitlines()[0]
    holds("root has capabilities when it asks for them", kept != b"0", kept)


@check()
async def check_only_three_descriptors_are_inherited(subject: Subject) -> None:
    code = """
import os
def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
print(sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)))
"""
    for stdin in (True, False):
        done = await run_python(subject, code, stdin=stdin)
        equal("open descriptors", done.stdout, b"[0, 1, 2]\n")


@check()
async def check_signals_are_at_their_defaults(subject: Subject) -> None:
    # The interpreter itself changes INT, PIPE and XFSZ; for those, dying of them is the proof.
    code = """
import signal
print([int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])])
own = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)
print([int(n) for n in signal.valid_signals() if n not in own and signal.getsignal(n) is not signal.SIG_DFL])
"""
    done = await run_python(subject, code)
    equal("blocked, then ignored signals", done.stdout, b"[]\n[]\n")
    for name in ("INT", "PIPE", "XFSZ"):
        done = await run(subject, "sh", "-c", f"kill -{name} $$; echo survived")
        equal(f"output after SIG{name}", done.stdout, b"")


@check()
async def check_command_leads_its_own_session(subject: Subject) -> None:
    done = await run_python(subject, "import os; print(os.getpid(), os.getpgrp(), os.getsid(0))")
    pid, group, session = done.stdout.split()
    equal("process group and session", (group, session), (pid, pid))


@check()
async def check_reported_pid_is_the_commands(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sh", "-c", "echo $$; read line"))
    own = await process.stdout.read()
    equal("pid", own, b"%d\n" % process.pid)
    await process.close_stdin()
    process.discard()
    await process.wait()


@check()
async def check_every_signal_is_at_its_default(subject: Subject) -> None:
    # Whatever those ignored who started the sandbox: what is ignored stays so through every execve.
    code = """
import signal
print(sorted(int(each) for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN))
"""
    done = await complete(subject, python(subject, code))
    equal("ignored, all of them by Python itself", done.stdout, b"[13, 25]\n")

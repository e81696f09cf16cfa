"""A command that could not be started is told apart from one that ran and failed."""

from __future__ import annotations

import asyncio

from k8e.conformance.registry import check
from k8e.conformance.subject import (
    Subject,
    command,
    ended,
    equal,
    finish,
    holds,
    not_started,
    prepare,
    run,
)
from k8e.link.errors import Code, NotStarted, Stage
from k8e.link.model import Identity


@check()
async def check_missing_program_is_not_started(subject: Subject) -> None:
    await not_started(subject, command(subject, "/no/such/program"), Stage.EXEC, Code.NOT_FOUND)
    await not_started(subject, command(subject, subject.inside(b"absent")), Stage.EXEC, Code.NOT_FOUND)


@check()
async def check_name_that_is_nowhere_in_path_is_not_started(subject: Subject) -> None:
    await not_started(subject, command(subject, "no-such-program-anywhere"), Stage.EXEC, Code.NOT_FOUND)


@check()
async def check_exit_127_and_126_are_exits(subject: Subject) -> None:
    for script, code in (("exit 127", 127), ("exit 126", 126), ("no-such-program-anywhere", 127)):
        ended(f"sh -c {script!r}", await run(subject, "sh", "-c", script), exit_code=code)


@check()
async def check_program_without_permission_is_not_started(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "echo '#!/bin/sh' > plain; chmod 644 plain")
    await not_started(subject, command(subject, subject.inside(b"plain")), Stage.EXEC, Code.DENIED)


@check()
async def check_directory_as_program_is_not_started(subject: Subject) -> None:
    await not_started(subject, command(subject, subject.directory), Stage.EXEC, Code.DENIED)


@check()
async def check_text_without_interpreter_is_not_executable(subject: Subject) -> None:
    # A shell would run it as a script; the agent runs exactly what it was given.
    await prepare(subject, "sh", "-c", "echo 'echo ran' > script; chmod 755 script; : > empty; chmod 755 empty")
    for name in (b"script", b"empty"):
        await not_started(subject, command(subject, subject.inside(name)), Stage.EXEC, Code.NOT_EXECUTABLE)


@check()
async def check_script_with_interpreter_runs(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", 'printf \'#!/bin/sh\\necho "$0" "$1"; exit 9\\n\' > script; chmod 755 script')
    done = await run(subject, subject.inside(b"script"), "an argument")
    ended("a script", done, exit_code=9)
    equal("its output", done.stdout, subject.inside(b"script") + b" an argument\n")


@check()
async def check_script_with_missing_interpreter_is_not_started(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "echo '#!/no/such/interpreter' > script; chmod 755 script")
    await not_started(subject, command(subject, subject.inside(b"script")), Stage.EXEC, Code.NOT_FOUND)


@check()
async def check_program_behind_a_symlink_loop_is_not_started(subject: Subject) -> None:
    await prepare(subject, "ln", "-s", "loop", "loop")
    await not_started(subject, command(subject, subject.inside(b"loop")), Stage.EXEC, Code.LINK_LOOP)


@check()
async def check_path_lookup_passes_over_what_cannot_be_executed(subject: Subject) -> None:
    # As execvp does: a file without permission early in PATH hides nothing that comes later.
    script = "mkdir early late; echo x > early/tool; printf '#!/bin/sh\\necho late\\n' > late/tool; chmod 755 late/tool"
    await prepare(subject, "sh", "-c", script)
    path = b":".join((b"/no/such/dir", subject.inside(b"early"), subject.inside(b"late")))
    done = await run(subject, "tool", env=((b"PATH", path),))
    equal("output", done.stdout, b"late\n")
    early = ((b"PATH", subject.inside(b"early")),)
    await not_started(subject, command(subject, "tool", env=early), Stage.EXEC, Code.DENIED)


@check()
async def check_missing_cwd_is_not_started(subject: Subject) -> None:
    await not_started(subject, command(subject, "true", cwd=subject.inside(b"absent")), Stage.CWD, Code.NOT_FOUND)


@check()
async def check_cwd_that_is_a_file_is_not_started(subject: Subject) -> None:
    await prepare(subject, "touch", "file")
    await not_started(subject, command(subject, "true", cwd=subject.inside(b"file")), Stage.CWD, Code.NOT_DIRECTORY)


@check()
async def check_cwd_without_permission_is_not_started(subject: Subject) -> None:
    await prepare(subject, "mkdir", "-m", "000", "closed")
    await not_started(subject, command(subject, "true", cwd=subject.inside(b"closed")), Stage.CWD, Code.DENIED)


@check()
async def check_uid_is_the_one_asked_for_or_nothing_runs(subject: Subject) -> None:
    # Whether an id exists depends on the user namespace. In no case does a command run as another user.
    odd = Identity(uid=4_000_000_000, gid=4_000_000_001)
    try:
        process = await subject.sandbox.start(command(subject, "sh", "-c", "id -u; id -g", identity=odd, cwd=b"/"))
    except NotStarted as error:
        equal("stage", error.stage, Stage.USER)
        return
    equal("ids", (await finish(process)).stdout, b"4000000000\n4000000001\n")


@check()
async def check_argument_too_long_for_the_kernel_is_not_started(subject: Subject) -> None:
    # E2BIG on Linux, ENAMETOOLONG in gVisor.
    spec = command(subject, "true", b"x" * (200 << 10))
    await not_started(subject, spec, Stage.EXEC, Code.TOO_BIG, Code.NAME_TOO_LONG)


@check()
async def check_a_command_that_ends_at_once_has_its_pid(subject: Subject) -> None:
    """The agent may hear of its start when it has ended already."""
    processes = await asyncio.gather(*(subject.sandbox.start(command(subject, "true")) for _ in range(20)))
    pids = {process.pid for process in processes}
    for process in processes:
        ended("the command", await finish(process), exit_code=0)
    holds("every pid is one", min(pids) > 1 and len(pids) == 20, pids)


@check()
async def check_sandbox_works_after_a_failed_start(subject: Subject) -> None:
    for _ in range(20):
        await not_started(subject, command(subject, "/no/such/program"), Stage.EXEC, Code.NOT_FOUND)
        ended("the next command", await run(subject, "true"), exit_code=0)

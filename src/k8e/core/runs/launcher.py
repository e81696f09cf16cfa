"""Makes a command of a run's spec, puts the run on record and starts the command, foreground and background alike.

A run is on record before its command starts, so that after a crash it is known as lost rather than unknown. No command
is started twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from k8e.core import checks
from k8e.core.egress.denials import Mark
from k8e.core.errors import Fault, Kind, correct
from k8e.core.log.daemon_log import warn
from k8e.core.model import Caller, RunSpec
from k8e.core.parts import Parts
from k8e.core.runs.endings import TIMEOUT_GRACE, Endings
from k8e.core.sandbox.programs import MAX_CODE, MAX_WORD, find_long_program, hand_over, remove_program
from k8e.core.sandbox.users import place_user
from k8e.core.sessions.ends import describe_loss
from k8e.core.sessions.interpreters import COMMANDS
from k8e.core.sessions.live import Live
from k8e.core.sessions.quotas import Quotas
from k8e.core.sessions.sessions import Opened, Sessions
from k8e.core.store.records import RunRecord
from k8e.core.translation import translate, translated
from k8e.engine import Place
from k8e.link.errors import LinkError, NotStarted
from k8e.link.model import ExecSpec, Process, TerminalSize

Facts = dict[str, object]

KEPT_RUNS: Final = 1000  # ended ones on record, of one session
MAX_ARGV: Final = 2_000_000  # with the environment about as much as execve takes
MAX_PACKAGES: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class Launcher:
    _parts: Parts
    _sessions: Sessions
    quotas: Quotas
    _endings: Endings

    def describe(self, caller: Caller, spec: RunSpec) -> Facts:
        """For the audit log."""
        return {"caller": caller.label, **self._parts.audit.describe_run(spec)}

    def new_record(self, live: Live, *, background: bool, terminal: bool = False) -> RunRecord:
        return RunRecord(
            run_id=f"run-{secrets.token_hex(8)}",
            sandbox=live.sandbox,
            background=background,
            terminal=terminal,
            emulated=live.session.emulated,
            started=self._parts.clock.wall(),
        )

    async def place(self, opened: Opened, plan: ExecSpec, spec: RunSpec) -> tuple[ExecSpec, Callable[[], None]]:
        """Counts the run until the returned function is called, and before its sandbox is asked for anything."""
        give_back = self.quotas.take_run(opened.live.payer)
        try:
            return await place_run(opened, plan, spec), give_back
        except BaseException:
            give_back()
            raise

    async def record(self, live: Live, record: RunRecord, about: Facts) -> tuple[RunRecord, Mark]:
        """Puts the run on record and into the audit log. Access denied after the mark was denied during the run."""
        await self._parts.audit.record("run_started", run=record.run_id, **live.identity, **about)
        await self._parts.store.insert_run(record, KEPT_RUNS)
        before = await self._sessions.examine(live)
        if not before.alive:
            self._endings.withdraw(record)
            raise describe_loss(live)
        if before.oom_kills:
            record = replace(record, oom_before=before.oom_kills)
        return record, live.refusals.mark()

    async def record_unreachable(self, live: Live, record: RunRecord, about: Facts) -> None:
        """Puts a run on record whose sandbox cannot be reached."""
        await self._parts.audit.record("run_started", run=record.run_id, **live.identity, **about)
        await self._parts.store.insert_run(record, KEPT_RUNS)

    async def start(self, opened: Opened, record: RunRecord, spec: ExecSpec) -> Process:
        try:
            return await opened.sandbox.start(await self._hand_over(opened, record, spec))
        except NotStarted as error:
            self._endings.withdraw(record)
            await self.clear(opened, record, spec)
            raise translate(error, "the command", spec.argv[0]) from error
        except ValueError as error:  # a length that only the link knows
            self._endings.withdraw(record)
            await self.clear(opened, record, spec)
            raise Fault(Kind.INVALID, "invalid_argument", str(error), field="argv", hint=correct("argv")) from error
        except LinkError as error:
            await self._endings.conclude(opened.live, record, error)
            raise translate(error, "starting the command") from error

    async def _hand_over(self, opened: Opened, record: RunRecord, spec: ExecSpec) -> ExecSpec:
        try:
            return await hand_over(opened.sandbox, spec, record.run_id)
        except (Fault, LinkError) as error:  # nothing ran
            self._endings.withdraw(record)
            if isinstance(error, Fault):
                raise
            raise translate(error, "handing over the program") from error

    async def clear(self, opened: Opened, record: RunRecord, spec: ExecSpec | None = None) -> None:
        """Removes the file of a long program, behind its run. Without `spec` it is not known whether there is one."""
        if opened.live.gone.done() or (spec is not None and find_long_program(spec.argv) is None):
            return
        try:
            await remove_program(opened.sandbox, record.run_id)
        except LinkError as error:  # it goes with the sandbox
            warn("program_stays", run=record.run_id, cause=error)


def check_run(spec: RunSpec, *, stdin: bool = True) -> ExecSpec:
    """The command as far as it is known without its sandbox."""
    env = checks.check_env("env", spec.env)
    checks.check_content("stdin", spec.stdin)
    checks.check_user(spec.user)
    if spec.terminal is not None:
        checks.check_terminal(spec.terminal)
        if spec.background:
            checks.refuse("terminal", "is for foreground runs", "Leave out background.")
    return ExecSpec(
        check_argv(spec),
        env,
        checks.check_path("workdir", spec.workdir) if spec.workdir else b"",
        stdin=stdin,
        timeout=checks.check_timeout(spec.timeout),
        grace=TIMEOUT_GRACE,
        terminal=TerminalSize(spec.terminal.rows, spec.terminal.columns) if spec.terminal else None,
    )


async def place_run(opened: Opened, plan: ExecSpec, spec: RunSpec) -> ExecSpec:
    """The command with what its sandbox adds: environment, directory and user."""
    place = opened.place
    if spec.user:
        with translated("finding the user"):
            place = await place_user(opened.sandbox, place, opened.live.session, spec.user)
    env = opened.live.environment(place.env)
    terminal = ((b"TERM", spec.terminal.term.encode()),) if spec.terminal and spec.terminal.term else ()
    if terminal or plan.env:
        env = tuple(dict((*env, *terminal, *plan.env)).items())  # later ones win
    return replace(
        plan,
        argv=complete_argv(place, plan.argv) if spec.entrypoint else plan.argv,
        env=env,
        cwd=plan.cwd or opened.live.session.workdir.encode() or place.workdir,
        identity=place.user,
        keep_capabilities=place.capable,
    )


def complete_argv(place: Place, argv: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Puts the image's entrypoint before a command that does not begin with it. Without a command: the image's own."""
    first = place.entrypoint[0] if place.entrypoint else b""
    if argv and argv[0] in (first, first.rpartition(b"/")[2]):
        return argv
    complete = (*place.entrypoint, *(argv or place.command))
    if not complete:
        checks.refuse("argv", "is empty, and the image has no command of its own")
    return complete


def check_argv(spec: RunSpec) -> tuple[bytes, ...]:
    """Empty: the image's own command."""
    if spec.argv and spec.code:
        checks.refuse("argv", "is given together with code")
    if spec.entrypoint and spec.code:
        checks.refuse("entrypoint", "is for argv, and code is given")
    if not spec.argv and spec.entrypoint:
        return ()  # the image's own
    if not spec.argv:
        code = checks.encode("code", spec.code)
        if len(code) > MAX_CODE:
            hint = "Write it to a file in the workspace and run that."
            checks.refuse("code", f"has {len(code)} bytes, the limit is {MAX_CODE}", hint)
        return (*COMMANDS[spec.language], code)
    if not spec.argv[0]:
        checks.refuse("argv", "begins with an empty word")
    for index, word in enumerate(spec.argv):
        if b"\0" in word:
            checks.refuse(f"argv[{index}]", "contains a NUL byte")
        if len(word) > MAX_CODE:
            checks.refuse(f"argv[{index}]", f"has {len(word)} bytes, the limit is {MAX_CODE}")
    try:
        program = find_long_program(spec.argv)
    except ValueError as error:
        hint = (
            "Only a shell's -c, python's -c and node's -e take more: hand other large input over in a file or as stdin."
        )
        checks.refuse(str(error), f"has more than {MAX_WORD} bytes, the limit of an argument", hint)
    others = [word for index, word in enumerate(spec.argv) if program is None or index != program.index]
    if sum(len(word) + 1 for word in others) > MAX_ARGV:
        checks.refuse("argv", f"takes more than {MAX_ARGV} bytes")
    return spec.argv


def check_packages(packages: Sequence[str]) -> tuple[bytes, ...]:
    """The argv that installs the packages. A word that looks like an option is no requirement of pip."""
    if not packages:
        checks.refuse("packages", "is empty")
    if len(packages) > MAX_PACKAGES:
        checks.refuse("packages", f"has {len(packages)} entries, the limit is {MAX_PACKAGES}")
    words = []
    for index, package in enumerate(packages):
        word = checks.encode(f"packages[{index}]", package)
        if not word.strip() or word.startswith(b"-"):
            checks.refuse(
                f"packages[{index}]", "is not a requirement", "Name packages only, such as requests or requests>=2."
            )
        words.append(word)
    return (b"pip", b"install", b"--no-input", b"--disable-pip-version-check", b"--", *words)

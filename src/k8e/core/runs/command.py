"""From the spec of a run to the command that the agent starts. Pure."""

from __future__ import annotations

from dataclasses import replace

from k8e.core import checks
from k8e.core.model import RunSpec
from k8e.core.runs.deadlines import TIMEOUT_GRACE
from k8e.core.sandbox.argv import check_argv
from k8e.core.sandbox.environment import merge_env
from k8e.core.sessions.sessions import Opened
from k8e.engine import Place
from k8e.link.model import ExecSpec, TerminalSize


def check_run(spec: RunSpec) -> ExecSpec:
    """The command as far as it is known without its sandbox."""
    env = checks.check_env("env", spec.env)
    checks.check_content("stdin", spec.stdin)
    if spec.terminal is not None:
        checks.check_terminal(spec.terminal)
        if spec.background:
            checks.refuse("terminal", "is for foreground runs", "Leave out background.")
    return ExecSpec(
        check_argv(spec),
        env,
        checks.check_path("workdir", spec.workdir) if spec.workdir else b"",
        timeout=checks.check_timeout(spec.timeout),
        grace=TIMEOUT_GRACE,
        terminal=TerminalSize(spec.terminal.rows, spec.terminal.columns) if spec.terminal else None,
    )


def place_run(opened: Opened, plan: ExecSpec, spec: RunSpec) -> ExecSpec:
    """The command with what its sandbox adds: environment, directory and user."""
    place = opened.place
    terminal = ((b"TERM", spec.terminal.term.encode()),) if spec.terminal and spec.terminal.term else ()
    return replace(
        plan,
        argv=complete_argv(place, plan.argv) if spec.entrypoint else plan.argv,
        env=merge_env(place.env, opened.live.env, terminal, plan.env),
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

"""`agentkernel run`: a command in a sandbox of its own, which is gone afterwards. Imports only what it uses."""

from __future__ import annotations

import os
import time

from k8e.cli.agentkernel import terminal
from k8e.cli.agentkernel.foreground import ONCE, Follower, Refused
from k8e.cli.agentkernel.jsontext import pack
from k8e.cli.agentkernel.leading_options import MOST_SECONDS, TIMEOUT, show_help, take_options, wants_help
from k8e.cli.agentkernel.options import OPTIONS, CageOptions
from k8e.cli.agentkernel.output import say, tell
from k8e.cli.agentkernel.plan import prepare, tell_new
from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.agentkernel.plan import Plan
    from k8e.cli.client.response import Response
    from k8e.profiles.sandbox_policy import SandboxPolicy

USAGE = "run [options] COMMAND [ARGUMENT ...]"
ABOUT = """\
Runs a command in a sandbox of its own, as if it were started here: its streams, its terminal and its exit code are
ours. Afterwards the sandbox is gone with everything in it. What comes after COMMAND is the command's.

The exit code is the command's own; 128+n when a signal ended it, 124 after --timeout. Ours are 125 (it could not be
run), 126 (it is no program) and 127 (there is no such program)."""

TABLE = {
    **OPTIONS,
    **TIMEOUT,
    "--keep": (None, "", "keep the sandbox, with its files; its name is said at the end"),
    "--entrypoint": (str, "WORD", "instead of what the image puts before commands; '' is nothing"),
}


class RunOptions(CageOptions):
    def __init__(self) -> None:
        super().__init__()
        self.timeout = MOST_SECONDS
        self.keep = False
        self.entrypoint: str | None = None


def main(words: list[str]) -> int:
    if wants_help(words, TABLE):
        return show_help(USAGE, ABOUT, TABLE)
    options = RunOptions()
    command = take_options(words, TABLE, options)
    if options.json and not options.dry_run:
        error = "--json is for --dry-run: what a command prints is its own"
        raise Failure("usage", error, hint="`k8e sandbox run` prints JSON")
    if not command and options.image is None:
        raise Failure("usage", "there is no command to run", hint=f"agentkernel {USAGE}")
    plan = prepare(options, command)
    if options.dry_run:
        from k8e.cli.agentkernel.sandbox import show_plan

        show_plan(plan.cage, as_json=options.json)
        return 0
    if plan.cage.env_left_out:
        say(f"no room for these variables: {', '.join(plan.cage.env_left_out)}")
    return Run(options, command, plan).finish()


class Run:
    def __init__(self, options: RunOptions, command: list[str], plan: Plan) -> None:
        self._options = options
        self._command = command
        self._plan = plan
        self._begun = time.time()
        self._console = terminal.Console() if terminal.is_there() else None
        self._follower = Follower(ONCE, self._console)

    def finish(self) -> int:
        try:
            response = self._start(self._plan.cage)
        except Refused as refused:
            tell(refused.body)
            return refused.status
        try:
            return self._follower.follow(response)
        finally:
            tell_new(self._plan, self._begun)
            if self._options.keep and self._follower.session_id:
                name = self._follower.session_id
                say(f"kept as {name}: agentkernel exec {name} COMMAND, agentkernel sandbox remove {name}")

    def _start(self, cage: SandboxPolicy) -> Response:
        """In one request. Only when it says that the image is missing is there more to do: nothing has been run."""
        try:
            return self._follower.start(self._describe(cage))
        except Refused as refused:
            if not refused.body["code"].startswith("image_"):
                raise
            from k8e.cli.agentkernel.images import obtain
            from k8e.cli.client.http import Client

            cage = obtain(Client(), cage, refused.body)
        return self._follower.start(self._describe(cage))

    def _describe(self, cage: SandboxPolicy) -> str:
        """The members of the request."""
        command = self._command
        entrypoint = cage.image_by == "asked"
        if self._options.entrypoint is not None:
            command = [self._options.entrypoint, *command] if self._options.entrypoint else command
            entrypoint = False
        if self._options.keep:
            cage = cage.but(name=f"run-{os.urandom(4).hex()}", persistent=True)
        session = cage.to_request()
        if self._plan.files:
            from k8e.cli.agentkernel.project_files import describe_file

            session["files"] = [describe_file(file, content) for file, content in self._plan.files]
        members = f'"session": {pack(session)}, "argv": {pack(command)}, "timeout": {self._options.timeout!r}'
        if entrypoint:
            members += ', "entrypoint": true'
        if self._options.keep:
            members += ', "keep": true'
        if self._console is not None:
            members += f', "terminal": {describe_terminal()}'
        return members


def describe_terminal() -> str:
    rows, columns = terminal.measure()
    return pack({"rows": rows, "columns": columns, "term": os.environ.get("TERM", "")})

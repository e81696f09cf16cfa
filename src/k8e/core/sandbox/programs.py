"""Programs that are longer than an argument may be: how they reach their interpreter.

Linux takes no argument of more than MAX_WORD bytes. A longer program is written to a file inside, as the user who runs
it and below a directory of the agent's, and the interpreter gets a few lines in its place that read the file and run
what is in it as if it had been the argument: the same name, arguments, globals and tracebacks. Everything about it
happens inside: the machine has no file of it and follows no path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.link.errors import AgentError, Code
from k8e.link.model import ExecSpec, Identity, Sandbox

MAX_WORD: Final = (128 << 10) - 1  # MAX_ARG_STRLEN without the NUL: execve takes no longer argument
MAX_CODE: Final = 16 << 20
FOLDER: Final = b"/run/k8e-programs"  # memory, not disk; a user can add files of its own there, and list nothing

# Each reads the file at @PATH@. None may leave a name of its own in the program's globals.
_BASH: Final = rb'[[ -r @PATH@ ]] || { echo "k8e: the program is gone" >&2; exit 126; }; eval "$(<@PATH@)"'
_SHELL: Final = rb'eval "$(cat @PATH@ || echo exit 126)"'
# The exceptions of the program pass through two frames that are not its own: they are cut off before anything is shown.
_PYTHON: Final = rb"""def _k8e():
    import sys
    names = sys.modules["__main__"].__dict__
    del names["_k8e"]
    with open("@PATH@", "rb") as file:
        text = file.read().decode("utf-8", "surrogateescape")
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [text if word.startswith("def _k8e()") else word for word in sys.orig_argv]
    try:
        exec(compile(text, "<string>", "exec", dont_inherit=True), names)
    except BaseException:
        hook = sys.excepthook
        def show(kind, error, trace):
            trace = trace.tb_next.tb_next
            hook(kind, error.with_traceback(trace), trace)
        sys.excepthook = show
        raise
_k8e()
"""
_VM: Final = rb"""require("vm").runInThisContext(@TEXT@, {filename: "[eval]", displayErrors: true,
importModuleDynamically:
(require("vm").constants || {}).USE_MAIN_CONTEXT_DEFAULT_LOADER || ((name) => import(name))})"""
_NODE: Final = _VM.replace(b"@TEXT@", rb'require("fs").readFileSync("@PATH@", "utf8")')
# tsx itself translates what stands on its command line, and nothing that the program reads later.
_TSX: Final = _VM.replace(
    b"@TEXT@",
    rb"""(() => {
const loader = process.execArgv.find((word) => word.includes("/tsx/dist/"))
const near = require("module").createRequire(loader.replace(/^file:\/\//, ""))
return near("esbuild").transformSync(require("fs").readFileSync("@PATH@", "utf8"),
{loader: "ts", format: "cjs", platform: "node", target: "node" + process.versions.node, sourcefile: "[eval]"}).code
})()""",
)
# The interpreter by its name, what says that a program follows, and what stands in the program's place.
_INTERPRETERS: Final = (
    (re.compile(rb"bash"), re.compile(rb"-[a-zA-Z]*c[a-zA-Z]*"), _BASH),
    (re.compile(rb"sh|dash|ash|ksh|zsh"), re.compile(rb"-[a-zA-Z]*c[a-zA-Z]*"), _SHELL),
    (re.compile(rb"python[0-9.]*"), re.compile(rb"-[a-zA-Z]*c"), _PYTHON),
    (re.compile(rb"node|nodejs"), re.compile(rb"-e|--eval"), _NODE),
    (re.compile(rb"tsx"), re.compile(rb"-e|--eval"), _TSX),
)


@dataclass(frozen=True, slots=True)
class LongProgram:
    index: int  # in the argv
    starter: bytes  # what stands there instead, with @PATH@ for the file's


def find_long_program(argv: tuple[bytes, ...]) -> LongProgram | None:
    """None: no argument is too long. ValueError: one is that is no interpreter's program; its text says which."""
    long = [index for index, word in enumerate(argv) if len(word) > MAX_WORD]
    if not long:
        return None
    index = long[0]
    name, options = argv[0].rpartition(b"/")[2], argv[1:index]
    for interpreter, option, starter in _INTERPRETERS:
        if not interpreter.fullmatch(name) or len(long) > 1 or not all(word.startswith(b"-") for word in options):
            continue
        shell = starter in (_BASH, _SHELL)  # other options may stand between the option and the program
        if any(option.fullmatch(word) for word in (options if shell else options[-1:])):
            return LongProgram(index, starter)
    raise ValueError(f"argv[{index}]")


async def hand_over(sandbox: Sandbox, spec: ExecSpec, run_id: str) -> ExecSpec:
    """The command with a program that fits; writes the file of one that does not. `remove` has to follow."""
    program = find_long_program(spec.argv)
    if program is None:
        return spec
    # The directory is the agent's: no user inside can put a link where the file is to be.
    await sandbox.mkdir(FOLDER, mode=0o733)
    await sandbox.chmod(FOLDER, 0o1733)
    identity = Identity(spec.identity.uid, spec.identity.gid)
    try:
        content = spec.argv[program.index]
        await sandbox.write_file(_path(run_id), content, exclusive=True, mode=0o400, identity=identity)
    except AgentError as error:
        if error.code is not Code.NO_SPACE:
            raise
        text = "there is no memory for a program of this size"
        hint = "Create a session with more memory, or write the program to a file in the workspace and run that."
        raise Fault(Kind.EXHAUSTED, "out_of_memory", text, detail=str(error), hint=hint) from error
    starter = program.starter.replace(b"@PATH@", _path(run_id))
    return replace(spec, argv=(*spec.argv[: program.index], starter, *spec.argv[program.index + 1 :]))


async def remove_program(sandbox: Sandbox, run_id: str) -> None:
    """Fine where there is none."""
    try:
        await sandbox.remove(_path(run_id))
    except AgentError as error:
        if error.code is not Code.NOT_FOUND:
            raise


def _path(run_id: str) -> bytes:
    return FOLDER + b"/" + run_id.encode()

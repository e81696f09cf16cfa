"""Man pages of both command lines, from the tables that they read their arguments by: what `--help` says, and nothing
that it does not."""

from __future__ import annotations

from k8e.cli.command import load
from k8e.cli.completion import read_options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from k8e.cli.arguments import Table
    from k8e.cli.command import Command

SEE = {"k8e": "agentkernel", "agentkernel": "k8e"}
VERSION: Table = {"--version": (None, "", "say which version this is")}
TITLES = {"k8e": "run code in sandboxes", "agentkernel": "run commands in sandboxes"}


def write_page(program: str, version: str) -> str:
    commands: Mapping[str, Command]
    common: Table = {}
    options: Table = {}
    if program == "k8e":
        from k8e.cli.commands import COMMANDS, GATEWAY, JSON

        commands, common, options = COMMANDS, JSON, {**VERSION, **GATEWAY}
        about = str(load("manual:ABOUT"))
    else:
        from k8e.cli.agentkernel.commands import ABOUT
        from k8e.cli.agentkernel.commands import COMMANDS as AGENTKERNEL

        commands = AGENTKERNEL
        about = ABOUT.partition("\n\n")[2].rpartition("\n\ncommands:")[0]
    lines = [
        f'.TH {escape(program.upper())} 1 "" "k8e {escape(version)}" "User Commands"',
        *(".SH NAME", f"{escape(program)} \\- {TITLES[program]}"),
        *(".SH SYNOPSIS", f".B {escape(program)}", escape("[OPTION]... COMMAND ..." if options else "COMMAND ...")),
        *(".SH DESCRIPTION", *fill(about)),
    ]
    if options:
        lines += [".SH OPTIONS", *list_rows(options)]
    lines += [".SH COMMANDS", *list_commands(program, commands, common)]
    lines += [".SH SEE ALSO", f".BR {SEE[program]} (1)"]
    return "\n".join(lines) + "\n"


def list_commands(before: str, commands: Mapping[str, Command], common: Table) -> Iterator[str]:
    for word, command in commands.items():
        name = f"{before} {word}"
        if command.commands is not None:
            yield from (f".SS {quote(name)}", *fill(command.description))
            yield from list_commands(name, command.commands, common)
            continue
        table = {**common, **read_options(command)}
        arguments = [show_argument(key, row[1]) for key, row in table.items() if not key.startswith("-")]
        yield f".SS {quote(' '.join([name, *arguments]))}"
        yield from fill(command.description)
        yield from list_rows(table)


def show_argument(key: str, noun: str) -> str:
    shown = noun or key.removesuffix("?").upper()
    return f"[{shown}]" if key.endswith("?") else shown


def list_rows(table: Table) -> Iterator[str]:
    for key, (read, noun, about) in table.items():
        value = noun or ("|".join(read) if isinstance(read, tuple) else "")
        if not key.startswith("-"):
            if not about:
                continue
            yield from (".TP", f".I {escape(show_argument(key, noun))}", *fill(about))
            continue
        names = ", ".join(f"\\fB{escape(name)}\\fR" for name in key.split())
        yield from (".TP", f"{names} \\fI{escape(value)}\\fR" if value else names)
        yield from fill(about or "see above")


def fill(text: str) -> Iterator[str]:
    """Paragraphs; lines that begin with spaces are examples, and stay as they are."""
    example = False
    for line in text.strip("\n").split("\n"):
        indented = line.startswith("  ")
        if indented != example and line:
            yield ".RS\n.nf" if indented else ".fi\n.RE"
            example = indented
        yield escape(line.strip() if not example else line[2:]) if line else ".sp"
    if example:
        yield ".fi\n.RE"


def escape(text: str) -> str:
    shown = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{shown}" if shown.startswith(".") else shown


def quote(text: str) -> str:
    return '"' + escape(text).replace('"', "\\(dq") + '"'

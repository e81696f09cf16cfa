"""`completion bash|zsh|fish` of both command lines. The scripts know no command: at each TAB they ask the program
itself (`completion words -- WORD ...`), which answers from the tables that it reads its arguments by, a line for each
word that fits, with what it is for behind a tab."""

from __future__ import annotations

import os

from k8e.cli.process import Failure, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8e.cli.arguments import Table
    from k8e.cli.command import Command

FILES = ":files"  # a line that asks the shell for names of files
FILE_NOUNS = ("FILE", "DIR", "FOLDER")
SESSION_NOUNS = {"k8e": ("SID", "PARENT-SID"), "agentkernel": ("NAME",)}
PATIENCE = "2"  # seconds: a person waits behind the TAB key

BASH = """\
# k8e completion bash > /etc/bash_completion.d/k8e
_k8e_complete() {
    local IFS=$'\\n' line
    COMPREPLY=()
    for line in $("${COMP_WORDS[0]}" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null); do
        if [[ $line == ":files" ]]; then compopt -o default; else COMPREPLY+=("${line%%$'\\t'*}"); fi
    done
}
complete -F _k8e_complete PROGRAM
"""
ZSH = """\
#compdef PROGRAM
# k8e completion zsh > a directory of $fpath, as _k8e
_k8e_complete() {
    local line
    local -a candidates
    for line in "${(@f)$("${words[1]}" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        if [[ $line == ":files" ]]; then
            _files
        elif [[ -n $line ]]; then
            candidates+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
        fi
    done
    (( ${#candidates} )) && _describe PROGRAM candidates
}
if [[ $funcstack[1] == _* ]]; then _k8e_complete "$@"; else compdef _k8e_complete PROGRAM; fi
"""
FISH = """\
# k8e completion fish > ~/.config/fish/completions/k8e.fish
function __k8e_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    for line in ($before[1] completion words -- $before[2..] "$current" 2>/dev/null)
        if test "$line" = ":files"
            __fish_complete_path "$current"
        else
            echo $line
        end
    end
end
complete -c PROGRAM -f -a '(__k8e_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def main(program: str, words: list[str]) -> int:
    if words[:1] == ["words"]:
        lines = (f"{word}\t{about}\n" if about else f"{word}\n" for word, about in find_words(program, words[2:]))
        write_all(1, "".join(lines).encode("utf-8", "backslashreplace"))
        return 0
    if len(words) == 1 and words[0] in SCRIPTS:
        write_all(1, SCRIPTS[words[0]].replace("PROGRAM", program).encode())
        return 0
    if words and words[0] in ("-h", "--help"):
        write_all(1, f"usage: {program} completion bash|zsh|fish\n\n{ABOUT}\n".encode())
        return 0
    raise Failure("usage", "completion is for one of: bash, zsh, fish", hint=f"{program} completion bash")


ABOUT = """\
Prints a script that completes commands, options and the names of sessions:

  bash  source <(k8e completion bash), or store it in /etc/bash_completion.d
  zsh   store it as _k8e in a directory of $fpath
  fish  store it as ~/.config/fish/completions/k8e.fish"""


def main_k8e(words: list[str]) -> int:
    return main("k8e", words)


def main_agentkernel(words: list[str]) -> int:
    return main("agentkernel", words)


def find_words(program: str, words: list[str]) -> Iterator[tuple[str, str]]:
    """The words that may stand where the last of `words` does, as far as it is typed."""
    commands: Mapping[str, Command]
    if program == "k8e":
        from k8e.cli.commands import COMMANDS, GATEWAY, JSON

        commands, options, common = COMMANDS, expand(GATEWAY), JSON
    else:
        from k8e.cli.agentkernel.commands import COMMANDS as AGENTKERNEL

        commands, options, common = AGENTKERNEL, {}, {}
    *before, current = words or [""]
    command: Command | None = None
    arguments = 0  # of the command, so far
    pending: Row | None = None
    for word in before:
        if pending is not None:
            pending = None
        elif word.startswith("-") and word != "-":
            name, equals, _ = word.partition("=")
            row = options.get(name)
            pending = row if row is not None and row[0] is not None and not equals else None
        elif command is None or command.commands is not None:
            below = command.commands if command is not None and command.commands is not None else commands
            if word not in below:
                return
            command = below[word]
            options = {} if command.commands is not None else expand({**common, **read_options(command)})
        else:
            arguments += 1
    if pending is not None:
        found = list_values(program, pending, before[-1])
    elif current.startswith("-"):
        found = ((name, row[2]) for name, row in options.items() if name.startswith("--"))
    elif command is None or command.commands is not None:
        below = command.commands if command is not None and command.commands is not None else commands
        found = ((word, each.about) for word, each in below.items())
    else:
        rows = [row for name, row in read_options(command).items() if not name.startswith("-")]
        found = list_values(program, rows[arguments]) if arguments < len(rows) else iter(())
    yield from ((word, about) for word, about in found if word.startswith(current) or word == FILES)


if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Row: TypeAlias = tuple[Any, str, str]


def read_options(command: Command) -> Table:
    return command.options() if callable(command.options) else command.options


def expand(table: Table) -> dict[str, Row]:
    """A row for each spelling: "-n --last" is two."""
    return {name: row for key, row in table.items() if key.startswith("-") for name in key.split()}


def list_values(program: str, row: Row, option: str = "") -> Iterator[tuple[str, str]]:
    read, noun, _ = row
    if isinstance(read, tuple):
        return ((word, "") for word in read)
    if words := find_choices(program, option):
        return ((word, "") for word in words)
    if noun in SESSION_NOUNS[program]:
        return list_sessions()
    return iter([(FILES, "")] if noun in FILE_NOUNS else [])


def find_choices(program: str, option: str) -> Sequence[str]:
    """The values of options whose tables have a function that reads them, and not the words."""
    if option == "--runtime":
        return ("gvisor", "native")
    if program == "k8e":
        from k8e.cli.run import LANGUAGES

        return tuple(LANGUAGES) if option == "--lang" else ()
    from k8e.profiles.profile import MODES, PROFILES

    if option == "--profile":
        return tuple(PROFILES)
    return tuple(MODES) if option == "--compatibility-mode" else ()


def list_sessions() -> Iterator[tuple[str, str]]:
    """The sessions of the service that runs already: a TAB starts no daemon, and an error completes nothing."""
    from k8e.cli.client import find_gateway, open_client, run_dir

    os.environ.setdefault("K8E_PATIENCE", PATIENCE)
    try:
        if find_gateway() is None and not os.path.exists(run_dir() + "/k8e.sock"):
            return
        for session in open_client().list_sessions("all").parse()["sessions"]:
            yield session["session_id"], f"{session['phase']}, {session['runtime']}, {session['image']}"
    except Failure:
        return

"""Chooses the image for a command: by the command, then by the files in the directory, then the default. Pure."""

from __future__ import annotations

from k8e.profiles.languages import (
    BY_NAME,
    DEFAULT_IMAGE,
    Language,
    find_by_command,
    find_by_ending,
    find_by_files,
)
from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SHELLS = ("sh", "bash", "zsh", "ash", "dash")
# Programs that start another one, and which of their options take a word of their own.
WRAPPERS = {
    "env": ("-u", "--unset", "-C", "--chdir", "-S", "--split-string"),
    "time": ("-f", "--format", "-o", "--output"),
    "nice": ("-n", "--adjustment"),
    "ionice": ("-c", "-n", "-p", "--class", "--classdata"),
    "nohup": (),
    "setsid": (),
    "stdbuf": ("-i", "-o", "-e"),
    "timeout": ("-k", "-s", "--kill-after", "--signal"),
    "exec": ("-a",),
    "command": (),
    "sudo": ("-u", "-g", "-h", "-p", "-C", "-D", "-r", "-t"),
    "doas": ("-u", "-C"),
}
SEPARATORS = ("&&", "||", ";", "|", "&", "(", ")", "{", "}", "!", "then", "do", "else", "\n")
DEPTH = 4  # wrappers in wrappers


class Detected(Record):
    image: str
    by: str  # "command", "project" or "default"
    language: str = ""
    word: str = ""  # the command or file that decided
    needs: tuple[str, ...] = ()  # commands without which it cannot run: its first word, and the one that decided

    @property
    def reason(self) -> str:
        if self.by == "default":
            return "nothing says which language it is"
        return f"{self.word} is {BY_NAME[self.language].title}"


def detect(
    command: Sequence[str], names: Iterable[str] = (), read_start: Callable[[str], bytes] | None = None
) -> Detected:
    """`names` are the files in the directory. `read_start` returns the first bytes of a script."""
    first = command[0] if command else ""
    found = _of_command(tuple(command), read_start, DEPTH)
    if found:
        language, word = found
        needs = tuple(dict.fromkeys(each for each in (first, word) if each))
        return Detected(language.image, "command", language.name, word, needs)
    needs = (first,) if first else ()
    in_project = find_by_files(frozenset(names))
    if in_project:
        language, name = in_project
        return Detected(language.image, "project", language.name, name, needs)
    return Detected(DEFAULT_IMAGE, "default", needs=needs)


def _of_command(
    words: tuple[str, ...], read_start: Callable[[str], bytes] | None, depth: int
) -> tuple[Language, str] | None:
    words = _skip_assignments(words)
    if not words or not depth:
        return None
    name = words[0].rpartition("/")[2]
    if name in WRAPPERS:
        return _of_command(_unwrap(name, words[1:]), read_start, depth - 1)
    if name in SHELLS and (script := _find_script(words[1:])) is not None:
        for part in split_script(script):
            found = _of_command(part, read_start, depth - 1)
            # `cd`, `echo` and a nested shell name no language; a later command may.
            if found and found[0].name != "shell":
                return found
    language = find_by_command(words[0])
    if language:
        return language, words[0]
    if "/" not in words[0]:
        return None
    language = find_by_ending(name) or _of_script(words[0], read_start, depth)
    return (language, words[0]) if language else None


def _of_script(path: str, read_start: Callable[[str], bytes] | None, depth: int) -> Language | None:
    """Finds the language by the script's first line, as the kernel does."""
    start = read_start(path) if read_start else b""
    if not start.startswith(b"#!"):
        return None
    line = start[2:].partition(b"\n")[0].decode("utf-8", "replace")
    found = _of_command(tuple(line.split()), None, depth - 1)
    return found[0] if found else None


def _skip_assignments(words: tuple[str, ...]) -> tuple[str, ...]:
    start = 0
    while start < len(words) and words[start].partition("=")[0].isidentifier() and "=" in words[start]:
        start += 1
    return words[start:]


def _unwrap(name: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the command that a wrapper starts."""
    with_value = WRAPPERS[name]
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            at += 1
            break
        at += 2 if words[at] in with_value else 1
    if name == "timeout":
        at += 1
    return words[at:]


def _find_script(words: tuple[str, ...]) -> str | None:
    """Returns the text behind -c; `-ec` and the like are -c, too."""
    for at, word in enumerate(words):
        if not word.startswith("-") or word == "--":
            return None
        if not word.startswith("--") and "c" in word:
            return words[at + 1] if at + 1 < len(words) else None
    return None


def split_script(script: str) -> list[tuple[str, ...]]:
    """Splits a script into its simple commands, roughly: enough to see which programs it starts."""
    import shlex

    lexer = shlex.shlex(script.replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    parts: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word in SEPARATORS or not word.strip(";&|()"):
                parts.append([])
            else:
                parts[-1].append(word)
    except ValueError:
        pass  # a quote that is not closed: what was read so far
    return [tuple(part) for part in parts if part]

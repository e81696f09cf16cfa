"""Options before a command: they are read up to the first other word; the words from there on are the command's.

argparse would take options of the command for ours, and importing it costs as much as starting Python.
"""

from __future__ import annotations

from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.arguments import PlainTable

# Seconds. Without --timeout a command has all the time there is: a day, which is the most that the service gives.
MOST_SECONDS = 86_400.0


def read_span(text: str) -> float:
    from k8e.cli.values import read_span

    seconds = read_span(text)
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(text)
    return seconds


TIMEOUT: PlainTable = {
    "--timeout": (read_span, "SECONDS", "end it after that long (5m, 2h), exit code 124; default: a day")
}


# Options that mean to others what happens here anyway; for run, exec and attach.
TERMINAL: PlainTable = {
    "-i --interactive": (None, "", "as others have it: our input is always the command's"),
    "-t --tty": (None, "", "refuse to run without a terminal; else it has one when we do"),
}


def take_options(words: list[str], table: PlainTable, into: object) -> list[str]:
    """Sets the attributes of `into` that the options name; returns the words after the options."""
    keys = index_names(table)
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        if words[at] == "--":
            return words[at + 1 :]
        if flags := split_flags(words[at], table, keys):
            for key in flags:
                setattr(into, find_attribute(key), True)
            at += 1
            continue
        name, equals, value = words[at].partition("=")
        if name not in keys:
            from k8e.cli.nearest import suggest

            options = f"the options: {', '.join(keys)}" if keys else "there are none here"
            raise Failure("usage", f"there is no option {name!r}", hint=suggest(name, keys, options))
        read, noun, about = table[keys[name]]
        attribute = find_attribute(keys[name])
        at += 1
        if read is None:
            raise Failure("usage", f"{name} takes no value", hint=f"{name} alone")
        if not equals:
            if at == len(words) or words[at].startswith("-"):
                raise Failure("usage", f"{name} wants a {noun}", hint=f"one that begins with -: {name}=...")
            value = words[at]
            at += 1
        if read is list:
            getattr(into, attribute).append(value)
            continue
        try:
            setattr(into, attribute, read(value))
        except ValueError:
            raise Failure("usage", f"{name}: {value!r} is no {noun}", hint=about) from None
    return words[at:]


def index_names(table: PlainTable) -> dict[str, str]:
    """From each name of an option to its key, which has all of them: `-p --publish`."""
    return {name: key for key in table for name in key.split()}


def find_attribute(key: str) -> str:
    return key.rpartition("--")[2].replace("-", "_")


def split_flags(word: str, table: PlainTable, keys: dict[str, str]) -> list[str]:
    """The keys of a flag, or of several in one word (-it); empty if it is something else."""
    names = [word] if word in keys or word.startswith("--") else [f"-{letter}" for letter in word[1:]]
    found = [keys.get(name, "") for name in names]
    return found if all(key and table[key][0] is None for key in found) else []


def wants_help(words: list[str], table: PlainTable) -> bool:
    """Whether --help stands among the options; after the first other word it is the command's."""
    keys = index_names(table)
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        if words[at] in ("-h", "--help"):
            return True
        takes = words[at] in keys and table[keys[words[at]]][0] is not None
        at += 2 if takes else 1
    return False


def show_help(usage: str, about: str, table: PlainTable) -> int:
    from k8e.cli.process import write_all

    heads = [f"{key.replace(' ', ', ')} {noun}".rstrip() for key, (_, noun, _) in table.items()]
    width = max(map(len, heads), default=0)
    lines = [f"  {head:<{width}}  {entry[2]}" for head, entry in zip(heads, table.values(), strict=True)]
    text = "\n".join([f"usage: agentkernel {usage}", "", about, "", *(["options:", *lines] if lines else [])])
    write_all(1, text.rstrip().encode() + b"\n")
    return 0

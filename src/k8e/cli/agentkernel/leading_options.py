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


def take_options(words: list[str], table: PlainTable, into: object) -> list[str]:
    """Sets the attributes of `into` that the options name; returns the words after the options."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        if words[at] == "--":
            return words[at + 1 :]
        name, equals, value = words[at].partition("=")
        if name not in table:
            from k8e.cli.nearest import suggest

            options = f"the options: {', '.join(table)}" if table else "there are none here"
            raise Failure("usage", f"there is no option {name!r}", hint=suggest(name, table, options))
        read, noun, _ = table[name]
        attribute = name[2:].replace("-", "_")
        at += 1
        if read is None:
            if equals:
                raise Failure("usage", f"{name} takes no value", hint=f"{name} alone")
            setattr(into, attribute, True)
            continue
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
            raise Failure("usage", f"{name}: {value!r} is no {noun}", hint=table[name][2]) from None
    return words[at:]


def wants_help(words: list[str], table: PlainTable) -> bool:
    """Whether --help stands among the options; after the first other word it is the command's."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        if words[at] in ("-h", "--help"):
            return True
        takes = words[at] in table and table[words[at]][0] is not None
        at += 2 if takes else 1
    return False


def show_help(usage: str, about: str, table: PlainTable) -> int:
    from k8e.cli.process import write_all

    heads = [f"{name} {noun}".rstrip() for name, (_, noun, _) in table.items()]
    width = max(map(len, heads), default=0)
    lines = [f"  {head:<{width}}  {entry[2]}" for head, entry in zip(heads, table.values(), strict=True)]
    text = "\n".join([f"usage: agentkernel {usage}", "", about, "", *(["options:", *lines] if lines else [])])
    write_all(1, text.rstrip().encode() + b"\n")
    return 0

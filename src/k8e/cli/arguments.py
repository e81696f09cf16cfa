"""argparse as every command line of ours uses it."""

from __future__ import annotations

import argparse

from k8e.cli.command import any_text
from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, NoReturn, TypeAlias, TypeVar

    Options = TypeVar("Options")
    # From a name (see add_table) to what reads its value (None: a flag; list: may come several times; words: one of
    # them), what the value is called, and what it is for.
    Table: TypeAlias = Mapping[str, tuple[Callable[[str], object] | tuple[str, ...] | None, str, str]]
    PlainTable: TypeAlias = Mapping[str, tuple[Callable[[str], object] | None, str, str]]  # also read without argparse


MISSING = "the following arguments are required: "  # argparse's words


class Parser(argparse.ArgumentParser):
    """argparse exits with 2 for a usage error, which here means that the service cannot be reached."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str, advice: str = "") -> NoReturn:
        """Says the mistake, and not how everything else is used."""
        if message.startswith(MISSING):
            message = f"{message.removeprefix(MISSING)} is missing"
        hint = f"{advice}; `{self.prog} --help` says more" if advice else f"`{self.prog} --help` says what there is"
        raise Failure("usage", message, hint=hint)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """The parser of the command refuses unknown words; argparse would leave them to the outermost parser, which
        knows nothing of that command."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [word.partition("=")[0] for word in rest if word.startswith("-")]
            unknown = f"there is no option {options[0]}" if options else f"{rest[0]!r} is one word too many"
            self.error(unknown, self.advise(rest, options))
        return parsed, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse would list all the choices, and leave it to the reader to find the right one."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - what else tells commands from choices
            self.error(f"there is no command {value!r}", self.advise_command(str(value), known))
        name = "/".join(action.option_strings) or action.dest
        self.error(f"{name}: {value!r} is none of {', '.join(known)}", ask_for_nearest(str(value), known))

    def advise(self, rest: list[str], options: list[str]) -> str:
        """A hint for unknown words, of which these are options: what was probably meant."""
        return ask_for_nearest(options[0], self._option_string_actions) if options else ""

    def advise_command(self, word: str, known: list[str]) -> str:
        return ask_for_nearest(word, known)


def ask_for_nearest(word: str, known: Iterable[str]) -> str:
    from k8e.cli.nearest import find_nearest

    nearest = find_nearest(word, known)
    return f"did you mean {nearest}?" if nearest else ""


class Word(argparse.Action):
    """Refuses an empty value: `--session-id "$SID"` without a SID is a mistake, and does not mean another session."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        if not values:
            raise argparse.ArgumentError(self, "it is empty: is a variable of the shell not set?")
        setattr(namespace, self.dest, values)


def read_with(read: Callable[[str], object], noun: str, about: str = "") -> Callable[[str], object]:
    """Words the error: argparse would name our function, and not say what it takes."""

    def read_value(text: str) -> object:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {noun}" + (f": {about}" if about else "")) from None

    return read_value


def add_table(parser: Parser, table: Table, defaults: Mapping[str, object]) -> None:
    """Adds a row for each key: "--name" is an option, "name" an argument, "name?" an argument that can be left out."""
    for key, (read, noun, about) in table.items():
        names = key.removesuffix("?").split()
        attribute = names[-1].removeprefix("--").replace("-", "_")
        if read is None:
            parser.add_argument(*names, action="store_true", help=about)
            continue
        empty: object = [] if read is list else "" if read in (str, any_text) else None
        settings: dict[str, Any] = {"metavar": noun or None, "help": about, "default": defaults.get(attribute, empty)}
        if isinstance(read, tuple):
            settings["choices"] = read
        elif read is list:
            settings["action"] = "append"
        elif read is not str:
            settings["type"] = read_with(read, noun, about)
        elif key.startswith("-"):
            settings["action"] = Word
        if key.endswith("?"):
            settings["nargs"] = "?"
        parser.add_argument(*names, **settings)


def take_over(parsed: argparse.Namespace, options: Options) -> Options:
    """Sets every attribute that `options` has, and returns it."""
    for name in vars(options):
        setattr(options, name, getattr(parsed, name))
    return options

"""The form in which both command lines declare their commands: a table from a word to a `Command`.

What a command runs and the text of its `--help` are references ("module:name" below k8e.cli), which are imported when
they are needed: a person or an agent waits for this process (see k8e.cli for what imports cost).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from k8e.cli.arguments import Parser, Table

NO_OPTIONS: Table = {}


class Command:
    """`function` is called with what argparse has read as `options` say (arguments.py); with `plain`, with the words as
    they are: `options` then only says which there are. `commands` are the commands below this one. `failed` is the exit
    code of an error, if not the error's."""

    def __init__(
        self,
        about: str,
        function: str = "",
        options: Table | Callable[[], Table] = NO_OPTIONS,
        text: str = "",
        *,
        defaults: Mapping[str, object] | None = None,
        commands: Mapping[str, Command] | None = None,
        plain: bool = False,
        failed: int = 0,
    ) -> None:
        self.about = about
        self.function = function
        self.options = options
        self.text = text
        self.defaults = defaults or {}
        self.commands = commands
        self.plain = plain
        self.failed = failed

    @property
    def description(self) -> str:
        return str(load(self.text)) if self.text else f"{self.about[0].upper()}{self.about[1:]}."

    def call(self, given: Any) -> int:
        return int(load(self.function)(given))

    def declare(self, parser: Parser, common: Table = NO_OPTIONS) -> None:
        """Adds options and commands to the parser; `handler` of what it reads calls the function. `common` has options
        that all of these commands take."""
        from k8e.cli.arguments import add_table

        if self.commands is not None:
            return add_commands(parser, self.commands, common)
        own = self.options() if callable(self.options) else self.options
        add_table(parser, {**common, **own}, self.defaults)
        return parser.set_defaults(handler=self.call)


def add_commands(parser: Parser, table: Mapping[str, Command], common: Table = NO_OPTIONS) -> None:
    below = parser.add_subparsers(metavar="COMMAND", required=True)
    for word, command in table.items():
        command.declare(below.add_parser(word, help=command.about, description=command.description), common)


def any_text(text: str) -> str:
    """Reads the value of an option that may be empty; `str` refuses an empty one (arguments.py)."""
    return text


def load(reference: str) -> Any:
    """Without importlib, which would be two more modules to import."""
    module, _, name = reference.partition(":")
    return getattr(__import__(f"k8e.cli.{module}", fromlist=[name]), name)

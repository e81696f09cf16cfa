"""The tables of commands: what they refer to is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from k8e.cli import commands as k8e
from k8e.cli.agentkernel import commands as agentkernel
from k8e.cli.command import Command, load


def list_commands(table: Mapping[str, Command], above: str) -> Iterator[tuple[str, Command]]:
    for word, command in table.items():
        yield f"{above} {word}", command
        yield from list_commands(command.commands or {}, f"{above} {word}")


COMMANDS = dict([*list_commands(k8e.COMMANDS, "k8e"), *list_commands(agentkernel.COMMANDS, "agentkernel")])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_leads_to_a_function_and_a_text(name: str) -> None:
    command = COMMANDS[name]
    assert command.description
    assert bool(command.function) != bool(command.commands)
    if command.function:
        assert callable(load(command.function))

"""Man pages have every command and option of the tables that `--help` is made from, and are well-formed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from k8e.cli.agentkernel.commands import COMMANDS as AGENTKERNEL
from k8e.cli.command import Command
from k8e.cli.commands import COMMANDS
from k8e.cli.completion import read_options
from k8e.cli.install.man_page import write_page

TABLES: dict[str, Mapping[str, Command]] = {"k8e": COMMANDS, "agentkernel": AGENTKERNEL}


def list_words(before: str, commands: Mapping[str, Command]) -> Iterator[str]:
    for word, command in commands.items():
        yield f"{before} {word}"
        yield from list_words(f"{before} {word}", command.commands or {})
        yield from (name for key in read_options(command) if key.startswith("-") for name in key.split())


@pytest.mark.parametrize("program", TABLES)
def test_a_page_has_every_command_and_option(program: str, tmp_path: Path) -> None:
    if not shutil.which("man"):
        pytest.skip("no man here")
    page = tmp_path / f"{program}.1"
    page.write_text(write_page(program, "1.2.3"))
    env = {"MANWIDTH": "500", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    command = ["man", "--warnings", "-l", str(page)]
    shown = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert shown.stderr == ""
    text = re.sub(r"\s+", " ", shown.stdout)
    assert [word for word in list_words(program, TABLES[program]) if word not in text] == []

"""argparse as the commands of this front door use it."""

from __future__ import annotations

from k8e.cli.arguments import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Parser", "make_parser"]


def make_parser(words: str, about: str, **settings: Any) -> Parser:
    return Parser(prog=f"agentkernel {words}", description=about, **settings)

"""The command lines `k8e` and `k8e-sandbox`: thin clients of the daemon's socket.

A person or an agent waits for this process, so it imports next to nothing. Where bare Python takes 12 ms, argparse adds
10, json and socket 8 each (they bring re and enum). `sandbox run` in its usual spellings imports none of them; unusual
spellings and all other commands go through argparse. tests/cli/test_startup.py checks that.
"""

from __future__ import annotations

import sys


def main() -> None:
    from k8e.cli.process import run_command

    run_command(choose, sys.argv[1:])


def choose(arguments: list[str]) -> int:
    if arguments[:2] == ["sandbox", "run"]:
        from k8e.cli.run import read_plainly, run

        if (options := read_plainly(arguments[2:])) is not None:
            return run(options)
    if arguments == ["sandbox-mcp"]:
        from k8e.cli.mcp.command import bridge

        return bridge("")
    if arguments[:1] == ["completion"]:
        from k8e.cli.completion import main_k8e

        return main_k8e(arguments[1:])
    from k8e.cli.commands import dispatch

    return dispatch(arguments)

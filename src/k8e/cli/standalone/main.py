"""The standalone program `k8e-sandbox`: the commands that work through a gateway, on any system with a bare Python."""

from __future__ import annotations

import os
import sys

# Those of `k8e` that need a daemon of this machine are not here; of `image` there is `list`.
REMOTE = ("sandbox", "connect", "login", "image", "sandbox-apikey")
HERE = ("shell",)  # of `sandbox`: needs a terminal as Unix has it


def main() -> None:
    # Another version's compiled part, somewhere on this machine, would not fit.
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
    from k8e.cli import client
    from k8e.cli.portable import use_bytes
    from k8e.cli.process import run_command

    client.has_daemon = False
    use_bytes()
    run_command(choose, sys.argv[1:])


def choose(arguments: list[str]) -> int:
    from k8e.cli import commands
    from k8e.cli.sandbox.commands import SANDBOX
    from k8e.cli.standalone import grpc_subset

    sys.modules["grpc"] = grpc_subset
    for table, words in ((commands.COMMANDS, REMOTE), (commands.IMAGES, ("list",))):
        for word in [word for word in table if word not in words]:
            del table[word]
    if os.name != "posix":
        for word in HERE:
            SANDBOX.pop(word, None)
    if arguments[:2] == ["sandbox", "run"]:
        from k8e.cli.run import read_plainly, run

        if (options := read_plainly(arguments[2:])) is not None:
            return run(options)
    return commands.dispatch(arguments)

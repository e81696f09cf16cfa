"""The command line `agentkernel`: a second front door to the same daemon (docs/agentkernel.md).

Every command is a module of its own with `main(arguments)`, found by the table in `commands.py` and imported when it is
asked for: a person or an agent waits for this process (see k8e.cli for what imports cost).
"""

from __future__ import annotations

import sys


def main() -> int:
    from k8e.cli.process import ending_well

    return ending_well(choose, sys.argv[1:])


def choose(arguments: list[str]) -> int:
    from k8e.cli.agentkernel.commands import COMMANDS, show_help
    from k8e.cli.agentkernel.output import tell
    from k8e.cli.process import FAILED, OutputLost
    from k8e.errors import ExplainedError

    word = arguments[0] if arguments else "--help"
    try:
        if word not in COMMANDS:
            return show_help(word)
        return COMMANDS[word].load()(arguments[1:])
    except ExplainedError as error:
        tell(error.body)
        return COMMANDS[word].failed if word in COMMANDS and COMMANDS[word].failed else getattr(error, "status", FAILED)
    except OutputLost as lost:
        try:
            tell({"error": "the output cannot be written", "code": "output_lost", "detail": str(lost)})
        except OutputLost:
            pass  # nobody is left to tell
        return COMMANDS[word].failed or FAILED if word in COMMANDS else FAILED

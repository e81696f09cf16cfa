"""`agentkernel doctor`: k8e's own, because it is the same machine and the same sandboxes."""

from __future__ import annotations

from k8e.cli.agentkernel.parsing import make_parser


def main(arguments: list[str]) -> int:
    from k8e.cli import handlers, manual
    from k8e.cli.commands import add_doctor_options

    parser = make_parser("doctor", manual.DOCTOR)
    add_doctor_options(parser)
    return handlers.examine(parser.parse_args(arguments))

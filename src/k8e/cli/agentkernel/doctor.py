"""`agentkernel doctor`: k8e's own, because it is the same machine and the same sandboxes."""

from __future__ import annotations

from k8e.cli.agentkernel.parsing import make_parser


def main(arguments: list[str]) -> int:
    from k8e.cli.parser import DOCTOR, examine

    parser = make_parser("doctor", DOCTOR)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--fix", action="store_true", help="first install what is missing and remove what is left over")
    return examine(parser.parse_args(arguments))

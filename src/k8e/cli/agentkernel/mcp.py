"""`agentkernel mcp server`: the bridge between an agent's pipes and the daemon, which speaks the protocol."""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    if arguments == ["server"]:  # as agents start it: without argparse
        from k8e.cli.mcp import bridge

        return bridge("")
    from k8e.cli.agentkernel.parsing import make_parser

    parser = make_parser("mcp", ABOUT)
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    server = subcommands.add_parser("server", help="speak the Model Context Protocol on stdin and stdout")
    server.add_argument("--tenant-id", default="", metavar="NAME", help="keep sessions for this tenant")
    parsed = parser.parse_args(arguments)
    from k8e.cli.mcp import bridge

    return bridge(parsed.tenant_id)


ABOUT = """\
Serves the sandboxes of this machine to an agent, by the Model Context Protocol. Each connection has a session of its
own, which ends with it. `agentkernel plugin install claude` tells an agent to start it.
"""

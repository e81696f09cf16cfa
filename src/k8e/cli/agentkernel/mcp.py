"""`agentkernel mcp server`: the bridge between an agent's pipes and the daemon, which speaks the protocol."""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    if arguments == ["server"]:  # as agents start it: without argparse
        return serve("", permissive=False)
    from k8e.cli.agentkernel.parsing import make_parser

    parser = make_parser("mcp", ABOUT)
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    server = subcommands.add_parser("server", help="speak the Model Context Protocol on stdin and stdout")
    server.add_argument("--tenant-id", default="", metavar="NAME", help="keep sandboxes for this tenant")
    server.add_argument(
        "--allow-permissive",
        action="store_true",
        help="let agents choose the profile permissive: this folder, your home and your variables are theirs then",
    )
    parsed = parser.parse_args(arguments)
    return serve(parsed.tenant_id, permissive=parsed.allow_permissive)


def serve(tenant: str, *, permissive: bool) -> int:
    from k8e.cli.mcp import bridge

    return bridge(tenant, "agentkernel", permissive=permissive)


ABOUT = """\
Serves the sandboxes of this machine to an agent, by the Model Context Protocol. Each connection has a session of its
own, which ends with it. `agentkernel plugin install claude` tells an agent to start it.
"""

"""`agentkernel mcp server`: the bridge between an AI agent's pipes and the daemon, which speaks the protocol."""

from __future__ import annotations

from k8e.cli.mcp import bridge

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def serve(parsed: argparse.Namespace) -> int:
    return bridge(parsed.tenant_id, "agentkernel", permissive=parsed.allow_permissive)

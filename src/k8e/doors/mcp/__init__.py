"""The Model Context Protocol (docs/mcp.md): how agents meet the sandboxes.

`opening.py` is what the daemon imports; everything else here brings the SDK with it, or is of no use without it.
"""

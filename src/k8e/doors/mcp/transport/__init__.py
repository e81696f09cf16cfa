"""How messages of the protocol travel: lines (stdio), Streamable HTTP, and the older SSE."""

"""`k8e sandbox-mcp`: the bridge between an AI agent and the daemon or a gateway."""

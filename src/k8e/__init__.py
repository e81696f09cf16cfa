"""k8e: sandboxes in which AI agents run code."""

"""The machine's package clients and registries, and the tools that sandboxes get."""

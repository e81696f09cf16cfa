"""agentkernel.toml, read strictly. Imported only when there is a file."""

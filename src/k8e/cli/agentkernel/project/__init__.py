"""The project of `agentkernel`: its agentkernel.toml, its files, and what a command has changed in it."""

"""Changes to the configuration of AI agents on this machine: the files, and edits of JSON and TOML."""

"""The disk of a sandbox: a file with an ext4 inside."""

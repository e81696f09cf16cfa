"""Checks of files, directories and sockets inside the sandbox."""

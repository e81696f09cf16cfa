"""Directories of the machine in sandboxes: how the kernel is asked for them."""

"""Checks of commands: how they start, run, are signalled and end."""

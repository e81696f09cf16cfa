"""Clients of the service: HTTP to the daemon of this machine."""

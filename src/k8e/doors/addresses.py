"""Addresses that are listened on, and by which names others know them. Pure but for this machine's own name."""

from __future__ import annotations

import socket
from collections.abc import Sequence


def split_address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def list_names(host: str, names: Sequence[str]) -> list[str]:
    """What clients may call us: what was configured, this machine's name, and the ways in from here."""
    wildcard = host in ("0.0.0.0", "::")
    usual = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *([] if wildcard else [host])]
    return list(dict.fromkeys([*names, *usual]))

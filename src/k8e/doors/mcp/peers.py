"""Finds the user at the other end of a connection over loopback.

For TCP the kernel reports that in its tables of sockets only. A socket whose process has ended has no user there, or
root, so only an established connection counts.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = b"01"
_UID: Final = 7  # the column


def find_user(peer: tuple[str, int], own: tuple[str, int], tables: Iterable[Path] = _TABLES) -> int | None:
    """The uid of the process whose socket `peer` is connected to our socket `own`. None: unknown."""
    wanted = {b"%b %b %b" % (there, here, _ESTABLISHED) for there, here in zip(_spell(peer), _spell(own), strict=True)}
    for table in tables:
        try:
            content = table.read_bytes()
        except OSError:
            continue
        for needle in wanted:
            start = content.find(b" %b " % needle)
            if start >= 0:
                line = content[content.rfind(b"\n", 0, start) + 1 : content.find(b"\n", start)]
                return int(line.split()[_UID])
    return None


def _spell(address: tuple[str, int]) -> list[bytes]:
    """Writes an address as the tables do: 32-bit words in this machine's byte order. A program may reach an IPv4
    address with an IPv6 socket."""
    ip = ipaddress.ip_address(address[0])
    forms = [ip.packed]
    if ip.version == 4:
        forms.append(bytes(10) + b"\xff\xff" + ip.packed)
    words = [[form[start : start + 4] for start in range(0, len(form), 4)] for form in forms]
    return [
        b"".join(b"%08X" % int.from_bytes(word, sys.byteorder) for word in each) + b":%04X" % address[1]
        for each in words
    ]

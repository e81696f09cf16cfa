"""Which user of this machine is at the other end of a connection over loopback.

The kernel knows, and over TCP says so in its table of sockets only. A socket whose process is gone has no user there,
or root's, so that only one that is fully connected counts.
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
    """The uid of whoever has the socket `peer` that is connected to our socket `own`. None: it is not known."""
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
    """As the tables have it: words of 32 bits as numbers of this machine. A program may reach an IPv4 address with a
    socket of IPv6."""
    ip = ipaddress.ip_address(address[0])
    forms = [ip.packed]
    if ip.version == 4:
        forms.append(bytes(10) + b"\xff\xff" + ip.packed)
    words = [[form[start : start + 4] for start in range(0, len(form), 4)] for form in forms]
    return [
        b"".join(b"%08X" % int.from_bytes(word, sys.byteorder) for word in each) + b":%04X" % address[1]
        for each in words
    ]

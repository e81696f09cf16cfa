"""Whether a sandbox has sent anything: the kernel's count of packets that came in on its wire.

Without a packet nothing can have been refused since the last look, and most commands send none. To read this count
costs a small part of asking for the refusals, which was done before and after every command.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from k8e.engine.local.system.calls import opened

_INTERFACES: Final = "/sys/class/net"


class Traffic:
    """Of one wire. Holds a descriptor from the first look until `close`."""

    __slots__ = ("_alias", "_count", "_descriptor", "_folder", "_interface", "_settling", "_unknown")

    def __init__(self, interface: str, alias: str) -> None:
        """`alias`: what the interface is called for people, and no other one is. Of an interface without a name nothing
        is known."""
        self._interface = interface
        self._alias = alias
        self._folder = f"{_INTERFACES}/{interface}"
        self._descriptor = -1
        self._count = b""
        self._settling = False
        self._unknown = False

    def arrived(self) -> bool:
        """Whether a packet came in since the call before the last one: the kernel counts a packet before its rules
        refuse it, so one look more is needed. Also where that cannot be known."""
        if self._unknown:
            return True
        try:
            if self._descriptor < 0:
                self._open()
            count = os.pread(self._descriptor, 32, 0)
        except OSError:  # the wire has gone, or /sys shows another network namespace
            self.close()
            self._unknown = True
            return True
        before, self._count = self._count, count
        settling, self._settling = self._settling, count != before
        return self._settling or settling

    def _open(self) -> None:
        """/sys shows the namespace that it was mounted in, which need not be ours, and may have an interface of that
        name, too."""
        if self._read("ifindex") != str(socket.if_nametoindex(self._interface)) or self._read("ifalias") != self._alias:
            raise OSError(f"{self._folder} is not the interface of that name here")
        self._descriptor = os.open(f"{self._folder}/statistics/rx_packets", os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, name: str) -> str:
        with opened(f"{self._folder}/{name}", os.O_RDONLY) as file:
            return os.read(file, 512).decode(errors="replace").strip()

    def forget(self) -> None:
        """The next call says that a packet came: what it led to is still to be looked at."""
        self._count = b""

    def close(self) -> None:
        self.forget()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

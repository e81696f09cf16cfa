"""Detects an event loop that hangs, logs where every thread stands, and ends the daemon if the loop stays so.

While the loop hangs no client is answered. Sandboxes outlive the daemon, so a daemon that ended is better than one
that hangs: systemd or the next command starts another, which goes on with them.

The watchdog's thread checks the loop's heartbeat. Behind it is faulthandler's thread, which needs no interpreter lock:
it acts when the watchdog's thread cannot run because something holds that lock for good. It counts from the last time
that the watchdog's thread ran; so it also ends a daemon that was stopped (SIGSTOP, a frozen cgroup) for longer than
that, when the daemon goes on.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import socket
import threading
import time
from contextlib import closing
from typing import Final

SAID: Final = 10.0  # seconds without a heartbeat, after which the log says where every thread stands
ENDED: Final = 60.0  # and after which the daemon is ended
MARGIN: Final = 30.0  # more, until faulthandler ends it
BEAT: Final = 1.0
STOPPED: Final = 5.0  # the watchdog's thread did not run for that long: the whole process was stopped, not the loop


class Watchdog:
    """Watches the loop that runs when it is entered. `log` is a descriptor that stays open."""

    def __init__(self, log: int, *, said: float = SAID, ended: float = ENDED) -> None:
        self._log = log
        self._said_after, self._ended_after = said, ended
        self._last = time.monotonic()  # beat
        self._timer: asyncio.TimerHandle | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._systemd = is_watched_by_systemd()

    def __enter__(self) -> None:
        faulthandler.enable(self._log)  # systemd's own watchdog ends the daemon with SIGABRT
        self._beat()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()

    def _beat(self) -> None:
        self._last = time.monotonic()
        if self._systemd:
            tell_systemd(b"WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(BEAT, self._beat)

    def _watch(self) -> None:
        said, looked = False, time.monotonic()
        while not self._leaving.is_set():
            faulthandler.dump_traceback_later(self._ended_after + MARGIN, exit=True, file=self._log)
            self._leaving.wait(BEAT)
            now = time.monotonic()
            if now - looked > STOPPED:
                self._last = now
            looked, silent = now, now - self._last
            if silent < self._said_after:
                said = False
            elif not said:
                said = True
                self._say(f"loop_stuck seconds={silent:.0f}: the event loop does not turn; where every thread stands:")
                faulthandler.dump_traceback(self._log, all_threads=True)
            if silent >= self._ended_after:
                self._say(f"loop_dead seconds={silent:.0f}: the daemon ends; sandboxes live on, and the next goes on")
                os._exit(1)

    def _say(self, text: str) -> None:
        """Writes to the log directly: the loop may hold the locks of `logging`."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 CRITICAL k8e.daemon {text}\n"
        try:
            os.write(self._log, line.encode())
        except OSError:
            pass  # a full disk does not stop the watchdog


def is_watched_by_systemd() -> bool:
    """Whether systemd expects heartbeats (WatchdogSec= in the unit)."""
    wanted = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    return bool(os.environ.get("WATCHDOG_USEC")) and wanted == str(os.getpid())


def tell_systemd(message: bytes) -> None:
    """Notifies systemd, if systemd started the daemon. Never waits: one lost heartbeat does no harm."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with closing(socket.socket(socket.AF_UNIX, kind)) as notifier:
            try:
                notifier.sendto(message, "\0" + address[1:] if address.startswith("@") else address)
            except OSError:
                pass

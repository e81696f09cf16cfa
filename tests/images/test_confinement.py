"""The process that unpacks a layer has nothing but the directory that it fills, and ends with its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from k8e.engine.local.images import Store
from k8e.engine.local.images.layers import Unpacked, unpack
from k8e.engine.local.images.limits import USUAL
from k8e.engine.local.layout import Layout
from tests.core.bare_engine import find_processes
from tests.images.builder import build, entry, make_tar, write_layout

DEADLINE = 60.0
KEPT = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 27  # CHOWN, DAC_OVERRIDE, FOWNER, FSETID, MKNOD


def wait_for(question: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not question():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Halting:
    """A layer of which the rest comes when the test says so."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._parts = [content[:1024], content[1024:], b""]
        self.go_on = threading.Event()

    def read(self, size: int, /) -> bytes:
        if len(self._parts) < 3:
            assert self.go_on.wait(DEADLINE)
        return self._parts.pop(0)


def test_the_unpacker_has_given_up_everything_but_its_directory(tmp_path: Path) -> None:
    target = tmp_path / "layer"
    target.mkdir()
    # More than it reads ahead: it is at work when we look.
    layer = Halting(make_tar(entry("first", b"1"), entry("second", b"2")) + bytes(3 << 20))
    layer._parts[0], layer._parts[1] = layer._content[: 2 << 20], layer._content[2 << 20 :]
    made: list[Unpacked] = []
    thread = threading.Thread(
        target=lambda: made.append(unpack(layer, 1 << 30, target, USUAL, threading.Event(), lambda _: None))
    )
    thread.start()
    try:
        wait_for((target / "first").exists, "it never began")
        (pid,) = find_processes(f"unpacker.py\0{target}")
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
        assert [int(status[f"Cap{name}"], 16) for name in ("Eff", "Prm", "Bnd", "Inh", "Amb")] == [KEPT] * 3 + [0, 0]
        assert status["NoNewPrivs"] == "1"
        assert status["Uid"].split() == ["65534"] * 4
        assert status["Groups"].strip() == ""
        assert {int(name) for name in os.listdir(f"/proc/{pid}/fd")} <= {0, 1, 2, 3, 4}
        for kind in ("mnt", "net", "ipc", "uts"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
        mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
        assert len(mounts) == 1, "there is nothing else to be seen from there"
        assert {"nosuid", "nodev", "noexec"} <= set(mounts[0].split()[3].split(","))
        assert Path(f"/proc/{pid}/root/first").read_bytes() == b"1"
    finally:
        layer.go_on.set()
        thread.join(DEADLINE)
    assert made[0].entries == 2
    assert (target / "second").read_bytes() == b"2"


IMPORT = """
import asyncio, sys
from pathlib import Path
from k8e.engine.local.images import LocalImages
from k8e.engine.local.layout import Layout
layout = Layout(Path(sys.argv[1]), Path(sys.argv[1]))
asyncio.run(LocalImages(layout).add(Path(sys.argv[2]), lambda _: None))
"""


def test_who_is_killed_takes_the_unpacker_along_and_the_next_one_clears_up(layout: Layout, tmp_path: Path) -> None:
    layer = make_tar(*(entry(f"d{number % 50}/{number}", b"x" * 100) for number in range(20_000)))
    archive = write_layout(tmp_path / "image.tar", build(layer))
    process = subprocess.Popen([sys.executable, "-c", IMPORT, layout.state, archive])
    try:
        wait_for(lambda: any(layout.layers.glob(".new-*/content/d49")), "it never began")
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not find_processes(f"unpacker.py\0{layout.state}"), "an unpacker lives on")
    assert list(layout.layers.glob(".new-*")), "something is left, or this shows nothing"
    subprocess.run([sys.executable, "-c", IMPORT, layout.state, archive], check=True)
    (image,) = Store(layout).list()
    assert tuple(layout.layers.iterdir()) == Store(layout).layers_of(image.digest)
    assert list((layout.oci / "work").iterdir()) == []

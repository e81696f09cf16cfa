"""The filter around gVisor's processes, applied by this machine's kernel to a thread of the test."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.engine.local.runtime.host_filter import build_filter
from k8e.engine.local.system.calls import seccomp
from k8e.engine.tasks import in_own_thread

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a filter without no_new_privs needs root")

LIBC = ctypes.CDLL(None, use_errno=True)
MODES = st.integers(0, 0o7777)


def under(work: Callable[[], object], *, set_ids: bool) -> int:
    """The errno that it met, or 0."""

    def run() -> int:
        seccomp(build_filter(platform.machine(), set_ids=set_ids))
        try:
            work()
        except OSError as error:
            return error.errno or -1
        return 0

    return in_own_thread(run)


def call(number: int, *arguments: object) -> None:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    ctypes.set_errno(0)
    if LIBC.syscall(ctypes.c_long(number), *words) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filter") / "file"
    path.touch()
    return path


@given(mode=MODES, set_ids=st.booleans())
def test_set_id_bits_are_refused_where_they_are_not_allowed(file: Path, mode: int, set_ids: bool) -> None:
    expected = errno.EPERM if mode & 0o6000 and not set_ids else 0
    made = file.with_name("made")
    file.chmod(0o600)

    def create(flags: int) -> None:
        made.unlink(missing_ok=True)
        os.close(os.open(made, flags | os.O_RDWR, mode))

    def make_node() -> None:
        made.unlink(missing_ok=True)
        os.mknod(made, stat.S_IFREG | mode)

    def change_open() -> None:
        handle = os.open(file, os.O_RDWR)
        try:
            os.fchmod(handle, mode)
        finally:
            os.close(handle)

    def change_in_folder() -> None:
        handle = os.open(file.parent, os.O_RDONLY)
        try:
            os.chmod(file.name, mode, dir_fd=handle)
        finally:
            os.close(handle)

    for work in (
        lambda: os.chmod(file, mode),
        change_open,
        change_in_folder,
        lambda: call(452, -100, os.fsencode(file), mode, 0),
        lambda: create(os.O_CREAT),
        make_node,
        lambda: os.close(os.open(file.parent, os.O_TMPFILE | os.O_RDWR, mode)),
    ):
        assert under(work, set_ids=set_ids) == expected
    assert set_ids or not file.stat().st_mode & 0o6000


@pytest.mark.parametrize("set_ids", [True, False])
def test_other_ways_to_the_same_are_refused_always(file: Path, set_ids: bool) -> None:
    how = struct.pack("<QQQ", os.O_CREAT | os.O_RDWR, 0o4755, 0)
    path = os.fsencode(file.with_name("other"))
    assert under(lambda: call(437, -100, path, how, len(how)), set_ids=set_ids) == errno.ENOSYS
    assert under(lambda: call(425, 8, bytes(120)), set_ids=set_ids) == errno.ENOSYS
    numbers = {"x86_64": (303, 304), "aarch64": (264, 265)}[platform.machine()]
    for number in numbers:
        assert under(lambda number=number: call(number, -100, b"/", bytes(64), bytes(8), 0), set_ids=set_ids) == 1  # type: ignore[misc]
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        assert under(lambda kind=kind: os.mknod(path, kind | 0o666, os.makedev(1, 5)), set_ids=set_ids) == 1  # type: ignore[misc]
    assert under(lambda: os.mkfifo(file.with_name(f"pipe-{set_ids}")), set_ids=set_ids) == 0


def test_another_spelling_of_a_call_is_no_way_around(file: Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("x32 is x86_64's")
    assert under(lambda: call(0x40000000 | 90, os.fsencode(file), 0o4755), set_ids=False) == errno.ENOSYS


def test_what_a_thread_starts_inherits_it(file: Path) -> None:
    file.chmod(0o600)  # other tests may have left any mode

    def start() -> None:
        pid = os.posix_spawn("/bin/chmod", ["chmod", "4755", os.fspath(file)], {})
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == 1

    assert under(start, set_ids=False) == 0
    assert not file.stat().st_mode & stat.S_ISUID

"""A sandbox may write into the directory of its socket; nothing it puts there leads the host astray."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.link.dial import SocketDialer, UnixDialer
from k8e.link.errors import LinkLost, ProtocolViolation


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen(1)
        yield listener


async def test_a_socket_is_connected_to(listener: socket.socket, tmp_path: Path) -> None:
    with await UnixDialer(tmp_path / "agent")() as connection:
        assert connection.gettimeout() == 0
        peer, _ = listener.accept()
        with peer:
            peer.send(b"x")
            assert connection.recv(1) == b"x"


async def test_a_symlink_is_not_followed(listener: socket.socket, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("agent")
    with pytest.raises(ProtocolViolation):
        await UnixDialer(tmp_path / "link")()


async def test_the_directory_itself_may_be_a_symlink(listener: socket.socket, tmp_path: Path) -> None:
    (tmp_path / "directory").symlink_to(".")
    (await UnixDialer(tmp_path / "directory" / "agent")()).close()


@pytest.mark.parametrize("kind", ["file", "directory", "fifo"])
async def test_what_is_no_socket_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "agent"
    if kind == "file":
        path.touch()
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(ProtocolViolation):
        await UnixDialer(path)()


async def test_what_is_not_there_may_come(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await UnixDialer(tmp_path / "agent")()


async def test_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        here = os.open(directory, os.O_PATH)
        listener.bind(f"/proc/self/fd/{here}/agent")
        os.close(here)
        listener.listen(1)
        (await UnixDialer(directory / "agent")()).close()


async def test_a_full_backlog_is_worth_another_try_and_not_a_connection(
    listener: socket.socket, tmp_path: Path
) -> None:
    dialer = UnixDialer(tmp_path / "agent")
    waiting = []
    try:
        with pytest.raises(BlockingIOError):
            for _ in range(10):
                waiting.append(await dialer())
    finally:
        for connection in waiting:
            connection.close()
    assert waiting


async def test_no_descriptor_is_left_behind(listener: socket.socket, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = set(os.listdir("/proc/self/fd"))
    for name in ("file", "missing"):
        with pytest.raises((ProtocolViolation, FileNotFoundError)):
            await UnixDialer(tmp_path / name)()
    assert set(os.listdir("/proc/self/fd")) == before


async def test_an_existing_connection_can_be_had_once() -> None:
    ours, theirs = socket.socketpair()
    dialer = SocketDialer(ours)
    with theirs, await dialer() as connection:
        assert connection is ours
        with pytest.raises(LinkLost):
            await dialer()

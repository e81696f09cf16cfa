"""The unix socket: its permissions, from its first moment on."""

from __future__ import annotations

import grp
import os
import socket
import stat
from pathlib import Path

import pytest

from k8e.doors.http import server
from k8e.doors.http.server import bind_socket


@pytest.fixture(autouse=True)
def _loose_umask() -> object:
    previous = os.umask(0)
    yield
    os.umask(previous)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_is_its_owners_alone_without_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GROUP", "no-such-group-here")
    with bind_socket(tmp_path / "k8e.sock"):
        assert mode_of(tmp_path / "k8e.sock") == 0o600


def test_is_the_groups_too_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = grp.getgrgid(os.getgid())
    monkeypatch.setattr(server, "GROUP", group.gr_name)
    with bind_socket(tmp_path / "k8e.sock"):
        assert mode_of(tmp_path / "k8e.sock") == 0o660
        assert (tmp_path / "k8e.sock").stat().st_gid == group.gr_gid


def test_replaces_what_a_dead_daemon_left(tmp_path: Path) -> None:
    path = tmp_path / "k8e.sock"
    bind_socket(path).close()
    with bind_socket(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_leaves_nothing_else_behind(tmp_path: Path) -> None:
    with bind_socket(tmp_path / "k8e.sock"):
        assert os.listdir(tmp_path) == ["k8e.sock"]


def test_leaves_nothing_at_all_when_it_fails(tmp_path: Path) -> None:
    (tmp_path / "k8e.sock").mkdir()
    with pytest.raises(OSError, match="directory"):
        bind_socket(tmp_path / "k8e.sock")
    assert os.listdir(tmp_path) == ["k8e.sock"]


def test_does_not_change_the_umask_of_others(tmp_path: Path) -> None:
    with bind_socket(tmp_path / "k8e.sock"):
        assert os.umask(0) == 0

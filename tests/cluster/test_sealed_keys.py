"""The authorities' keys on their way to a further server."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from k8e.cluster.errors import ClusterError
from k8e.cluster.member.layout import Layout
from k8e.cluster.member.servers.key_files import list_key_files, read_keys, write_keys
from k8e.cluster.trust.join_token import BadToken, JoinToken
from k8e.cluster.trust.sealed_keys import open_keys, seal_keys

TOKEN = JoinToken.make("ab" * 32, server=True)
KEYS = {"server/ca.key": b"\x00key\xff", "encryption.key": b""}


def test_the_token_opens_what_was_sealed_for_it() -> None:
    assert open_keys(seal_keys(KEYS, TOKEN), TOKEN) == KEYS


def test_sealed_text_does_not_contain_the_keys_and_is_never_the_same() -> None:
    first, second = seal_keys({"a": b"plain-text-of-a-key"}, TOKEN), seal_keys({"a": b"plain-text-of-a-key"}, TOKEN)
    assert b"plain" not in first
    assert first != second


@pytest.mark.parametrize("position", [0, 11, 12, 40, -1])
def test_one_changed_bit_is_noticed(position: int) -> None:
    sealed = bytearray(seal_keys(KEYS, TOKEN))
    sealed[position] ^= 1
    with pytest.raises(BadToken) as caught:
        open_keys(bytes(sealed), TOKEN)
    assert caught.value.code == "keys_sealed"


@pytest.mark.parametrize("end", [0, 5, 12, 20])
def test_a_part_of_it_is_refused(end: int) -> None:
    with pytest.raises(BadToken):
        open_keys(seal_keys(KEYS, TOKEN)[:end], TOKEN)


@pytest.mark.parametrize("change", [{"key": "00" * 32}, {"id": "aaaaaa"}, {"fingerprint": "cd" * 32}])
def test_another_token_does_not_open_it(change: dict[str, str]) -> None:
    with pytest.raises(BadToken):
        open_keys(seal_keys(KEYS, TOKEN), dataclasses.replace(TOKEN, **change))


def make_server(folder: Path) -> Layout:
    layout = Layout(folder)
    write_keys(layout, {name: f"of {folder.name}: {name}".encode() for name in list_key_files(layout)})
    return layout


def test_a_server_has_the_keys_that_it_was_given(tmp_path: Path) -> None:
    first = make_server(tmp_path / "first")
    second = Layout(tmp_path / "second")
    for _ in range(2):
        write_keys(second, read_keys(first))
        assert read_keys(second) == read_keys(first)
    assert {path.stat().st_mode & 0o777 for path in second.authorities.rglob("*.key")} == {0o600}


def test_a_server_of_another_cluster_takes_no_keys(tmp_path: Path) -> None:
    first, other = make_server(tmp_path / "first"), make_server(tmp_path / "other")
    before = read_keys(other)
    with pytest.raises(ClusterError) as caught:
        write_keys(other, read_keys(first))
    assert caught.value.code == "other_cluster"
    assert read_keys(other) == before


def test_keys_with_names_of_other_files_are_refused(tmp_path: Path) -> None:
    keys = read_keys(make_server(tmp_path / "first"))
    with pytest.raises(ClusterError) as caught:
        write_keys(Layout(tmp_path / "second"), {**keys, "../../../etc/passwd": b""})
    assert caught.value.code == "keys_unknown"
    assert not (tmp_path / "second").exists()


def test_a_server_without_one_of_its_keys_gives_none(tmp_path: Path) -> None:
    layout = make_server(tmp_path / "first")
    layout.encryption_key.unlink()
    with pytest.raises(ClusterError) as caught:
        read_keys(layout)
    assert caught.value.code == "keys_missing"

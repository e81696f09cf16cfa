"""Backups, with a real etcd and the real etcdutl."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from k8e.cluster.api import Api
from k8e.cluster.build import Components, default_cache, find_components
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.backups.backup import check_backup, is_due, list_backups, make_backup, remove_old
from k8e.cluster.member.backups.restoration import restore_backup
from k8e.cluster.member.layout import Layout
from k8e.cluster.member.servers.key_files import list_key_files, read_keys, write_keys
from k8e.cluster.trust.authority import Authority, Leaf
from k8e.cluster.trust.leaves import Leaves, write_file

PATIENCE = 60.0
HERE = IPv4Address("127.97.0.1")


@pytest.fixture(scope="module")
def components() -> Components:
    found = find_components(default_cache())
    if found is None:
        pytest.skip("the components are not built: make cluster ARGS=build")
    return found


class Etcd:
    """One member, on a loopback address of its own."""

    def __init__(self, components: Components, layout: Layout, folder: Path) -> None:
        self.layout = layout
        self._program = components.program("etcd")
        authority = Authority.open(folder / "ca", "k8e etcd", time.time())
        self._authority = write_file(folder / "ca.crt", authority.certificate)
        leaves = Leaves(folder / "tls")
        self._own = leaves.write("etcd", authority, Leaf("etcd", hosts=(str(HERE),)))
        self.api = Api(f"https://{HERE}:2379", self._authority, leaves.write("client", authority, Leaf("test")))

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        peer, clients = f"https://{HERE}:2380", f"https://{HERE}:2379"
        tls = [f"--{kind}{name}={path}" for kind in ("", "peer-") for name, path in self._files().items()]
        argv = [str(self._program), f"--data-dir={self.layout.etcd}", "--name=one", f"--initial-cluster=one={peer}"]
        argv += [f"--initial-advertise-peer-urls={peer}", f"--listen-peer-urls={peer}", "--unsafe-no-fsync"]
        argv += [f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}", "--log-level=error", *tls]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + PATIENCE
            while (answer := asyncio.run(self.api.get("/readyz"))) is None or answer[0] != 200:
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.05)
            yield
        finally:
            process.kill()
            process.wait()

    def _files(self) -> dict[str, Path]:
        return {"cert-file": self._own, "key-file": self._own, "trusted-ca-file": self._authority}

    def ask(self, verb: str, **body: object) -> dict[str, object]:
        answer = asyncio.run(self.api.request("POST", f"/v3/kv/{verb}", body))
        assert answer is not None
        assert answer[0] == 200, answer
        found: dict[str, object] = json.loads(answer[1])
        return found

    def put(self, key: str, value: bytes) -> None:
        self.ask("put", key=write(key.encode()), value=write(value))

    def get(self, key: str) -> object:
        return self.ask("range", key=write(key.encode())).get("kvs")


def write(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.fixture
def etcd(components: Components, tmp_path: Path) -> Etcd:
    layout = Layout(tmp_path / "state", tmp_path / "run")
    write_keys(layout, {name: f"content of {name}".encode() for name in list_key_files(layout)})
    return Etcd(components, layout, tmp_path)


def test_what_was_backed_up_is_there_again_and_what_came_later_is_not(
    etcd: Etcd, components: Components, tmp_path: Path
) -> None:
    layout, etcdutl = etcd.layout, components.program("etcdutl")
    with etcd.run():
        for number in range(200):
            etcd.put(f"before/{number}", os.urandom(4096))
        kept = etcd.get("before/7")
        backup = make_backup(layout, etcd.api, etcdutl, "one")
        etcd.put("after", b"1")
    assert backup.keys >= 200
    assert backup.path.stat().st_mode & 0o777 == 0o600
    assert check_backup(backup.path, etcdutl).body == backup.body
    keys = read_keys(layout)
    layout.encryption_key.unlink()
    restored = restore_backup(layout, backup.path, etcdutl, "one", HERE)
    assert restored.body == backup.body
    assert read_keys(layout) == keys
    assert layout.etcd.with_name("etcd-before-restore").is_dir()
    assert not list(layout.server.glob(".restore-*"))
    for path in (layout.etcd, *layout.etcd.rglob("*")):
        assert path.stat().st_uid > 1_900_000_000
    with etcd.run():
        found = etcd.get("before/7")
        assert isinstance(found, list)
        assert isinstance(kept, list)
        assert found[0]["value"] == kept[0]["value"]
        assert etcd.get("after") is None
        header = etcd.ask("range", key=write(b"x"))["header"]
        assert isinstance(header, dict)
        assert int(header["revision"]) > 1_000_000_000  # programs notice that the past has changed


def change(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x40
    path.write_bytes(content)


def test_a_damaged_backup_is_refused_and_nothing_is_changed(etcd: Etcd, components: Components) -> None:
    layout, etcdutl = etcd.layout, components.program("etcdutl")
    with etcd.run():
        etcd.put("a", b"b" * 100_000)
        path = make_backup(layout, etcd.api, etcdutl, "one").path
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        places = {each.name: each.offset_data + each.size // 2 for each in archive.getmembers()}
    for position in (*places.values(), 20):
        path.write_bytes(whole)
        change(path, position)
        with pytest.raises(ClusterError) as caught:
            restore_backup(layout, path, etcdutl, "one", HERE)
        assert caught.value.code == "backup_damaged", position
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ClusterError):
        check_backup(path, etcdutl)
    assert not layout.etcd.with_name("etcd-before-restore").exists()
    path.write_bytes(whole)
    check_backup(path, etcdutl)


def test_a_backup_with_files_that_its_list_does_not_name_is_refused(etcd: Etcd, components: Components) -> None:
    etcdutl = components.program("etcdutl")
    with etcd.run():
        path = make_backup(etcd.layout, etcd.api, etcdutl, "one").path
    with tarfile.open(path, "a") as archive:
        member = tarfile.TarInfo("keys/../../../etc/passwd")
        archive.addfile(member, io.BytesIO(b""))
    with pytest.raises(ClusterError) as caught:
        check_backup(path, etcdutl)
    assert caught.value.code == "backup_damaged"


def test_a_backup_of_another_cluster_is_refused(etcd: Etcd, components: Components) -> None:
    layout, etcdutl = etcd.layout, components.program("etcdutl")
    with etcd.run():
        path = make_backup(layout, etcd.api, etcdutl, "one").path
    write_file(layout.authorities / "server" / "ca.key", b"of another cluster")
    with pytest.raises(ClusterError) as caught:
        restore_backup(layout, path, etcdutl, "one", HERE)
    assert caught.value.code == "other_cluster"


def test_no_backup_is_made_without_etcd(etcd: Etcd, components: Components) -> None:
    with pytest.raises(ClusterError) as caught:
        make_backup(etcd.layout, etcd.api, components.program("etcdutl"), "one")
    assert caught.value.code == "snapshot_failed"
    assert list(etcd.layout.backups.iterdir()) == []


def test_backups_are_made_on_a_schedule_and_the_oldest_are_removed(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert is_due(layout, time.time())
    layout.backups.mkdir(parents=True)
    for day in range(1, 9):
        path = layout.backups / f"k8e-backup-2026010{day}T000000Z.tar"
        path.touch()
    (layout.backups / "of-a-person.tar").touch()
    assert not is_due(layout, time.time())
    assert is_due(layout, time.time() + 13 * 3600)
    assert is_due(layout, time.time() - 3600)  # the clock was set back
    assert [path.name[11:19] for path in remove_old(layout, 6)] == ["20260101", "20260102"]
    assert len(list_backups(layout)) == 6
    assert (layout.backups / "of-a-person.tar").exists()

"""The folder of programs: complete, root's alone, and what its hashes say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from k8e.cluster.errors import StartFailed
from k8e.cluster.image import pack
from k8e.cluster.programs import SANDBOX_IMAGE, list_names, open_programs, write_sums
from k8e.cluster.sandbox_image import REPOSITORY, read_name, write_sandbox_image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All names, without content, where every user can reach them."""
    found = tmp_path / "programs"
    found.mkdir()
    for name in list_names():
        (found / name).write_bytes(b"")
        (found / name).chmod(0o755)
    for each in (found, *found.parents):
        if each.stat().st_uid == 0 and not each.stat().st_mode & 0o001:
            each.chmod(0o711)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the programs have to be root's")
class TestFolder:
    def test_is_used_when_it_is_complete(self, folder: Path) -> None:
        assert open_programs(folder).program("kubelet") == folder / "kubelet"

    def test_without_a_program_is_refused_by_name(self, folder: Path) -> None:
        (folder / "kubelet").unlink()
        with pytest.raises(StartFailed) as refused:
            open_programs(folder)
        assert (refused.value.code, refused.value.detail) == ("programs_missing", "kubelet")

    @pytest.mark.parametrize("mode", [0o757, 0o775])
    def test_that_others_can_change_is_refused(self, folder: Path, mode: int) -> None:
        (folder / "etcd").chmod(mode)
        with pytest.raises(StartFailed) as refused:
            open_programs(folder)
        assert refused.value.code == "programs_untrusted"

    def test_of_another_user_is_refused(self, folder: Path) -> None:
        os.chown(folder / "etcd", 1000, 1000)
        with pytest.raises(StartFailed) as refused:
            open_programs(folder)
        assert refused.value.code == "programs_untrusted"

    def test_that_the_control_plane_s_users_cannot_reach_is_refused(self, folder: Path) -> None:
        folder.chmod(0o700)
        with pytest.raises(StartFailed) as refused:
            open_programs(folder)
        assert refused.value.code == "programs_untrusted"


def test_the_hashes_are_what_sha256sum_reads(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "kubelet").write_bytes(b"a")
    (tmp_path / "images" / "b.tar").write_bytes(b"b")
    assert [line.split("  ")[1] for line in write_sums(tmp_path).read_text().splitlines()] == [
        "images/b.tar",
        "kubelet",
    ]
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "kubelet").write_bytes(b"c")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1


def test_the_image_of_sandboxes_is_named_by_its_content(tmp_path: Path) -> None:
    names = []
    for content in (b"one", b"two", b"one"):
        root = tmp_path / "root.tar"
        root.write_bytes(pack({"etc/os-release": (content, 0o644)}, {}))
        names.append(read_name(write_sandbox_image(tmp_path, root, lambda text: None)))
    assert names[0] == names[2] != names[1]
    assert names[0].startswith(f"{REPOSITORY}:")


def test_an_archive_without_an_image_is_explained(tmp_path: Path) -> None:
    archive = tmp_path / SANDBOX_IMAGE
    archive.parent.mkdir()
    archive.write_bytes(b"no archive")
    with pytest.raises(StartFailed) as refused:
        read_name(archive)
    assert refused.value.code == "images_missing"

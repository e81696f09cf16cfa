"""Which files are root's alone: the installed program, and the Python that it runs on, are to be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k8e.cli.install.places import has_members, is_roots, is_trusted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="looks at root's files")


def test_the_distribution_s_python_is_trusted_and_one_in_root_s_home_is_not(tmp_path: Path) -> None:
    assert is_trusted(Path("/usr/bin/python3"))
    assert not is_trusted(Path("/root"))
    assert not is_trusted(Path("/no/such/file"))


def test_what_others_can_change_is_not_root_s_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o755)
    assert is_roots(file)
    file.chmod(0o757)
    assert not is_roots(file)
    file.chmod(0o775)
    assert is_roots(file), "root's group is root's"
    os.chown(file, 0, 65534)  # the group of the account `nobody`
    assert has_members(65534)
    assert not is_roots(file)
    os.chown(file, 0, 54321)
    assert is_roots(file), "a group without members"
    os.chown(file, 65534, 0)
    assert not is_roots(file)

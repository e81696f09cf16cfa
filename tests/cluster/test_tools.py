"""A machine that lacks what every member needs is told so, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from k8e.cluster.errors import StartFailed
from k8e.cluster.member.member import require_tools


def test_tools_that_are_missing_are_named(tmp_path: Path) -> None:
    for name in ("runc", "ip"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(StartFailed) as refused:
        require_tools(str(tmp_path))
    assert (refused.value.code, refused.value.error) == ("tools_missing", "this machine has no nft")
    (tmp_path / "nft").write_text("#!/bin/sh\n")
    (tmp_path / "nft").chmod(0o755)
    require_tools(str(tmp_path))

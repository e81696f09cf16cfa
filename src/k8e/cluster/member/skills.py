"""The skill files of AI agents, staged on a server where tools look for them; replaced at every start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from k8e.cluster.member.layout import Layout

_PACKAGE: Final = Path(__file__).resolve().parents[2]


def stage_skills(layout: Layout) -> None:
    """They are beside the code in a wheel, and at the root of a checkout."""
    source = next(folder for folder in (_PACKAGE / "_skills", _PACKAGE.parents[1] / "skills") if folder.is_dir())
    draft = layout.skills.with_name(".skills")
    for folder in (draft, layout.skills):
        if folder.exists():
            shutil.rmtree(folder)
    shutil.copytree(source, draft, copy_function=shutil.copyfile)
    draft.rename(layout.skills)

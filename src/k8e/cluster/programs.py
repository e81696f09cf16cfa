"""The folder with the cluster's programs, as an installation has it: all of them side by side, `images/` with archives
for the nodes, and SHA256SUMS. `k8e cluster build` makes it; it can be copied to other machines.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import Final

from k8e.cluster.build import Components
from k8e.cluster.components import ADDONS, COMPONENTS
from k8e.cluster.errors import StartFailed

USUAL: Final = Path("/usr/local/lib/k8e-cluster")
SUMS: Final = "SHA256SUMS"
SANDBOX_IMAGE: Final = "images/sandbox.oci.tar"


def open_programs(folder: Path) -> Components:
    """Returns the programs of a folder, if all are there, every user can reach them, and only root can change them: the
    control plane's run as users without rights, the others as root."""
    missing = [name for name in list_names() if not (folder / name).is_file()]
    if missing:
        raise StartFailed(
            "programs_missing",
            f"the cluster's programs are not in {folder}",
            detail=", ".join(missing),
            hint="`k8e cluster build` makes them, here or on a machine that has Go; --bin-dir names another folder",
        )
    real = folder.resolve()
    for path in (*(real / name for name in list_names()), real, *real.parents):
        found = path.stat()
        if found.st_uid != 0 or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
            raise _untrusted(path, "users other than root can change it")
        if not found.st_mode & 0o001 and not path.suffix:
            raise _untrusted(path, "not every user can reach it")
    addons = [each for each in ADDONS if all((real / name).is_file() for name in each.packages)]
    return Components({component.name: real for component in (*COMPONENTS, *addons)})


def list_names() -> list[str]:
    """The programs and files without which there is no cluster: all but add-ons."""
    names: list[str] = []
    for component in COMPONENTS:
        names += [*component.packages, *(Path(file).name for file in component.files)]
    return names


def copy_programs(components: Components, target: Path) -> None:
    """Puts all programs and files of a build into one folder; what is there already is replaced whole."""
    target.mkdir(mode=0o755, parents=True, exist_ok=True)
    for component in (*COMPONENTS, *(each for each in ADDONS if each.name in components.folders)):
        for name in component.packages:
            _place(components.program(name), target / name, 0o755)
        for file in component.files:
            _place(components.file(component.name, Path(file).name), target / Path(file).name, 0o644)


def write_sums(folder: Path) -> Path:
    """Writes the hash of every file, as sha256sum(1) reads them."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS):
        lines.append(f"{digest_file(path)}  {path.relative_to(folder)}\n")
    draft = folder / f".{SUMS}"
    draft.write_text("".join(lines))
    draft.replace(folder / SUMS)
    return folder / SUMS


def digest_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _place(source: Path, target: Path, mode: int) -> None:
    draft = target.with_name(f".{target.name}.new")
    draft.unlink(missing_ok=True)
    shutil.copyfile(source, draft)
    os.chmod(draft, mode)
    draft.replace(target)


def _untrusted(path: Path, cause: str) -> StartFailed:
    hint = f"chown root {path}; chmod 0755 {path}; or let --bin-dir name another folder"
    return StartFailed("programs_untrusted", f"{path} cannot be used for programs", detail=cause, hint=hint)

"""The files of an installation besides the program: the unit for systemd, completions and man pages, made from the
command lines' own tables. Each has a line that says where it comes from: one without it is not ours, and is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path

from k8e.cli.completion import SCRIPTS
from k8e.cli.install.man_page import write_page
from k8e.cli.install.places import COMMANDS, CURRENT, LIBRARY, PROGRAMS, SHARED, UNIT, list_folders_above
from k8e.cli.install.record import write_file

MARK = "Made by `k8e doctor --fix`, which replaces it; `k8e uninstall` removes it."
COMPLETIONS = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "/etc/fish/completions/{}.fish",  # below /usr/local fish looks only where XDG_DATA_DIRS says so
}


def list_files() -> Iterator[tuple[str, Path, str]]:
    """For each its kind, its place and its text."""
    unit = resources.files("k8e.cli.install").joinpath("k8e.service").read_text()
    yield "systemd unit", UNIT, f"# {MARK}\n{unit.replace('@K8E@', str(CURRENT / 'bin' / 'k8e'))}"
    version = metadata.version("k8e")
    for program in ("k8e", "agentkernel"):
        yield "man pages", SHARED / "man" / "man1" / f"{program}.1", f'.\\" {MARK}\n{write_page(program, version)}'
        for shell, place in COMPLETIONS.items():
            first, _, rest = SCRIPTS[shell].replace("PROGRAM", program).partition("\n")
            yield "completions", SHARED / place.format(program), f"{first}\n# {MARK}\n{rest}"
    yield "man pages", SHARED / "man" / "man1" / "k8e-sandbox.1", f'.\\" {MARK}\n.so man1/k8e.1\n'


def is_ours(path: Path) -> bool:
    try:
        return path.is_file() and not path.is_symlink() and MARK in path.read_text()
    except (OSError, UnicodeDecodeError):
        return False


def install_files() -> Iterator[tuple[str, list[Path], list[Path]]]:
    """For each kind: those that were written, and those that are in the way."""
    written: dict[str, list[Path]] = {}
    strange: dict[str, list[Path]] = {}
    for kind, path, text in list_files():
        written.setdefault(kind, [])
        if os.path.lexists(path) and not is_ours(path):
            strange.setdefault(kind, []).append(path)
        elif not path.exists() or path.read_text() != text:
            write_file(path, text.encode())
            written[kind].append(path)
    for kind, paths in written.items():
        yield kind, paths, strange.get(kind, [])


def find_files() -> list[Path]:
    """All that is there of an installation but the program itself."""
    links = [COMMANDS / name for name in PROGRAMS]
    own = [link for link in links if link.is_symlink() and LIBRARY in Path(os.readlink(link)).parents]
    return [*own, *(path for _, path, _ in list_files() if is_ours(path))]


def remove_files(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
        for folder in list_folders_above(path):
            try:
                folder.rmdir()
            except OSError:
                break  # others have files there

"""Prepares an image's root for a sandbox: adds the engine's files, and finds out what commands there start with.

All of it is written to the sandbox's own upper layer, through the merged directory, before anything runs there. The
image is not trusted: its links are resolved inside, its files are read up to a bound, and its configuration is checked.
"""

from __future__ import annotations

import errno
import functools
import json
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from k8e.damage import Damaged, read_own
from k8e.engine import EngineError, Place
from k8e.engine.accounts import MAX_FILE, Account, UnknownUser, find_account, with_group, with_user
from k8e.engine.images import Image
from k8e.engine.local.disk.tree import TooDeep, copy_tree
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.roots.root_files import RootFiles
from k8e.engine.local.runtime.bundle import LOADER
from k8e.engine.local.system.calls import DIRECTORY, opened
from k8e.engine.local.toolchain.package_clients import certificates
from k8e.engine.local.toolchain.registries import CA_BUNDLE, Registries
from k8e.link.model import Identity

WORKSPACE: Final = "/workspace"
USUAL_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_POINTS: Final[Mapping[str, int]] = {
    "dev": 0o755,
    "proc": 0o555,
    "run": 0o755,
    "sys": 0o555,
    "tmp": 0o1777,
    "workspace": 0o755,
}
_FILES: Final = ("k8e-agent", LOADER.lstrip("/"))
_NO_HOME: Final = "/nonexistent"  # Debian's name for none
_MAX_BUNDLE: Final = 4 << 20
_MAX_ENV: Final = 128 << 10
_FAULTS_OF_THE_IMAGE: Final = (errno.ENOTEMPTY, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)
# pip: a sandbox is thrown away, so there is no system to break, and its root needs no warning. A module is compiled
# when it is imported first, which halves the CPU time of an installation.
_CLIENTS: Final = {
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_COMPILE": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "npm_config_update_notifier": "false",
}


@dataclass(frozen=True, slots=True)
class RootSpec:
    """The parts from which the root of a sandbox is prepared."""

    image: Image
    registries: Registries
    hostname: str
    own_workspace: bool = True  # nothing of the machine is mounted there


def place_mount_points(paths: SandboxPaths, first_id: int | None) -> None:
    """Makes the directories and files that the bundle mounts over: never links, which a runtime would follow. Also
    before a stopped sandbox is started, whose root may have replaced them."""
    with RootFiles(paths.root, first_id) as inside:
        for name, mode in _POINTS.items():
            inside.make_point(name, mode=mode)
        for name in _FILES:
            inside.make_point(name, file=True)


def prepare_root(paths: SandboxPaths, spec: RootSpec, first_id: int | None) -> Place:
    """Raises EngineError when the image cannot be a sandbox's, OSError when the disk cannot."""
    try:
        place_mount_points(paths, first_id)
        if spec.own_workspace:
            _fill_workspace(paths, spec.image)
        with RootFiles(paths.root, first_id) as inside, RootFiles(paths.workspace, first_id) as workspace:
            account = _find_account(inside, spec.image)
            place = _describe(spec, account)
            owner = (account.uid, account.gid)
            workspace.give("/", owner, 0o755)
            _write_names(inside, account, spec.hostname)
            _write_clients(inside, spec.registries)
            if account.home != _NO_HOME:
                _make_folder(inside, workspace, account.home, owner, 0o700 if account.uid == 0 else 0o755)
            _make_folder(inside, workspace, place.workdir.decode(errors="surrogateescape"), owner, 0o755)
    except OSError as error:
        if error.errno not in _FAULTS_OF_THE_IMAGE:
            raise
        named = f"{error.filename}: " if error.filename else ""
        raise fault(spec.image, f"it cannot be furnished: {named}{error.strerror}") from error
    return place


def _fill_workspace(paths: SandboxPaths, image: Image) -> None:
    """Copies what the image has at /workspace, which is about to be covered."""
    with opened(paths.root / "workspace", DIRECTORY) as source, opened(paths.workspace, DIRECTORY) as target:
        try:
            copy_tree(source, target)
        except TooDeep as error:
            raise fault(image, f"its /workspace is {error}") from error


def fault(image: Image, cause: str, hint: str = "") -> EngineError:
    return EngineError(f"image {image.digest[:19]}", cause, hint)


def _find_account(inside: RootFiles, image: Image) -> Account:
    passwd, group = (inside.read(f"/etc/{name}", MAX_FILE) or b"" for name in ("passwd", "group"))
    try:
        account = find_account(image.user, passwd, group)
    except UnknownUser as error:
        raise fault(image, f"{error}", "ask the maker of the image") from error
    return account if account.home else replace(account, home="/root" if account.uid == 0 else "/home/user")


def _write_names(inside: RootFiles, account: Account, hostname: str) -> None:
    hosts = f"127.0.0.1 localhost {hostname}\n::1 localhost ip6-localhost ip6-loopback\n"
    inside.write("/etc/hosts", hosts.encode())
    inside.write("/etc/hostname", f"{hostname}\n".encode())
    for name, complete in (("passwd", with_user), ("group", with_group)):
        before = inside.read(f"/etc/{name}", MAX_FILE) or b""
        after = complete(before, account)
        if after != before:
            inside.write(f"/etc/{name}", after)


def _write_clients(inside: RootFiles, registries: Registries) -> None:
    """Configures the machine's registries. The certificates that the image trusts stay."""
    for path, content in registries.files:
        if path == CA_BUNDLE:
            content = _join_bundles(inside.read(path, _MAX_BUNDLE) or b"", content)
        inside.write(path, content)


@functools.lru_cache(maxsize=8)
def _join_bundles(own: bytes, given: bytes) -> bytes:
    """Cached, because to parse hundreds of certificates takes longer than all the rest."""
    if not own:
        return given
    known = certificates(own.decode(errors="replace"))
    more = [text for digest, text in certificates(given.decode()).items() if digest not in known]
    return own + (b"" if own.endswith(b"\n") else b"\n") + "".join(more).encode()


def _make_folder(inside: RootFiles, workspace: RootFiles, path: str, owner: tuple[int, int], mode: int) -> None:
    below = path.removeprefix(WORKSPACE)
    if path != below and below[:1] in ("", "/"):
        inside, path = workspace, below  # what is there in the root is covered
    if not inside.is_folder(path or "/"):
        inside.make_folder(path, owner=owner, mode=mode)


def _describe(spec: RootSpec, account: Account) -> Place:
    image = spec.image
    told = dict(_check_env(image))
    env = {"PATH": USUAL_PATH, "HOME": account.home, **_CLIENTS, **dict(spec.registries.env), **told}
    # An image that sets variables of the dynamic linker is started without our loader.
    loader = "" if any(name.startswith("LD_") for name in told) else LOADER
    workdir = posixpath.normpath(f"/{image.workdir.lstrip('/')}") if image.workdir else WORKSPACE
    return Place(
        user=Identity(account.uid, account.gid, account.groups),
        home=_encode(env["HOME"]),
        workspace=_encode(WORKSPACE),
        env=tuple((_encode(name), _encode(value)) for name, value in sorted(env.items())),
        loader=_encode(loader),
        workdir=_encode(workdir),
        entrypoint=tuple(map(_encode, image.entrypoint)),
        command=tuple(map(_encode, image.command)),
        capable=account.uid == 0,
    )


def _check_env(image: Image) -> Iterable[tuple[str, str]]:
    if sum(len(name) + len(value) for name, value in image.env) > _MAX_ENV:
        raise fault(image, f"its environment is larger than {_MAX_ENV >> 10} KiB")
    for text in (*(part for pair in image.env for part in pair), *image.entrypoint, *image.command, image.workdir):
        if "\0" in text:
            raise fault(image, "its configuration contains a NUL")
    return [(name, value) for name, value in image.env if name and "=" not in name]


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


# Saved beside the sandbox: the next daemon must not read the root again, which the sandbox has changed by then.


def save_place(path: Path, place: Place) -> None:
    def show(value: object) -> object:
        if isinstance(value, bytes):
            return value.decode(errors="surrogateescape")
        if isinstance(value, tuple):
            return [show(each) for each in value]
        if isinstance(value, Identity):
            return [value.uid, value.gid, list(value.groups)]
        return value

    content = {name: show(getattr(place, name)) for name in Place.__slots__}
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(content))
    partial.rename(path)


def load_place(path: Path) -> Place:
    """Damaged when it is not what was saved."""
    try:
        return _read_place(json.loads(read_own(path)))
    except Damaged:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damaged(f"it does not say what commands start with: {error}") from error


def _read_place(value: dict[str, Any]) -> Place:
    uid, gid, groups = value.pop("user")
    return Place(
        user=Identity(uid, gid, tuple(groups)),
        home=_encode(value["home"]),
        workspace=_encode(value["workspace"]),
        env=tuple((_encode(name), _encode(text)) for name, text in value["env"]),
        loader=_encode(value["loader"]),
        workdir=_encode(value["workdir"]),
        entrypoint=tuple(map(_encode, value["entrypoint"])),
        command=tuple(map(_encode, value["command"])),
        capable=value["capable"],
    )

"""From options to a cage: gathers what the pure rooms must know (folder, home, files, trust) and lets them decide."""

from __future__ import annotations

import os

from k8e.profiles.context import Context
from k8e.profiles.options import NO_OPTIONS
from k8e.profiles.trust import decide

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8e.cli.agentkernel.options import CageOptions
    from k8e.profiles.config import Config
    from k8e.profiles.options import FileCopy
    from k8e.profiles.sandbox_policy import SandboxPolicy

FILE_NAME = "agentkernel.toml"
START = 256  # bytes of a script that are looked at
_SHOWN = 10  # paths


class Plan:
    """What is to be made: the cage, what goes into it, and where it came from."""

    def __init__(
        self, cage: SandboxPolicy, files: list[tuple[FileCopy, bytes]], scene: Context, config: Config | None
    ) -> None:
        self.cage = cage
        self.files = files
        self.scene = scene
        self.config = config


def prepare(
    options: CageOptions,
    command: Sequence[str] = (),
    *,
    name: str = "",
    persistent: bool = False,
    deciding: Callable[..., SandboxPolicy] = decide,
) -> Plan:
    """Raises Failure. Nothing has been made when it returns."""
    scene = look_around()
    file, trusted = find_file(options.config)
    if persistent and not name and file is not None:
        name = file.options.name or ""
    user = read_user_config()
    wishes = user.options if user else NO_OPTIONS
    cage = deciding(
        options.sandbox_options,
        scene,
        command,
        user=wishes,
        file=file,
        trusted=trusted,
        name=name,
        persistent=persistent,
    )
    if not cage.files:
        return Plan(cage, [], scene, file)
    from k8e.cli.agentkernel.project_files import read_files

    return Plan(cage, read_files(cage, file, trusted=trusted), scene, file)


def look_around() -> Context:
    try:
        cwd = os.path.realpath(os.getcwd())
        names = frozenset(os.listdir(cwd))
    except OSError:  # gone, or not ours to look into: then it is no project
        cwd, names = "", frozenset()
    return Context(cwd, find_home(), names, os.environ, read_start)


def find_home() -> str:
    home = os.environ.get("HOME", "")
    return os.path.realpath(home) if home.startswith("/") else ""


def read_start(path: str) -> bytes:
    """Nothing when it is not a file that can be read; without waiting for anybody."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, START)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def tell_new(plan: Plan, since: float) -> None:
    """After a command that could write the project: what it made there that runs by itself is to be looked at first."""
    if not any(mount.writable for mount in plan.cage.mounts):
        return
    from k8e.cli.agentkernel.output import say
    from k8e.cli.agentkernel.review import find_nested
    from k8e.profiles.protection import find_new

    try:
        found = find_new(plan.scene.names, os.listdir(plan.scene.cwd))
        nested, complete = find_nested(plan.scene.cwd, since)
    except OSError:
        return
    if found:
        say(f"look at it before you use this folder: the command made {', '.join(found)}")
    if nested:
        more = f" and {len(nested) - _SHOWN} more" if len(nested) > _SHOWN else ""
        say(f"look at it before you go there: the command made or changed {', '.join(nested[:_SHOWN])}{more}")
    if not complete:
        say("this folder has too much in it to be looked through: there may be more that runs by itself")


def find_file(named: str | None) -> tuple[Config | None, bool]:
    """The project's file, and whether it is trusted: because it was named, or because somebody said so."""
    if named is None and not os.path.lexists(FILE_NAME):
        return None, False
    from k8e.cli.agentkernel.config_files import find_named, find_own

    return find_named(named) if named is not None else find_own()


def read_user_config() -> Config | None:
    path = os.path.join(config_folder(), "config.toml")
    if not os.path.lexists(path):
        return None
    from k8e.cli.agentkernel.config_files import read_user

    return read_user(path)


def config_folder() -> str:
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "agentkernel")


def state_folder() -> str:
    return os.path.join(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "agentkernel")

"""From options to the policy of a sandbox: gathers the facts (directory, home, files, trust) with which k8e.profiles
decides."""

from __future__ import annotations

import os

from k8e.profiles.options import NO_OPTIONS, Context
from k8e.profiles.trust import decide

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from k8e.cli.agentkernel.git.repository import Repository
    from k8e.cli.agentkernel.options import CommandOptions
    from k8e.profiles.config.file import Config
    from k8e.profiles.options import FileCopy
    from k8e.profiles.sandbox_policy import SandboxPolicy

FILE_NAME = "agentkernel.toml"
START = 256  # bytes of a script that are looked at
_SHOWN = 10  # paths


class Plan:
    """A sandbox before it is made: its policy, the files it begins with, and the facts behind them."""

    def __init__(
        self,
        policy: SandboxPolicy,
        files: list[tuple[FileCopy, bytes]],
        context: Context,
        config: Config | None,
        repository: Repository | None = None,
    ) -> None:
        self.policy = policy
        self.files = files
        self.context = context
        self.config = config
        self.repository = repository


def prepare(
    options: CommandOptions,
    command: Sequence[str] = (),
    *,
    name: str = "",
    persistent: bool = False,
    deciding: Callable[..., SandboxPolicy] = decide,
) -> Plan:
    """Raises ExplainedError. No sandbox has been made when it returns."""
    context = look_around()
    file, trusted = find_file(options.config)
    if persistent and not name and file is not None:
        name = file.options.name or ""
    user = read_user_config()
    own = user.options if user else NO_OPTIONS

    def decide_in(context: Context) -> SandboxPolicy:
        facts = {"user": own, "file": file, "trusted": trusted, "name": name, "persistent": persistent}
        return deciding(options.sandbox_options, context, command, **facts)

    policy, files = decide_in(context), []
    repository, begun = find_copy(context) if any(mount.private for mount in policy.mounts) else (None, [])
    if repository is not None and repository.elsewhere:
        context = context.but(copies=repository.copies)
        policy = decide_in(context)
        if not policy.workdir:
            repository, begun = None, []
        elif repository.above:
            # The folder above is not mounted: inside it is another filesystem's, and root's; git looks for a repository
            # in neither.
            env = {
                "GIT_DISCOVERY_ACROSS_FILESYSTEM": "1",
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
            }
            env |= {"GIT_CONFIG_VALUE_0": repository.top, **dict(policy.env)}
            policy = policy.but(env=tuple(env.items()))
    if policy.files:
        from k8e.cli.agentkernel.project.files import read_files

        files = read_files(policy, file, trusted=trusted)
    return Plan(policy, [*begun, *files], context, file, repository)


def find_copy(context: Context) -> tuple[Repository | None, list[tuple[FileCopy, bytes]]]:
    """The repository of which a sandbox gets a copy, and the files that are different there."""
    from k8e.cli.agentkernel.git.configuration import list_files
    from k8e.cli.agentkernel.git.repository import Repository, find_repository

    repository = find_repository(context)
    if repository is None and not os.path.isfile(f"{context.cwd}/.git"):
        # One that the sandbox makes can be brought back, too, once there is one here.
        return Repository(context.cwd, f"{context.cwd}/.git", elsewhere=False), []
    files = list_files(repository, context.cwd) if repository else None
    return (repository, files) if files is not None else (None, [])


def describe_session(plan: Plan, policy: SandboxPolicy) -> dict[str, Any]:
    """As a request has it."""
    session = policy.to_request()
    if plan.files:
        from k8e.cli.agentkernel.project.files import describe_file

        session["files"] = [describe_file(file, content) for file, content in plan.files]
    return session


def look_around() -> Context:
    try:
        cwd = os.path.realpath(os.getcwd())
        names = frozenset(os.listdir(cwd))
    except OSError:  # gone, or closed to this user: then it is no project
        cwd, names = "", frozenset()
    return Context(cwd, find_home(), names, os.environ, read_start)


def find_home() -> str:
    home = os.environ.get("HOME", "")
    return os.path.realpath(home) if home.startswith("/") else ""


def read_start(path: str) -> bytes:
    """The first bytes of a file; none if it cannot be read at once."""
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
    """Warns after a command that could write to the project: what it made there may run by itself."""
    if not any(mount.writable for mount in plan.policy.mounts):
        return
    from k8e.cli.agentkernel.output import say
    from k8e.cli.agentkernel.project.review import find_nested
    from k8e.profiles.protection import find_new

    try:
        found = find_new(plan.context.names, os.listdir(plan.context.cwd))
        nested, complete = find_nested(plan.context.cwd, since)
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
    """The project's file, and whether it is trusted: because it was named, or by `agentkernel trust`."""
    if named is None and not os.path.lexists(FILE_NAME):
        return None, False
    from k8e.cli.agentkernel.project.config_files import find_named, find_own

    return find_named(named) if named is not None else find_own()


def read_user_config() -> Config | None:
    path = os.path.join(config_folder(), "config.toml")
    if not os.path.lexists(path):
        return None
    from k8e.cli.agentkernel.project.config_files import read_user

    return read_user(path)


def config_folder() -> str:
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "agentkernel")


def state_folder() -> str:
    return os.path.join(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "agentkernel")

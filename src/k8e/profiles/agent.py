"""Decides the policy for a call of an AI agent (MCP). Pure.

On the command line a user's options come before the files; an agent's call does not. The agent may have read a text
that misleads it, so a call can narrow what the project's file and the user's configuration say, and never widen it. A
home or variables are passed on only where a person has allowed it with --allow-permissive.
"""

from __future__ import annotations

from k8e.profiles.errors import ProfileError
from k8e.profiles.options import NO_OPTIONS, SandboxOptions, merge
from k8e.profiles.permissions import derive_permissions
from k8e.profiles.profile import PERMISSIVE
from k8e.profiles.trust import decide

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8e.profiles.config.file import Config
    from k8e.profiles.options import Context
    from k8e.profiles.sandbox_policy import SandboxPolicy

# The names of options in calls, where they differ.
NAMES = {"mode": "compatibility_mode"}


def decide_for_agent(
    asked: SandboxOptions,
    context: Context,
    command: Sequence[str] = (),
    *,
    user: SandboxOptions = NO_OPTIONS,
    file: Config | None = None,
    trusted: bool = False,
    name: str = "",
    persistent: bool = False,
    permissive: bool = False,
) -> SandboxPolicy:
    """Does what `decide` does, for a call. `permissive`: a person has allowed that profile."""
    policy = decide(asked, context, command, user=user, file=file, trusted=trusted, name=name, persistent=persistent)
    refuse_beyond(asked, file.options if file else NO_OPTIONS, user)
    if not permissive:
        refuse_permissive(asked, user, file)
    return policy


def refuse_beyond(asked: SandboxOptions, file: SandboxOptions, user: SandboxOptions) -> None:
    said, heard = merge((file, user)), asked
    if asked.network is False:  # it narrows every option
        heard = heard.but(network=None)
    if said.mode is not None and said.profile is None:  # a mode also sets the isolation
        heard = heard.but(profile=None)
    ways = derive_permissions(merge((asked, file, user))).wider_than(derive_permissions(merge((file, user, heard))))
    if ways:
        named = ", ".join(NAMES.get(option, option) for option in asked.said if option not in ("name", "image"))
        raise ProfileError(
            "beyond_configuration",
            "the call asks for more than agentkernel.toml and the user's configuration allow",
            detail="; ".join(ways),
            hint=f"Leave out: {named}. A person can change these files.",
        )


def refuse_permissive(asked: SandboxOptions, user: SandboxOptions = NO_OPTIONS, file: Config | None = None) -> None:
    found = derive_permissions(merge((asked, file.options if file else NO_OPTIONS, user)))
    if found.profile == PERMISSIVE.name or found.mount_home or found.pass_env:
        own = derive_permissions(asked)
        whose = "" if own.profile == PERMISSIVE.name else " (agentkernel.toml or the user's configuration says so)"
        raise ProfileError(
            "permissive_refused",
            "the profile permissive is not for agents to choose",
            detail=f"it mounts the project and the home, and passes variables on{whose}",
            hint="moderate; or a person starts this server with --allow-permissive.",
        )

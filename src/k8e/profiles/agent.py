"""What an agent may have that calls us: what a person who types the same has, and not more.

A person's word on the command line comes before files; an agent's does not. It may have read a text that it was not
meant to, so a call can narrow what the project's file and the user's own configuration say, and never widen it. What
hands over a home or variables is for a person to allow, wherever it is written. Pure.
"""

from __future__ import annotations

from k8e.profiles.errors import ProfileError
from k8e.profiles.permissions import settle
from k8e.profiles.profile import PERMISSIVE
from k8e.profiles.trust import decide
from k8e.profiles.wishes import NOTHING_SAID, Wishes, merge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8e.profiles.config import Config
    from k8e.profiles.effective import Cage
    from k8e.profiles.scene import Scene

# As calls name what they ask for.
NAMES = {"mode": "compatibility_mode"}


def decide_for_agent(
    asked: Wishes,
    scene: Scene,
    command: Sequence[str] = (),
    *,
    user: Wishes = NOTHING_SAID,
    file: Config | None = None,
    trusted: bool = False,
    name: str = "",
    persistent: bool = False,
    permissive: bool = False,
) -> Cage:
    """As `decide`, for a call. `permissive`: a person said that it may have that."""
    cage = decide(asked, scene, command, user=user, file=file, trusted=trusted, name=name, persistent=persistent)
    refuse_beyond(asked, file.wishes if file else NOTHING_SAID, user)
    if not permissive:
        refuse_permissive(asked, user, file)
    return cage


def refuse_beyond(asked: Wishes, file: Wishes, user: Wishes) -> None:
    said, heard = merge((file, user)), asked
    if asked.network is False:  # which is less than anything, and contradicts nothing
        heard = heard.but(network=None)
    if said.mode is not None and said.profile is None:  # a mode says how it is isolated, too
        heard = heard.but(profile=None)
    ways = settle(merge((asked, file, user))).wider_than(settle(merge((file, user, heard))))
    if ways:
        named = ", ".join(NAMES.get(wish, wish) for wish in asked.said if wish not in ("name", "image"))
        raise ProfileError(
            "beyond_configuration",
            "the call asks for more than agentkernel.toml and the user's configuration allow",
            detail="; ".join(ways),
            hint=f"Leave out: {named}. A person can change these files.",
        )


def refuse_permissive(asked: Wishes, user: Wishes = NOTHING_SAID, file: Config | None = None) -> None:
    found = settle(merge((asked, file.wishes if file else NOTHING_SAID, user)))
    if found.profile == PERMISSIVE.name or found.mount_home or found.pass_env:
        own = settle(asked)
        whose = "" if own.profile == PERMISSIVE.name else " (agentkernel.toml or the user's configuration says so)"
        raise ProfileError(
            "permissive_refused",
            "the profile permissive is not for agents to choose",
            detail=f"it mounts the project and the home, and passes variables on{whose}",
            hint="moderate; or a person starts this server with --allow-permissive.",
        )

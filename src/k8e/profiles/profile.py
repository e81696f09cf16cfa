"""Security profiles (what a sandbox may do) and compatibility modes (what the commands of an AI agent need), as tables.

A mode has the vendor's hosts. It does not name package registries: they are on the machine's default list of hosts
(docs/egress.md), so that a company mirror works. The engine refuses metadata services in every mode.
docs/agentkernel.md shows the same tables.
"""

from __future__ import annotations

from k8e.profiles.errors import ProfileError
from k8e.profiles.hosts import EVERYWHERE, Hosts
from k8e.profiles.record import Record


class Profile(Record):
    name: str
    network: bool  # whether there is one; the mode has the hosts
    mount_cwd: bool
    mount_home: bool
    pass_env: bool
    read_only: bool
    powerless: bool  # not even root inside has capabilities
    mounts: bool = True  # False: a mode's project mount is not made either


PERMISSIVE = Profile("permissive", True, True, True, True, False, False)
MODERATE = Profile("moderate", True, False, False, False, False, False)
RESTRICTIVE = Profile("restrictive", False, False, False, False, True, True, mounts=False)
# The isolation of mode codex, without a name for users: moderate, but only the project and /tmp can be written.
STRICT = Profile("strict", True, False, False, False, True, True)

PROFILES = {profile.name: profile for profile in (PERMISSIVE, MODERATE, RESTRICTIVE)}


def find_profile(name: str) -> Profile:
    if name not in PROFILES:
        raise ProfileError("unknown_profile", f"there is no profile {name!r}", hint=f"one of: {', '.join(PROFILES)}")
    return PROFILES[name]


class Mode(Record):
    name: str
    hosts: Hosts
    mount_cwd: bool
    isolation: Profile  # the profile when the user names none


NATIVE = Mode("native", EVERYWHERE, False, MODERATE)
CLAUDE = Mode("claude", Hosts(("api.anthropic.com", "cdn.anthropic.com"), usual=True), True, MODERATE)
CODEX = Mode("codex", Hosts(("api.openai.com", "cdn.openai.com"), usual=True), True, STRICT)
GEMINI = Mode("gemini", Hosts(("*.googleapis.com",), usual=True), True, MODERATE)

MODES = {mode.name: mode for mode in (NATIVE, CLAUDE, CODEX, GEMINI)}


def find_mode(name: str) -> Mode:
    if name not in MODES:
        raise ProfileError(
            "unknown_mode", f"there is no compatibility mode {name!r}", hint=f"one of: {', '.join(MODES)}"
        )
    return MODES[name]

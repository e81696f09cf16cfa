"""Security profiles: what a sandbox may do, as a table. docs/agentkernel.md shows the same table."""

from __future__ import annotations

from k8e.profiles.errors import ProfileError
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

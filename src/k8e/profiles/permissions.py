"""Combines profile, mode and single keys into permissions, and compares permissions. Pure.

1. The profile is the one that was asked for, else the mode's isolation, else moderate.
2. The profile says whether there is a network, the mode where to; without a mode that is everywhere.
3. The project is mounted where the profile or the mode says so; under restrictive nothing is.
4. Home, environment, read-only root and capabilities are the profile's.
5. Single keys (`network`, `mount_cwd`, ...) and lists of hosts come last and win.
"""

from __future__ import annotations

from k8e.profiles.errors import ProfileError
from k8e.profiles.hosts import NOWHERE, Hosts
from k8e.profiles.profile import NATIVE, find_mode, find_profile
from k8e.profiles.record import Record
from k8e.profiles.text import describe_amount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.profiles.options import SandboxOptions

# The defaults of a session (docs/settings.md).
USUAL_LIMITS = {"cpus": 1.0, "memory": 1 << 30, "disk": 2 << 30, "pids": 512}


class Permissions(Record):
    profile: str
    mode: str
    hosts: Hosts
    mount_cwd: bool
    mount_home: bool
    pass_env: bool
    read_only: bool
    powerless: bool
    limits: tuple[tuple[str, float], ...] = ()  # those that were asked for

    def limit(self, name: str) -> float:
        return dict(self.limits).get(name, USUAL_LIMITS[name])

    def wider_than(self, other: Permissions) -> tuple[str, ...]:
        """Returns the ways in which this allows more than `other`, for people."""
        ways = []
        if not self.hosts.within(other.hosts):
            ways.append(f"the network: {self.hosts.describe()}, instead of {other.hosts.describe()}")
        for name, what in (
            ("mount_cwd", "this folder is mounted, writable"),
            ("mount_home", "your home is mounted"),
            ("pass_env", "your environment is passed on"),
        ):
            if getattr(self, name) and not getattr(other, name):
                ways.append(what)
        if other.read_only and not self.read_only:
            ways.append("its root can be written")
        if other.powerless and not self.powerless:
            ways.append("its root user has capabilities")
        for name in USUAL_LIMITS:
            if self.limit(name) > other.limit(name):
                more, usual = (describe_amount(name, each.limit(name)) for each in (self, other))
                ways.append(f"more {name}: {more} instead of {usual}")
        return tuple(ways)


def derive_permissions(options: SandboxOptions) -> Permissions:
    mode = find_mode(options.mode) if options.mode is not None else NATIVE
    profile = find_profile(options.profile) if options.profile is not None else mode.isolation
    hosts = choose_hosts(options, mode.hosts, profile.network)

    def choose(name: str, otherwise: bool) -> bool:
        said: bool | None = getattr(options, name)
        return otherwise if said is None else said

    return Permissions(
        profile=profile.name,
        mode=mode.name,
        hosts=hosts,
        mount_cwd=choose("mount_cwd", profile.mounts and (profile.mount_cwd or mode.mount_cwd)),
        mount_home=choose("mount_home", profile.mount_home),
        pass_env=choose("pass_env", profile.pass_env),
        read_only=choose("read_only", profile.read_only),
        powerless=profile.powerless,
        limits=tuple((name, getattr(options, name)) for name in USUAL_LIMITS if getattr(options, name) is not None),
    )


def choose_hosts(options: SandboxOptions, listed: Hosts, network: bool) -> Hosts:
    if options.network is False:
        if options.allowed_hosts:
            raise ProfileError(
                "network_contradiction",
                "there is to be no network, and there are hosts to be reached",
                hint="leave one of them out: network = false (--no-network) or the list of hosts",
            )
        return NOWHERE
    if options.allowed_hosts is not None:
        # Naming hosts asks for a network.
        return Hosts(options.allowed_hosts)
    if not network and not options.network:
        return NOWHERE
    return listed if listed.everywhere else listed.plus(options.more_hosts or ())

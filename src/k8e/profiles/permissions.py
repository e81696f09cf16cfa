"""How profile, mode and single keys come together, and when one result is wider than another. Pure.

1. The profile is the one that was asked for, else the mode's isolation, else moderate.
2. The profile says whether there is a network, the mode where to; without a mode that is everywhere.
3. The project is mounted where the profile or the mode says so; under restrictive nothing is.
4. Home, environment, read-only root and capabilities are the profile's.
5. Single keys (`network`, `mount_cwd`, ...) and lists of hosts come last and win.
"""

from __future__ import annotations

from k8e.profiles.amounts import describe_amount
from k8e.profiles.errors import ProfileError
from k8e.profiles.hosts import NOWHERE, Hosts
from k8e.profiles.mode import NATIVE, find_mode
from k8e.profiles.profile import find_profile
from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.profiles.wishes import Wishes

# What a session of k8e gets that says nothing (docs/settings.md). Whoever wants more says so.
USUAL_LIMITS = {"cpus": 0.5, "memory": 512 << 20, "disk": 2 << 30, "pids": 512}


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
        """In which ways, for people; nothing: it allows no more."""
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


def settle(wishes: Wishes) -> Permissions:
    mode = find_mode(wishes.mode) if wishes.mode is not None else NATIVE
    profile = find_profile(wishes.profile) if wishes.profile is not None else mode.isolation
    hosts = choose_hosts(wishes, mode.hosts, profile.network)

    def choose(name: str, otherwise: bool) -> bool:
        said: bool | None = getattr(wishes, name)
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
        limits=tuple((name, getattr(wishes, name)) for name in USUAL_LIMITS if getattr(wishes, name) is not None),
    )


def choose_hosts(wishes: Wishes, listed: Hosts, network: bool) -> Hosts:
    if wishes.network is False:
        if wishes.allowed_hosts:
            raise ProfileError(
                "network_contradiction",
                "there is to be no network, and there are hosts to be reached",
                hint="leave one of them out: network = false (--no-network) or the list of hosts",
            )
        return NOWHERE
    if wishes.allowed_hosts is not None:
        # Asked for by name: as good as asking for a network.
        return Hosts(wishes.allowed_hosts)
    if not network and not wishes.network:
        return NOWHERE
    return listed if listed.everywhere else listed.plus(wishes.more_hosts or ())

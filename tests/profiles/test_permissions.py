"""Profiles, modes and single keys together: the table of docs/agentkernel.md, and what holds for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from k8e.policy import is_metadata_name
from k8e.profiles.errors import ProfileError
from k8e.profiles.hosts import EVERYWHERE, NOWHERE, Hosts
from k8e.profiles.options import Context, SandboxOptions, merge
from k8e.profiles.permissions import Permissions, derive_permissions
from k8e.profiles.profile import MODES, PROFILES
from k8e.profiles.sandbox_policy import build_policy
from tests.profiles.strategies import CONTEXT, options

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agentkernel.md"


def show(settled: Permissions) -> tuple[str, str]:
    """A row of the page's table."""
    network = "all" if settled.hosts == EVERYWHERE else "list" if settled.hosts.names else "no"
    flags = ("mount_cwd", "mount_home", "pass_env", "read_only", "powerless")
    return network, " ".join("yes" if getattr(settled, flag) else "no" for flag in flags)


class TestTheSeed:
    """Network, Mount CWD, Mount Home, Pass Env, Read-only."""

    @pytest.mark.parametrize(
        ("profile", "row"),
        [("permissive", "Y Y Y Y N"), ("moderate", "Y N N N N"), ("restrictive", "N N N N Y")],
    )
    def test_profiles(self, profile: str, row: str) -> None:
        settled = derive_permissions(SandboxOptions(profile=profile))
        cells = (bool(settled.hosts.names), settled.mount_cwd, settled.mount_home, settled.pass_env, settled.read_only)
        assert " ".join("Y" if cell else "N" for cell in cells) == row
        assert settled.powerless == (profile == "restrictive")

    @pytest.mark.parametrize(
        ("mode", "hosts", "mount", "strict"),
        [
            ("native", EVERYWHERE, False, False),
            ("claude", Hosts(("api.anthropic.com", "cdn.anthropic.com"), usual=True), True, False),
            ("codex", Hosts(("api.openai.com", "cdn.openai.com"), usual=True), True, True),
            ("gemini", Hosts(("*.googleapis.com",), usual=True), True, False),
        ],
    )
    def test_modes(self, mode: str, hosts: Hosts, mount: bool, strict: bool) -> None:
        settled = derive_permissions(SandboxOptions(mode=mode))
        assert (settled.hosts, settled.mount_cwd) == (hosts, mount)
        assert (settled.read_only, settled.powerless) == (strict, strict)
        assert not settled.mount_home
        assert not settled.pass_env

    def test_moderate_is_what_there_is_without_a_word(self) -> None:
        assert (
            derive_permissions(SandboxOptions())
            == derive_permissions(SandboxOptions(profile="moderate"))
            == derive_permissions(SandboxOptions(mode="native"))
        )

    def test_no_network_is_nothing_but_loopback(self) -> None:
        assert derive_permissions(SandboxOptions(network=False)).hosts == NOWHERE
        assert build_policy(SandboxOptions(network=False), Context()).to_request()["allowed_hosts"] == []


def test_profile_and_mode_together_are_as_the_page_says() -> None:
    rows = {}
    for line in PAGE.read_text().split("<!-- profile x mode -->")[1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[0] in MODES:
            rows[cells[0], cells[1]] = (cells[2], " ".join(cells[3:]))
    expected = {
        (mode, profile or "-"): show(derive_permissions(SandboxOptions(mode=mode, profile=profile)))
        for mode in MODES
        for profile in (None, *PROFILES)
    }
    assert rows == expected


def test_a_list_of_hosts_and_no_network_contradict_each_other() -> None:
    with pytest.raises(ProfileError, match="network_contradiction"):
        derive_permissions(SandboxOptions(network=False, allowed_hosts=("example.com",)))


def test_metadata_is_on_no_list() -> None:
    for mode in MODES.values():
        assert not any(is_metadata_name(name.removeprefix("*.")) for name in mode.hosts.names)


def test_restrictive_is_never_wider_than_anything() -> None:
    for mode in MODES:
        narrow = derive_permissions(SandboxOptions(mode=mode, profile="restrictive"))
        for profile in (None, *PROFILES):
            assert narrow.wider_than(derive_permissions(SandboxOptions(mode=mode, profile=profile))) == ()


@given(options(), options(), options())
def test_wider_is_an_order(first: SandboxOptions, second: SandboxOptions, third: SandboxOptions) -> None:
    a, b, c = derive_permissions(first), derive_permissions(second), derive_permissions(third)
    assert a.wider_than(a) == ()
    if not a.wider_than(b) and not b.wider_than(c):
        assert a.wider_than(c) == ()


@given(options(), options())
def test_the_first_who_says_something_decides(upper: SandboxOptions, lower: SandboxOptions) -> None:
    merged = merge((upper, lower))
    for name in upper.said:
        assert getattr(merged, name) == getattr(upper, name)
    assert merge((upper,)) == upper
    assert merge((upper, upper)) == upper


@given(options())
def test_what_is_asked_for_by_a_single_key_is_what_there_is(asked: SandboxOptions) -> None:
    settled = derive_permissions(asked)
    for name in ("mount_cwd", "mount_home", "pass_env", "read_only"):
        if getattr(asked, name) is not None:
            assert getattr(settled, name) == getattr(asked, name)
    if asked.network is False:
        assert settled.hosts == NOWHERE


@given(options())
def test_the_request_says_what_the_description_says(asked: SandboxOptions) -> None:
    policy = build_policy(asked, CONTEXT, ("python3",))
    request, shown = policy.to_request(), policy.to_json()
    assert {"allowed_hosts", "more_hosts"} & set(request) == {"allowed_hosts", "more_hosts"} & set(shown)
    assert len({"allowed_hosts", "more_hosts"} & set(request)) == 1
    for name, usual in (("mounts", []), ("read_only", False), ("powerless", False), ("limits", {})):
        assert request.get(name, usual) == shown[name]
    assert sorted(request.get("env", {})) == sorted(shown["env_keys"])
    assert not any(value in str(shown) for value in CONTEXT.environ.values())
    assert policy.image in policy.describe()


def test_values_of_variables_are_not_shown() -> None:
    policy = build_policy(SandboxOptions(profile="permissive", env=(("MINE", "pa55"),)), CONTEXT)
    assert "pa55" not in policy.describe() + str(policy.to_json())
    assert policy.to_request()["env"]["MINE"] == "pa55"

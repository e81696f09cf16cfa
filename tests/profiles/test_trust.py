"""A file that came with a repository only ever takes away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.profiles.config.file import Config, read_config
from k8e.profiles.errors import ProfileError
from k8e.profiles.options import NO_OPTIONS, FileCopy, SandboxOptions
from k8e.profiles.sandbox_policy import SandboxPolicy
from k8e.profiles.trust import (
    Trusted,
    decide,
    find_widenings,
    is_trusted,
    read_trusted,
    revoke,
    trust,
    write_trusted,
)
from tests.profiles.strategies import CONTEXT, options


def file(text: str) -> Config:
    return read_config(text, "agentkernel.toml")


@pytest.mark.parametrize(
    ("text", "line", "way"),
    [
        ('[security]\nprofile = "permissive"', "agentkernel.toml:2: security.profile", "this folder is mounted"),
        ('[agent]\ncompatibility_mode = "claude"', "agentkernel.toml:2: agent.compatibility_mode", "folder"),
        ("[security]\nmount_home = true", "agentkernel.toml:2: security.mount_home", "your home"),
        ("[security]\npass_env = true", "agentkernel.toml:2: security.pass_env", "your environment"),
        ('[sandbox]\nbase_image = "registry.example/private/x:1"', "agentkernel.toml:2: sandbox.base_image", "cred"),
        ('[sandbox]\nbase_image = "host"', "agentkernel.toml:2: sandbox.base_image", "host"),
        ("[resources]\nmemory_mb = 65536", "agentkernel.toml:2: resources.memory_mb", "more memory"),
        ("[resources]\ncpus = 64", "agentkernel.toml:2: resources.cpus", "more cpus"),
        ('[[files]]\nsource = "/etc/passwd"\ndest = "/x"', "files", "not of the project"),
        ('[[files]]\nsource = "a/../../x"\ndest = "/x"', "files", "not of the project"),
        ('[[files]]\nsource = "~/.ssh/id_rsa"\ndest = "/x"', "files", "not of the project"),
        ('[[files]]\nsource = ".env.local"\ndest = "/x"', "files", "secret"),
        ('[[files]]\nsource = "certs/server.key"\ndest = "/x"', "files", "secret"),
    ],
)
def test_a_repository_does_not_open_its_own_cage(text: str, line: str, way: str) -> None:
    config = file(text)
    with pytest.raises(ProfileError) as caught:
        decide(NO_OPTIONS, CONTEXT, ("true",), file=config)
    problem = caught.value
    assert problem.code == "widening_refused"
    assert line in problem.detail
    assert way in problem.detail
    assert "agentkernel trust agentkernel.toml" in problem.hint
    assert "--config agentkernel.toml" in problem.hint
    assert isinstance(decide(NO_OPTIONS, CONTEXT, ("true",), file=config, trusted=True), SandboxPolicy)


@pytest.mark.parametrize(
    "text",
    [
        '[security]\nprofile = "restrictive"',
        "[security]\nnetwork = false",
        "[security]\nnetwork = true",
        '[security]\nallowed_hosts = ["a.example"]',
        "[security]\nread_only = true",
        "[resources]\nmemory_mb = 256",
        '[sandbox]\nname = "x"\nruntime = "python"',
        '[sandbox]\nbase_image = "golang:1.23-alpine"',
        '[[files]]\nsource = "config/settings.json"\ndest = "/workspace/settings.json"',
        '[agent]\npreferred = "claude"',
    ],
)
def test_what_narrows_or_merely_chooses_needs_no_trust(text: str) -> None:
    decide(NO_OPTIONS, CONTEXT, ("true",), file=file(text))


def test_what_the_user_allows_the_file_may_ask_for() -> None:
    config = file('[agent]\ncompatibility_mode = "claude"')
    with_mode = decide(SandboxOptions(mode="claude"), CONTEXT, file=config)
    assert [mount.target for mount in with_mode.mounts] == ["/workspace"]
    assert decide(NO_OPTIONS, CONTEXT, user=SandboxOptions(mode="claude"), file=config).mode == "claude"


def test_what_the_user_has_closed_the_file_does_not_open() -> None:
    config = file('[security]\nprofile = "moderate"')
    with pytest.raises(ProfileError, match="widening_refused"):
        decide(NO_OPTIONS, CONTEXT, user=SandboxOptions(profile="restrictive"), file=config)
    with pytest.raises(ProfileError, match="widening_refused"):
        decide(NO_OPTIONS, CONTEXT, user=SandboxOptions(mode="codex"), file=config)
    with pytest.raises(ProfileError, match="widening_refused"):
        decide(NO_OPTIONS, CONTEXT, user=SandboxOptions(network=False), file=file("[security]\nnetwork = true"))


def test_the_command_line_has_the_last_word() -> None:
    config = file('[security]\nprofile = "permissive"')
    assert decide(SandboxOptions(profile="restrictive"), CONTEXT, file=config).profile == "restrictive"


def reach(policy: SandboxPolicy) -> dict[str, object]:
    """What somebody inside can do, read from what is sent to the service and nothing else."""
    request = policy.to_request()
    return {
        "hosts": request.get("allowed_hosts", ["(usual)", *request.get("more_hosts", [])]),
        "sources": {mount["source"] for mount in request.get("mounts", [])},
        "writable": {mount["source"] for mount in request.get("mounts", []) if mount["writable"]},
        "env": set(request.get("env", {})),
        "root": not request.get("read_only", False),
        "power": not request.get("powerless", False),
        "memory": request.get("limits", {}).get("memory", 1 << 30),
        "cpus": request.get("limits", {}).get("cpus", 1.0),
    }


OURS = {"HOME", "XDG_CACHE_HOME", "npm_config_cache"}  # set by the policy itself where a home is closed


@given(options(), options(), options())
def test_an_unknown_file_never_reaches_further(
    asked: SandboxOptions, user: SandboxOptions, brought: SandboxOptions
) -> None:
    """Whatever the three say: with the file there is no more than without it, or nothing at all."""
    config = Config("agentkernel.toml", brought)
    try:
        with_file = decide(asked, CONTEXT, ("true",), user=user, file=config)
        without = decide(asked, CONTEXT, ("true",), user=user)
    except ProfileError:
        return
    narrow, wide = reach(with_file), reach(without)
    assert narrow["sources"] <= wide["sources"]  # type: ignore[operator]
    assert narrow["writable"] <= wide["writable"]  # type: ignore[operator]
    assert narrow["env"] <= wide["env"] | OURS  # type: ignore[operator]
    assert narrow["root"] <= wide["root"]  # type: ignore[operator]
    assert narrow["power"] <= wide["power"]  # type: ignore[operator]
    assert narrow["memory"] <= wide["memory"]  # type: ignore[operator]
    assert narrow["cpus"] <= wide["cpus"]  # type: ignore[operator]
    hosts, allowed = narrow["hosts"], wide["hosts"]
    assert isinstance(hosts, list)
    assert isinstance(allowed, list)
    if "*" not in allowed:
        assert "*" not in hosts
        covered = {"b.example:8443", "*.b.example"}
        assert set(hosts) - set(allowed) <= covered - set(allowed)
    if with_file.image != without.image:
        assert with_file.image == "python:3.12-alpine"  # of the table


@given(st.lists(st.text("ab/.~", max_size=8), max_size=3))
def test_files_of_the_project_are_below_it(sources: list[str]) -> None:
    config = Config("x", SandboxOptions(files=tuple(FileCopy(source, "/d") for source in sources)))
    refused = {each.way.split(" ")[0] for each in find_widenings(NO_OPTIONS, NO_OPTIONS, config)}
    for source in sources:
        outside = source.startswith(("/", "~")) or ".." in source.split("/")
        assert not outside or source.split(" ")[0] in refused


class TestMemory:
    def test_place_and_content_both_count(self) -> None:
        entries = trust((), "/a/agentkernel.toml", b"one")
        assert is_trusted(entries, "/a/agentkernel.toml", b"one")
        assert not is_trusted(entries, "/a/agentkernel.toml", b"two")
        assert not is_trusted(entries, "/b/agentkernel.toml", b"one")

    def test_the_last_word_about_a_place_counts(self) -> None:
        entries = trust(trust((), "/a", b"one"), "/a", b"two")
        assert len(entries) == 1
        assert is_trusted(entries, "/a", b"two")
        assert revoke(entries, "/a") == ()

    @given(st.lists(st.builds(Trusted, st.text(max_size=5), st.text(max_size=5)), max_size=4))
    def test_what_is_written_is_read(self, entries: list[Trusted]) -> None:
        assert sorted(read_trusted(write_trusted(entries)), key=repr) == sorted(entries, key=repr)

    @given(st.text(max_size=60) | st.sampled_from(['{"trusted": 1}', '{"trusted": [1]}', "[]", '{"trusted": [{}]}']))
    def test_what_is_not_understood_is_not_trusted(self, text: str) -> None:
        assert read_trusted(text) == ()

"""What an agent's call can have: what a person has who types nothing but the command, where files say something."""

from __future__ import annotations

import itertools

import pytest

from k8e.profiles.agent import decide_for_agent
from k8e.profiles.config.file import read_config
from k8e.profiles.errors import ProfileError
from k8e.profiles.options import NO_OPTIONS, Context, SandboxOptions, merge
from k8e.profiles.permissions import Permissions, derive_permissions
from k8e.profiles.trust import decide

CONTEXT = Context("/home/ann/work", "/home/ann", frozenset(), {"COLOUR": "blue"})
PROFILES = ("permissive", "moderate", "restrictive")
MODES = ("native", "claude", "codex", "gemini")


def try_call(
    asked: SandboxOptions, *, user: SandboxOptions = NO_OPTIONS, text: str = "", permissive: bool = False
) -> str:
    """The code of what is wrong with it; empty: nothing."""
    file = read_config(text, "agentkernel.toml") if text else None
    try:
        decide_for_agent(asked, CONTEXT, ("id",), user=user, file=file, trusted=True, permissive=permissive)
    except ProfileError as problem:
        return problem.code
    return ""


def allowed(*layers: SandboxOptions) -> Permissions:
    return derive_permissions(merge(layers))


def test_where_files_speak_no_call_has_more_than_the_bare_command() -> None:
    accepted = refused = 0
    for profile, mode, network in itertools.product(PROFILES[1:], MODES, (True, False)):
        said = SandboxOptions(profile=profile, mode=mode, network=network)
        bare = allowed(said)
        for asked in (
            SandboxOptions(profile=one, mode=two, network=three)
            for one, two, three in itertools.product((None, *PROFILES), (None, *MODES), (None, True, False))
        ):
            if try_call(asked, user=said, permissive=True):
                refused += 1
                assert allowed(asked, said).wider_than(bare)  # and it was right to refuse
            else:
                accepted += 1
                assert allowed(asked, said).wider_than(bare) == ()
    assert min(accepted, refused) > 100


def test_where_nothing_is_said_a_call_gets_what_it_asks_for() -> None:
    for profile, mode in itertools.product((None, *PROFILES[1:]), (None, *MODES)):
        asked = SandboxOptions(profile=profile, mode=mode)
        assert decide_for_agent(asked, CONTEXT, ("id",)) == decide(asked, CONTEXT, ("id",))


@pytest.mark.parametrize(
    ("text", "asked", "code"),
    [
        ("[security]\nnetwork = false\n", SandboxOptions(), ""),
        ("[security]\nnetwork = false\n", SandboxOptions(network=True), "beyond_configuration"),
        ("[security]\nnetwork = false\n", SandboxOptions(profile="moderate"), ""),
        ('[security]\nprofile = "restrictive"\n', SandboxOptions(profile="moderate"), "beyond_configuration"),
        ('[security]\nprofile = "restrictive"\n', SandboxOptions(mode="claude"), ""),
        ('[security]\nallowed_hosts = ["a.example"]\n', SandboxOptions(network=False), ""),
        ('[security]\nallowed_hosts = ["a.example"]\n', SandboxOptions(mode="native"), ""),
        ('[agent]\ncompatibility_mode = "claude"\n', SandboxOptions(mode="native"), "beyond_configuration"),
        ('[agent]\ncompatibility_mode = "codex"\n', SandboxOptions(profile="moderate"), "beyond_configuration"),
        ('[agent]\ncompatibility_mode = "codex"\n', SandboxOptions(profile="restrictive"), ""),
        ('[agent]\ncompatibility_mode = "claude"\n', SandboxOptions(profile="moderate"), ""),
        ("[resources]\nmemory = '64m'\n", SandboxOptions(image="host"), ""),
        ('[security]\nprofile = "permissive"\n', SandboxOptions(), "permissive_refused"),
        ('[security]\nprofile = "permissive"\n', SandboxOptions(profile="moderate"), ""),
        ("[security]\nmount_home = true\n", SandboxOptions(profile="moderate"), "permissive_refused"),
        ("[security]\npass_env = true\n", SandboxOptions(), "permissive_refused"),
    ],
)
def test_a_call_narrows_what_a_file_says_and_never_widens_it(text: str, asked: SandboxOptions, code: str) -> None:
    assert try_call(asked, text=text) == code


def test_a_person_can_allow_permissive() -> None:
    assert try_call(SandboxOptions(profile="permissive")) == "permissive_refused"
    assert try_call(SandboxOptions(profile="permissive"), permissive=True) == ""
    assert try_call(SandboxOptions(), text="[security]\nmount_home = true\npass_env = true\n", permissive=True) == ""

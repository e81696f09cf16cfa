"""agentkernel.toml: every key is honoured or refused, and what is wrong is said with its line."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.profiles.config.file import AgentPool, PoolSizes, read_config
from k8e.profiles.errors import ProfileError
from k8e.profiles.options import FileCopy, SandboxOptions

SEED = """\
[sandbox]
name = "my-project"

[agent]
preferred = "claude"
compatibility_mode = "claude"  # claude, codex, gemini, or native

[security]
profile = "moderate"  # Can override compatibility mode defaults
"""

SEED_DAEMON = """\
# Example daemon config (future)
[daemon]
min_warm = 3
max_warm = 5

[daemon.agents.claude]
min_warm = 2
runtime = "python"

[daemon.agents.codex]
min_warm = 1
runtime = "python"
"""


def read(text: str) -> SandboxOptions:
    return read_config(text, "agentkernel.toml").options


def refusal(text: str) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        read_config(text, "agentkernel.toml")
    return caught.value


def test_the_files_of_the_seed() -> None:
    config = read_config(SEED, "agentkernel.toml")
    assert config.options == SandboxOptions(name="my-project", mode="claude", profile="moderate")
    assert config.preferred == "claude"
    assert config.where("profile") == "agentkernel.toml:9: security.profile"
    daemon = read_config(SEED_DAEMON, "x").daemon
    assert daemon == PoolSizes(3, 5, (AgentPool("claude", 2, "python"), AgentPool("codex", 1, "python")))


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ('[sandbox]\nruntime = "python"', "language", "python"),
        ('[sandbox]\nruntime = "base"', "language", "base"),
        ('[sandbox]\nbase_image = "python:3.12"', "image", "python:3.12"),
        ("[security]\nnetwork = false", "network", False),
        ("[security]\nmount_cwd = true", "mount_cwd", True),
        ("[security]\nmount_home = false", "mount_home", False),
        ("[security]\npass_env = true", "pass_env", True),
        ("[security]\nread_only = true", "read_only", True),
        ('[security]\nallowed_hosts = ["Example.COM."]', "allowed_hosts", ("example.com",)),
        ("[security]\nallowed_hosts = []", "allowed_hosts", ()),
        ('[security.domains]\nallow = ["a.example"]', "more_hosts", ("a.example",)),
        ('[security.domains]\nallow = ["a.example"]\nallowlist_only = true', "allowed_hosts", ("a.example",)),
        ("[resources]\ncpus = 1.5", "cpus", 1.5),
        ("[resources]\nvcpus = 2", "cpus", 2.0),
        ('[resources]\nmemory = "1g"', "memory", 1 << 30),
        ("[resources]\nmemory = 67108864", "memory", 64 << 20),
        ("[resources]\nmemory_mb = 1024", "memory", 1 << 30),
        ('[resources]\ndisk = "4g"', "disk", 4 << 30),
        ("[resources]\npids = 64", "pids", 64),
        ('[[files]]\nsource = "a"\ndest = "/b"\nmode = "0755"', "files", (FileCopy("a", "/b", 0o755),)),
    ],
)
def test_each_key_is_an_option(text: str, option: str, value: Any) -> None:
    assert read(text) == SandboxOptions(**{option: value})


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("[sandbx]\n", "config_unknown", "agentkernel.toml:1: there is no section [sandbx]"),
        ("\n[sandbox]\nnmae = 1", "config_unknown", "agentkernel.toml:3: there is no key nmae in [sandbox]"),
        ("x = 1", "config_unknown", "agentkernel.toml:1"),
        ("sandbox = 1", "config_invalid", "agentkernel.toml:1"),
        ('[sandbox]\nname = "../../x"', "config_invalid", "agentkernel.toml:2"),
        ('[sandbox]\nname = ""', "config_invalid", "agentkernel.toml:2"),
        ('[sandbox]\nbase_image = "-v/:/host"', "config_invalid", "agentkernel.toml:2"),
        ('[sandbox]\nruntime = "cobol"', "config_invalid", "agentkernel.toml:2"),
        ('[agent]\npreferred = "hal"', "config_invalid", "agentkernel.toml:2"),
        ('[agent]\ncompatibility_mode = "root"', "config_invalid", "agentkernel.toml:2"),
        ('\n\n[security]\nprofile = "custom"', "config_invalid", "agentkernel.toml:4: security.profile"),
        ('[security]\nnetwork = "yes"', "config_invalid", "agentkernel.toml:2"),
        ("[security]\nnetwork = 1", "config_invalid", "agentkernel.toml:2"),
        ('[security]\nallowed_hosts = ["169.254.169.254"]', "config_invalid", "metadata"),
        ('[security]\nallowed_hosts = "a.example"', "config_invalid", "agentkernel.toml:2"),
        ('[security]\nseccomp = "x"', "config_refused", "agentkernel.toml:2"),
        ('[security.commands]\nblock = ["rm"]', "config_refused", "agentkernel.toml:1"),
        ('[security.domains]\nblock = ["a.example"]', "config_refused", "agentkernel.toml:2"),
        ('[build]\ndockerfile = "Dockerfile"', "config_refused", "agentkernel.toml:1"),
        ("[network]\nvsock_cid = 3", "config_refused", "agentkernel.toml:1"),
        ("[resources]\nmemory = 1", "config_invalid", "agentkernel.toml:2"),
        ('[resources]\nmemory = "lots"', "config_invalid", "agentkernel.toml:2"),
        ('[resources]\nmemory = ""', "config_invalid", "agentkernel.toml:2"),
        ("[resources]\ncpus = true", "config_invalid", "agentkernel.toml:2"),
        ("[resources]\ncpus = nan", "config_invalid", "agentkernel.toml:2"),
        ("[resources]\ncpus = 1\nvcpus = 1", "config_invalid", "agentkernel.toml:3"),
        ("[[files]]\nsource = 'a'", "config_invalid", "agentkernel.toml:1"),
        ("[[files]]\nsource = 'a'\ndest = 'b'", "config_invalid", "agentkernel.toml:3"),
        ("[[files]]\nsource = 'a'\ndest = '/../b'", "config_invalid", "agentkernel.toml:3"),
        ("[[files]]\nsource = 'a'\ndest = '/b'\nmode = '4755'", "config_invalid", "agentkernel.toml:4"),
        ("files = 1", "config_invalid", "agentkernel.toml:1"),
        ("[daemon]\nmin_warm = 3\nmax_warm = 1", "config_invalid", "agentkernel.toml:2"),
        ("[daemon.agents.hal]\nmin_warm = 1", "config_unknown", "agentkernel.toml:1"),
        ('[daemon.agents.claude]\nruntime = "cobol"', "config_invalid", "agentkernel.toml:2"),
        ("[sandbox\n", "config_syntax", "agentkernel.toml is not TOML"),
        ("a = " + "[" * 3000, "config_syntax", "agentkernel.toml"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, code: str, words: str) -> None:
    problem = refusal(text)
    assert problem.code == code
    assert words in problem.error
    assert problem.hint or code in ("config_syntax", "config_invalid")


def test_a_syntax_error_says_where() -> None:
    assert "line 2" in refusal("[sandbox]\nname = \n").detail


@given(st.text(max_size=200))
def test_no_text_is_anything_but_read_or_refused(text: str) -> None:
    with contextlib.suppress(ProfileError):
        read_config(text, "x")

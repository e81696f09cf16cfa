"""SandboxOptions of every kind, and a context in which all of them can be granted."""

from __future__ import annotations

from hypothesis import strategies as st

from k8e.profiles.options import Context, SandboxOptions
from k8e.profiles.profile import MODES, PROFILES

CONTEXT = Context(
    cwd="/home/ann/work",
    home="/home/ann",
    names=frozenset({".git", "package.json", "src"}),
    environ={"LANG": "zzz-lang", "AWS_PROFILE": "zzz-cloud", "DEBUG": "zzz-debug", "PATH": "zzz-path"},
)

NAMES = ["a.example", "*.b.example", "b.example:8443", "192.0.2.0/24"]
HOSTS = st.lists(st.sampled_from(NAMES), max_size=3, unique=True)
FLAG = st.none() | st.booleans()


@st.composite
def options(draw: st.DrawFn) -> SandboxOptions:
    network = draw(FLAG)
    listed = draw(st.none() | HOSTS.map(tuple))
    return SandboxOptions(
        profile=draw(st.none() | st.sampled_from(list(PROFILES))),
        mode=draw(st.none() | st.sampled_from(list(MODES))),
        network=network,
        mount_cwd=draw(FLAG),
        mount_home=draw(FLAG),
        pass_env=draw(FLAG),
        read_only=draw(FLAG),
        allowed_hosts=None if network is False else listed,
        more_hosts=draw(st.none() | HOSTS.map(tuple)),
        cpus=draw(st.none() | st.floats(0.01, 64)),
        memory=draw(st.none() | st.integers(16 << 20, 1 << 40)),
        image=draw(st.none() | st.sampled_from(["host", "ubuntu:24.04", "python:3.12-alpine"])),
    )

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.core import checks
from k8e.core.errors import Fault, Kind
from k8e.core.model import Language, RunSpec, SessionSpec
from k8e.core.runs.launcher import check_argv
from k8e.engine import Limits
from tests.core.rig import fault

VALID_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}\Z")


@given(st.one_of(st.text(), st.from_regex(VALID_NAME, fullmatch=True), st.from_regex(r"-[a-z]+", fullmatch=True)))
def test_names_are_exactly_what_the_contract_says(name: str) -> None:
    if VALID_NAME.match(name):
        assert checks.check_name("session_id", name) == name
    else:
        with fault(Kind.INVALID, "invalid_argument", "session_id"):
            checks.check_name("session_id", name)


@pytest.mark.parametrize("name", ["", "-rf", "a" * 64, "a b", "a/b", "../a", "a\n", "ä", "a\0", ".", 7, None, b"a"])
def test_other_names_are_refused(name: object) -> None:
    with fault(Kind.INVALID, "invalid_argument", "tenant"):
        checks.check_name("tenant", name)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=200))
def test_paths_become_absolute_and_keep_their_bytes(path: str) -> None:
    if "\0" in path:
        with fault(Kind.INVALID, "invalid_argument", "path"):
            checks.check_path("path", path)
        return
    got = checks.check_path("path", path)
    assert got == (path.encode() if path.startswith("/") else b"/workspace/" + path.encode())


def test_undecodable_bytes_come_back_as_they_were() -> None:
    assert checks.check_path("path", b"/a\xff\xfe".decode("utf-8", "surrogateescape")) == b"/a\xff\xfe"


@pytest.mark.parametrize("path", ["", "a\0b", "/" + "a" * 4095, "\ud800", 3])
def test_other_paths_are_refused(path: object) -> None:
    with fault(Kind.INVALID, "invalid_argument", "path"):
        checks.check_path("path", path)


@pytest.mark.parametrize("timeout", [0, -1, 86400.5, float("nan"), float("inf"), "30", True, None, 10**400])
def test_timeouts_have_bounds(timeout: object) -> None:
    with fault(Kind.INVALID, "invalid_argument", "timeout"):
        checks.check_timeout(timeout)


@pytest.mark.parametrize("timeout", [0.001, 1, 30.0, 86400])
def test_timeouts_within_bounds_pass(timeout: float) -> None:
    assert checks.check_timeout(timeout) == timeout


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.dictionaries(NAMES, VALUES, max_size=80))
def test_environments_pass_whole_or_not_at_all(env: dict[str, str]) -> None:
    if len(env) > 64 or any("\0" in value for value in env.values()):
        with fault(Kind.INVALID, "invalid_argument"):
            checks.check_env("env", env)
    else:
        got = dict(checks.check_env("env", env))
        assert got == {name.encode(): value.encode() for name, value in env.items()}


@pytest.mark.parametrize("name", ["", "1A", "A=B", "A B", "-A", "A\0", "Ä", "A" * 3 + "\n"])
def test_other_variable_names_are_refused(name: str) -> None:
    with fault(Kind.INVALID, "invalid_argument"):
        checks.check_env("env", {name: "x"})


def test_the_size_of_an_environment_is_bounded() -> None:
    room = (32 << 10) - len("A") - 2
    checks.check_env("env", {"A": "x" * room})
    with fault(Kind.INVALID, "invalid_argument", "env"):
        checks.check_env("env", {"A": "x" * (room + 1)})


def test_a_fault_about_a_variable_does_not_tell_its_value() -> None:
    with pytest.raises(Fault) as caught:
        checks.check_env("env", {"TOKEN": "hunter2\0"})
    assert "hunter2" not in f"{caught.value} {caught.value.detail} {caught.value.hint}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpus", 0),
        ("cpus", float("nan")),
        ("memory", 0),
        ("memory", 512),
        ("memory", 1e9),
        ("pids", -1),
        ("disk", True),
        ("inodes", 1),
        ("open_files", 10**9),
    ],
)
def test_limits_have_bounds(field: str, value: Any) -> None:
    with fault(Kind.INVALID, "invalid_argument", f"limits.{field}"):
        checks.check_limits(replace(Limits(), **{field: value}))


def test_bounds_are_said_as_people_write_them() -> None:
    with pytest.raises(Fault, match="must be 16m to 16t"):
        checks.check_limits(replace(Limits(), memory=1))
    with pytest.raises(Fault, match="more than 0 and at most 2592000 seconds"):
        checks.check_ttl(1e9)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SessionSpec(session_id="a b"), "session_id"),
        (SessionSpec(tenant="--x"), "tenant"),
        (SessionSpec(image="--privileged"), "image"),
        (SessionSpec(image="a b"), "image"),
        (SessionSpec(ttl=0), "ttl"),
        (SessionSpec(ttl=1e9), "ttl"),
    ],
)
def test_a_session_is_checked_in_every_field(spec: SessionSpec, field: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", field):
        checks.check_session(spec)


CODE = "a 'b' \"c\" $d \\e\n\tf"


@pytest.mark.parametrize(
    ("language", "words"),
    [
        (Language.BASH, (b"bash", b"-c", b"--")),
        (Language.PYTHON, (b"python3", b"-c")),
        (Language.NODE, (b"node", b"-e")),
        (Language.TS, (b"tsx", b"-e")),
    ],
)
def test_code_becomes_the_exact_argv_of_its_language(language: Language, words: tuple[bytes, ...]) -> None:
    assert check_argv(RunSpec("s", CODE, language)) == (*words, CODE.encode())


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (RunSpec("s", "a\0"), "code"),
        (RunSpec("s", "x" * ((16 << 20) + 1)), "code"),
        (RunSpec("s", "x", argv=(b"a",)), "argv"),
        (RunSpec("s", argv=(b"",)), "argv"),
        (RunSpec("s", argv=(b"a", b"b\0")), "argv[1]"),
        (RunSpec("s", argv=(b"a", b"x" * (128 << 10))), "argv[1]"),
        (RunSpec("s", argv=(b"a",) * 1_100_000), "argv"),
    ],
)
def test_other_commands_are_refused(spec: RunSpec, field: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", field):
        check_argv(spec)

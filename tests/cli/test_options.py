"""The plain reader of run's options and argparse agree wherever the plain one gives an answer."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.cli.commands import build_parser
from k8e.cli.process import Failure
from k8e.cli.run import OPTIONS, RunOptions, read_plainly
from k8e.cli.state import find_session, is_name

WORDS = [*OPTIONS, *(f"{name}=v" for name in OPTIONS), *(f"{name}=" for name in OPTIONS)]
WORDS += [
    "--timeout=1e3",
    "--lang=ts",
    "python",
    "1.5",
    "code",
    "",
    "-",
    "--",
    "-1",
    "-x",
    "- x",
    "--lan",
    "a=b",
    "nan",
    "--raw=1",
]


def read_with_argparse(words: list[str]) -> dict[str, object] | None:
    try:
        parsed = build_parser().parse_args(["sandbox", "run", *words])
    except Failure:
        return None
    return {name: getattr(parsed, name) for name in vars(RunOptions())}


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=6))
def test_agreement(words: list[str]) -> None:
    plain = read_plainly(words)
    if plain is not None:
        assert read_with_argparse(words) == vars(plain)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["code"],
        ["code", "--lang", "python"],
        ["--lang=python", "code"],
        ["code", "--session-id", "s", "--timeout", "5", "--raw"],
        ["code", "--tenant=t", "--background"],
        ["--env", "A=1", "code", "--env=B=2", "--workdir", "/", "--stdin"],
    ],
)
def test_the_usual_spellings_need_no_argparse(words: list[str]) -> None:
    assert read_plainly(words) is not None


def test_defaults_are_not_shared() -> None:
    first = read_plainly(["--env", "A=1"])
    assert first is not None
    assert first.env == ["A=1"]
    assert RunOptions().env == []


@given(st.text(max_size=70))
def test_a_name_is_safe_as_a_path(text: str) -> None:
    if is_name(text):
        assert os.path.basename(text) == text
        assert text not in ("", ".", "..")
        assert not text.startswith("-")


@given(st.binary(max_size=200))
def test_any_state_gives_a_name_or_nothing(content: bytes) -> None:
    found = find_session(content)
    assert found == "" or is_name(found)

"""Sizes and spans of time as people write them, at both command lines."""

from __future__ import annotations

import pytest

from k8e.cli.agentkernel.leading_options import take_options
from k8e.cli.agentkernel.run import TABLE
from k8e.cli.process import Failure
from k8e.cli.values import read_life, read_size, read_span


class Taken:
    memory = 0
    timeout = 0.0


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("512m", 512 << 20), ("1.5G", 3 << 29), ("1GiB", 1 << 30), ("2kb", 2048)]
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("15m", 900.0), ("2D", 172_800.0)])
def test_spans(text: str, seconds: float) -> None:
    assert read_span(text) == seconds


def test_a_life_may_have_no_end() -> None:
    assert read_life("never") is None
    assert read_life("1h") == 3600.0


@pytest.mark.parametrize("text", ["", "m", "3x", "1.2.3m", "-1m", "1e3", pytest.param("9" * 400, id="endless")])
def test_what_is_no_size_is_said(text: str) -> None:
    with pytest.raises(Failure) as said:
        take_options([f"--memory={text}", "true"], TABLE, Taken())
    assert said.value.body["code"] == "usage"


@pytest.mark.parametrize("text", ["", "m", "3x", "1.2.3m", "-1m", "1e3"])
def test_what_is_no_span_is_said(text: str) -> None:
    with pytest.raises(Failure) as said:
        take_options([f"--timeout={text}", "true"], TABLE, Taken())
    assert said.value.body["code"] == "usage"

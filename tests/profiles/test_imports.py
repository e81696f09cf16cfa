"""A person waits for `agentkernel run`: what deciding imports is what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from k8e.profiles.record import Record

CHEAP = {"__future__", "k8e.errors"}


def test_deciding_imports_nothing_of_the_library() -> None:
    program = "import sys; before = set(sys.modules); import k8e.profiles.trust; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert {name for name in imported if name != "k8e" and not name.startswith("k8e.profiles")} <= CHEAP
    assert not {name for name in imported if name.endswith((".config", ".environment", ".mounts", ".lines"))}


class Pair(Record):
    first: int
    second: str = "x"


class TestRecords:
    def test_are_values(self) -> None:
        assert Pair(1) == Pair(first=1, second="x")
        assert Pair(1) != Pair(2)
        assert len({Pair(1), Pair(1, "x"), Pair(2)}) == 2
        assert repr(Pair(1)) == "Pair(first=1, second='x')"
        assert Pair(1).but(second="y") == Pair(1, "y")

    def test_are_frozen(self) -> None:
        with pytest.raises(AttributeError):
            Pair(1).first = 2  # type: ignore[misc]
        with pytest.raises(AttributeError):
            del Pair(1).first

    @pytest.mark.parametrize(
        ("values", "named"), [((), {}), ((1, 2, 3), {}), ((1,), {"third": 1}), ((1,), {"first": 1})]
    )
    def test_take_what_they_have_and_nothing_else(self, values: tuple[int, ...], named: dict[str, int]) -> None:
        with pytest.raises(TypeError):
            Pair(*values, **named)  # type: ignore[arg-type]

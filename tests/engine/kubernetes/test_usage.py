"""What a sandbox takes, from its own process table, in which it may write anything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from k8e.engine import Usage
from k8e.engine.kubernetes.usage import add_up, find_number

LINE = b"7 (a b) c) S 1 7 7 0 -1 4194560 100 0 0 0 10 20 3 4 20 0 1 0 100 1000000 50 18446744073709551615"


def test_times_and_pages_are_added() -> None:
    assert add_up([LINE, LINE]) == Usage(0.74, 2 * 50 * 4096)


def test_numbers_of_control_groups() -> None:
    assert find_number(b"1048576\n", b"") == 1 << 20
    assert find_number(b"usage_usec 12\nuser_usec 5\n", b"usage_usec") == 12
    assert find_number(b"", b"") is None


@given(st.binary(max_size=200), st.sampled_from([b"", b"usage_usec"]))
def test_whatever_a_control_group_says_is_no_error(text: bytes, key: bytes) -> None:
    found = find_number(text, key)
    assert found is None or found >= 0


@given(st.lists(st.binary(max_size=200)))
def test_a_line_that_cannot_be_read_counts_nothing(lines: list[bytes]) -> None:
    usage = add_up(lines)
    assert usage.cpu_seconds >= 0
    assert usage.memory >= 0

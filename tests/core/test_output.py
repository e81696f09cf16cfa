from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from k8e.core.model import OUTPUT_LIMIT
from k8e.core.sandbox.output import HeadTail, cut_before


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(0, 50))
def test_keeps_the_first_and_the_last_half_whatever_the_pieces(pieces: list[bytes], limit: int) -> None:
    whole = b"".join(pieces)
    kept = HeadTail(limit)
    for piece in pieces:
        kept.feed(piece)
    assert kept.total == len(whole)
    assert kept.truncated == (len(whole) > limit)
    tail = limit // 2
    expected = whole if len(whole) <= limit else whole[: limit - tail] + whole[len(whole) - tail :]
    assert kept.take() == expected


def test_keeps_half_a_mebibyte_of_each_end() -> None:
    kept = HeadTail()
    for number in range(3 * OUTPUT_LIMIT // 8):
        kept.feed(b"%08d" % number)
    content = kept.take()
    assert len(content) == OUTPUT_LIMIT
    assert content[: OUTPUT_LIMIT // 2].startswith(b"00000000")
    assert content[: OUTPUT_LIMIT // 2].endswith(b"%08d" % (OUTPUT_LIMIT // 16 - 1))
    assert content.endswith(b"%08d" % (3 * OUTPUT_LIMIT // 8 - 1))


def test_single_bytes_cost_no_more_than_the_limit_allows() -> None:
    kept = HeadTail(1000)
    for _ in range(100_000):
        kept.feed(b"x")
        assert len(kept._head) + len(kept._tail) <= 1500


@given(st.integers(0, 3 * OUTPUT_LIMIT), st.integers(0, 3 * OUTPUT_LIMIT))
def test_what_the_caller_has_is_left_out(total: int, start: int) -> None:
    whole = bytes(total)
    kept = HeadTail()
    kept.feed(whole)
    rest = cut_before(kept.take(), total, start)
    half = OUTPUT_LIMIT // 2
    if total <= OUTPUT_LIMIT:
        assert len(rest) == max(0, total - start)
    elif start < half:
        assert len(rest) == 2 * half - start
    else:
        assert len(rest) == min(half, max(0, total - start))

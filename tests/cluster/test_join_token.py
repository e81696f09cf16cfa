"""Tokens by which a machine joins: one form, bound to one cluster, with an end, and never shown by accident."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.cluster.trust.join_token import (
    BadToken,
    JoinToken,
    describe_token,
    name_secret,
    read_time,
    read_token,
    write_time,
)

NOW = 1_790_000_000.0
FINGERPRINT = "0123456789abcdef" * 4
tokens = st.builds(
    JoinToken,
    st.text("0123456789abcdef", min_size=64, max_size=64),
    st.text("abc019", min_size=6, max_size=6),
    st.text("abz019", min_size=16, max_size=16),
)


def store(described: dict[str, Any]) -> dict[str, Any]:
    """The Secret as the API server gives it back."""
    data = {name: base64.b64encode(value.encode()).decode() for name, value in described["stringData"].items()}
    metadata = {**described["metadata"], "creationTimestamp": write_time(NOW)}
    return {"type": described["type"], "metadata": metadata, "data": data}


@given(tokens)
def test_a_token_is_read_as_it_was_written(token: JoinToken) -> None:
    assert JoinToken.parse(token.text) == token
    assert JoinToken.parse(f"{token.text}\n") == token
    assert len(token.text) == 93


@given(st.text())
def test_any_other_text_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(BadToken) as caught:
        JoinToken.parse(text)
    assert caught.value.detail == ""


@given(tokens, st.integers(0, 92), st.characters())
def test_a_token_with_another_character_is_another_one_or_none(token: JoinToken, place: int, other: str) -> None:
    text = token.text[:place] + other + token.text[place + 1 :]
    try:
        assert (JoinToken.parse(text) == token) == (text.strip() == token.text)
    except BadToken:
        assert text != token.text


def test_a_token_is_for_one_authority() -> None:
    token = JoinToken.make(FINGERPRINT)
    assert token.is_for(FINGERPRINT)
    assert not token.is_for(FINGERPRINT.replace("0", "1"))
    assert JoinToken.make(FINGERPRINT) != token


def test_a_token_shows_no_secret_when_it_is_logged() -> None:
    token = JoinToken.make(FINGERPRINT)
    assert token.secret not in repr(token)
    assert token.secret in token.text


@given(tokens, st.text("abc äö", max_size=20), st.one_of(st.none(), st.integers(0, 4_000_000_000)))
def test_a_secret_is_read_as_it_was_described(token: JoinToken, description: str, expires: int | None) -> None:
    record = read_token(store(describe_token(token, description, expires)))
    assert record is not None
    assert (record.id, record.description, record.created, record.expires) == (token.id, description, NOW, expires)
    assert record.is_over(NOW) == (expires is not None and expires <= NOW)
    assert token.secret not in str(record.body)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "Opaque"},
        {"data": None},
        {"data": {"token-id": "!!"}},
        {"metadata": None},
        {"metadata": {"name": "bootstrap-token-other1", "creationTimestamp": write_time(NOW)}},
        {"metadata": {"name": "bootstrap-token-abc123", "creationTimestamp": "yesterday"}},
    ],
)
def test_what_is_no_token_is_none(change: dict[str, Any]) -> None:
    found = store(describe_token(JoinToken(FINGERPRINT, "abc123", "0" * 16), "", None))
    assert read_token(found) is not None
    assert read_token({**found, **change}) is None


def test_a_token_that_is_being_deleted_is_none() -> None:
    found = store(describe_token(JoinToken(FINGERPRINT, "abc123", "0" * 16), "", None))
    found["metadata"]["deletionTimestamp"] = write_time(NOW)
    assert read_token(found) is None


@pytest.mark.parametrize("text", ["", "abc12", "abc1234", "ABC123", "../abc", "abc.12"])
def test_an_id_is_six_characters(text: str) -> None:
    with pytest.raises(BadToken):
        name_secret(text)


@given(st.integers(0, 4_000_000_000))
def test_times_are_read_as_they_were_written(seconds: int) -> None:
    assert read_time(write_time(seconds)) == seconds


def test_a_server_s_token_has_a_key_that_the_cluster_does_not_get() -> None:
    token = JoinToken.make(FINGERPRINT, server=True)
    assert JoinToken.parse(token.text) == token
    assert len(token.text) == 159
    described = describe_token(token, "", None)
    assert token.key not in str(described)
    assert token.key not in repr(token)
    record = read_token(store(described))
    assert record is not None
    assert record.body["for"] == "server"
    worker = read_token(store(describe_token(JoinToken.make(FINGERPRINT), "", None)))
    assert worker is not None
    assert worker.body["for"] == "worker"

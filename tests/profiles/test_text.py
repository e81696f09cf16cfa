"""Nothing that came from elsewhere acts on a terminal, and nothing of it is lost."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.profiles.text import clean, to_json

# Set the title, write the clipboard, move the cursor; in seven bits and in eight. Reverse, hide, end the line.
HOSTILE = (
    "\x1b]0;x\x07",
    "\x9d52;c;eA==\x9c",
    "\x9b2J",
    "\x7f\x08\r",
    "a\u202egpj.exe",
    "\u2028\u2066\ufeff\xad",
    "\U000e0041",
)


def acts(text: str) -> bool:
    return any(unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp") for letter in text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text(text: str) -> None:
    assert acts(text)
    assert not acts(clean(text))
    line = to_json({text: [text]}).decode()
    assert line.endswith("\n")
    assert not acts(line[:-1])
    assert json.loads(line) == {text: [text]}


@given(st.text(st.characters(exclude_categories=())))
def test_json_keeps_every_letter(text: str) -> None:
    line = to_json(text).decode()
    assert json.loads(line) == text
    assert not any(unicodedata.category(letter) == "Cc" for letter in line[:-1])
    assert "\n" not in clean(text)

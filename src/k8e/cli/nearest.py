"""The word that was probably meant, for usage errors. Imported only for one."""

from __future__ import annotations

import difflib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def find_nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is most like this one; empty when none is."""
    found = difflib.get_close_matches(word.lower(), known, n=1)
    return found[0] if found else ""


def suggest(word: str, known: Iterable[str], otherwise: str) -> str:
    """A hint that asks for the nearest word, and otherwise says this."""
    nearest = find_nearest(word, known)
    return f"did you mean {nearest}? {otherwise}" if nearest else otherwise

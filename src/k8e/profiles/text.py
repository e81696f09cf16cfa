"""Text that came from anywhere (a folder's name, a file of a repository), for a terminal."""

from __future__ import annotations


def clean(text: str) -> str:
    """One line, in which nothing acts on a terminal."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )

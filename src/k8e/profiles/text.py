"""Text that came from anywhere (a folder's name, a file of a repository, what a command printed), for a terminal."""

from __future__ import annotations


def clean(text: str) -> str:
    """One line, in which nothing acts on a terminal."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )


def to_json(value: object) -> bytes:
    """One line of UTF-8, in which nothing acts on a terminal either. JSON itself escapes the first 32 controls, but not
    DEL, not the second set (where one begins a command, as ESC [ does), and nothing that reverses or hides text. A
    lone surrogate, which is how text carries an odd byte, becomes JSON's own escape too."""
    import json
    import re

    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = re.sub(_ACTING, lambda found: _escape(found[0]), text)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _escape(letter: str) -> str:
    units = letter.encode("utf-16-be")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


_ACTING = "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"

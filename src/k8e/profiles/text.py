"""Text for people: untrusted text for a terminal, and limits as people write them. Imports nothing at the start."""

from __future__ import annotations


def clean(text: str) -> str:
    """Escapes everything that a terminal would act on; the result is one line."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )


def to_json(value: object) -> bytes:
    """Returns JSON as one line of UTF-8 that no terminal acts on. JSON itself escapes the first 32 control characters,
    but not DEL, not the C1 set (where one character begins a command, as ESC [ does), and nothing that reverses or
    hides text. A lone surrogate, which stands for an invalid byte, becomes a JSON escape, too."""
    import json

    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not text.isascii() or "\x7f" in text:
        import re

        text = re.sub(_ACTING, lambda found: _escape(found[0]), text)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _escape(letter: str) -> str:
    units = letter.encode("utf-16-be")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


_ACTING = "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"


BYTES = ("memory", "disk")
UNITS = (("t", 1 << 40), ("g", 1 << 30), ("m", 1 << 20), ("k", 1 << 10))


def describe_amount(name: str, value: float) -> str:
    """Formats a limit (16m, not 1.67772e+07). `name` says whether it counts bytes. Different values look different."""
    if name in BYTES and value % 1024 == 0:
        for unit, size in UNITS:
            if value >= size and value * 1024 % size == 0:
                return f"{value / size:.12g}{unit}"
    return str(int(value)) if value == int(value) else repr(value)

"""Host names: their canonical form, and those that no list can open."""

from __future__ import annotations

import re

_LABEL = re.compile(r"[a-z0-9_-]{1,63}", re.ASCII)
# `127.1`, `0x7f.1`, `2130706433`: resolvers and clients read these as addresses, so they are never names.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)

MAX_NAME = 253
MAX_TEXT = 512  # before it is known to be anything; IDNA takes long over long texts

METADATA_NAMES = frozenset(
    {
        "instance-data",
        "instance-data.ec2.internal",
        "metadata",
        "metadata.azure.internal",
        "metadata.goog",
        "metadata.google.internal",
        "metadata.packet.net",
        "metadata.platformequinix.com",
        "metadata.tencentyun.com",
    }
)


class InvalidEntry(ValueError):
    """The text is not an entry of a list of hosts: `cause` says why, `hint` what to write instead."""

    def __init__(self, text: str, cause: str, hint: str) -> None:
        self.text = text
        self.cause = cause
        self.hint = hint
        super().__init__(f"{text!r}: {cause}")


def canonical_name(text: str) -> str:
    """Returns the canonical form of a host name (IDNA, lower case, no trailing dot). Raises InvalidEntry."""
    if len(text) > MAX_TEXT:
        raise InvalidEntry(text[:80] + "...", f"it has {len(text)} characters", f"a name has {MAX_NAME} at most")
    name = (text if text.isascii() else _to_ascii(text)).lower().removesuffix(".")
    if not name:
        raise InvalidEntry(text, "it is empty", "write a host name, such as example.com")
    if len(name) > MAX_NAME:
        raise InvalidEntry(text, f"it has {len(name)} characters", f"a name has {MAX_NAME} at most")
    labels = name.split(".")
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise InvalidEntry(text, *_label_fault(label))
    if _NUMBER.fullmatch(labels[-1]):
        raise InvalidEntry(
            text,
            "a name does not end in a number, and this is no address in its usual spelling",
            "write addresses as four decimal numbers without leading zeros (192.0.2.1), or as IPv6",
        )
    return name


def is_metadata_name(name: str) -> bool:
    """Whether it is a cloud provider's metadata name, which no list opens; the name is in canonical form."""
    return _is_under(name, METADATA_NAMES)


def is_local_name(name: str) -> bool:
    """Whether the name means the machine itself by definition, without a DNS query."""
    return _is_under(name, {"localhost", "localhost.localdomain"})


def _is_under(name: str, names: set[str] | frozenset[str]) -> bool:
    while name not in names:
        _, dot, name = name.partition(".")
        if not dot:
            return False
    return True


def _label_fault(label: str) -> tuple[str, str]:
    if not label:
        return "it has an empty label", "write one dot between the parts of a name"
    if len(label) > 63:
        return f"a label has {len(label)} characters", "the parts between dots have 63 at most"
    if "*" in label:
        return "'*' stands only for the first label", "write *.example.com for all subdomains of example.com"
    wrong = next(character for character in label if not _LABEL.fullmatch(character))
    return f"{wrong!r} is not part of a name", "names have letters, digits, '-', '_' and dots"


def _to_ascii(text: str) -> str:
    import idna  # only here: its tables cost tens of milliseconds

    try:
        return idna.encode(text, uts46=True, transitional=False).decode("ascii")
    except UnicodeError as error:
        raise InvalidEntry(text, f"not a host name: {error}", "write the name in its xn-- form") from error

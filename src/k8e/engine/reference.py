"""Names of images, as docker users write them. Pure and strict: what comes out is one canonical form.

`python:3.12` is `docker.io/library/python:3.12`; `localhost:5000/a/b` has a registry, because its first part has a dot,
a port, or is localhost. Nothing that could be taken for a flag, a path or an address with another meaning gets through.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

LONGEST: Final = 512  # characters of all of it
_DEFAULT: Final = "docker.io"
_PART: Final = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*", re.ASCII)
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_SHOWN: Final = re.compile(r"[^ -~]")


class InvalidReference(ValueError):
    """It is not the name of an image. `cause` says why, with nothing in it that a terminal acts on."""

    def __init__(self, text: str, cause: str) -> None:
        self.cause = cause
        shown = _SHOWN.sub("?", text[:100])
        super().__init__(f"{shown!r} is not the name of an image: {cause}")


@dataclass(frozen=True, slots=True)
class Reference:
    host: str  # of the registry, with its port where it has one
    path: str  # of the repository there
    tag: str = ""
    digest: str = ""  # sha256:...; it counts, where there is a tag as well

    def __str__(self) -> str:
        """Canonical: equal ones are the same image, by name."""
        return (
            f"{self.host}/{self.path}"
            + (f":{self.tag}" if self.tag else "")
            + (f"@{self.digest}" if self.digest else "")
        )

    @property
    def short(self) -> str:
        """As people write it."""
        text = str(self).removeprefix(f"{_DEFAULT}/")
        return text.removeprefix("library/") if text.count("/") == 1 and self.host == _DEFAULT else text

    @property
    def name(self) -> str:
        """The hostname alone."""
        return split_host(self.host)[0]

    @property
    def loopback(self) -> bool:
        """On this machine: no network is between, on which others could listen."""
        return is_loopback(self.name)


def parse_reference(text: str) -> Reference:
    """Without a tag and a digest it is `latest`."""
    if not text:
        raise InvalidReference(text, "it is empty")
    if len(text) > LONGEST:
        raise InvalidReference(text, f"it is longer than {LONGEST} characters")
    if _DIGEST.fullmatch(text):
        raise InvalidReference(text, "it is a digest, which has to follow a name and an @")
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise InvalidReference(text, "what follows the @ is no sha256 digest")
    host, path = _split_registry(text, rest)
    path, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise InvalidReference(text, "what follows the colon is no tag")
    if not path or len(path) > 255 or not all(_PART.fullmatch(part) for part in path.split("/")):
        raise InvalidReference(text, "a repository has parts of lower case letters, digits and . _ - between slashes")
    if host == _DEFAULT and "/" not in path:
        path = f"library/{path}"
    return Reference(host, path, tag if tag or digest else "latest", digest)


def _split_registry(text: str, rest: str) -> tuple[str, str]:
    first, slash, remainder = rest.partition("/")
    if not slash or not (set(first) & set(".:[") or first == "localhost"):
        return _DEFAULT, rest
    name, port = split_host(first)
    if not _is_host(name):
        raise InvalidReference(text, "its registry is neither a host name in lower case nor an address")
    if port and not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise InvalidReference(text, "its registry has a port that cannot be")
    if first.endswith(":"):
        raise InvalidReference(text, "its registry has an empty port")
    return _DEFAULT if first == "index.docker.io" else first, remainder


def split_host(text: str) -> tuple[str, str]:
    """Name and port of what stands before the first slash; an IPv6 address keeps its brackets."""
    if text.startswith("["):
        name, bracket, port = text.partition("]")
        return name + bracket, port.removeprefix(":") if port.startswith(":") else port
    name, _, port = text.partition(":")
    return name, port


def _is_host(name: str) -> bool:
    if name.startswith("["):
        try:
            return name.endswith("]") and "%" not in name and str(ipaddress.IPv6Address(name[1:-1])) == name[1:-1]
        except ValueError:
            return False
    labels = name.split(".")
    if all(label.isdigit() for label in labels):
        try:  # in the usual form only: others are read differently by different programs
            return str(ipaddress.IPv4Address(name)) == name
        except ValueError:
            return False
    return len(name) <= 253 and all(_LABEL.fullmatch(label) for label in labels) and not labels[-1].isdigit()


def is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False

"""The types of values in k8e.toml: how each is read, and what is allowed, in words."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Final, Generic, TypeVar

from k8e.policy import Address, HostList, InvalidEntry

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ValueType(Generic[T]):
    allowed: str  # for people; docs/settings.md has the same words
    read: Callable[[Any], T]  # from TOML; ValueError says what is wrong


def key(default: object, kind: ValueType[T]) -> T:
    """Makes a field of a section. The default is written as in the file."""
    value: Any = field(default=kind.read(default), metadata={"kind": kind, "default": default})
    return value  # type: ignore[no-any-return]


def optional(kind: ValueType[T]) -> ValueType[T | None]:
    """Makes a type whose key may be left out; its default is None."""
    return ValueType(kind.allowed, lambda value: None if value is None else kind.read(value))


def _expect(value: Any, kind: type[T], noun: str) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"is not {noun}")
    return value


def _within(value: T, lowest: Any, highest: Any) -> T:
    if not lowest <= value <= highest:  # NaN is not
        raise ValueError("is out of range")
    return value


FLAG: Final = ValueType("true or false", lambda value: _expect(value, bool, "true or false"))


def count(lowest: int, highest: int) -> ValueType[int]:
    return ValueType(
        f"{lowest} to {highest}", lambda value: _within(_expect(value, int, "a whole number"), lowest, highest)
    )


def number(lowest: float, highest: float) -> ValueType[float]:
    def read(value: Any) -> float:
        given: float = (
            _expect(value, float, "a number") if isinstance(value, float) else _expect(value, int, "a number")
        )
        return _within(float(given), lowest, highest)

    return ValueType(f"{lowest:g} to {highest:g}", read)


_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SPANS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_QUANTITY: Final = re.compile(r"([0-9]{1,15}) ?([a-z]?)")


def _read_quantity(value: Any, units: Mapping[str, int], noun: str) -> int:
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value.lower())
        if match is None or match[2] not in units:
            raise ValueError(f"is not {noun}")
        return int(match[1]) * units[match[2]]
    return _expect(value, int, noun)


def size(lowest: str, highest: str) -> ValueType[int]:
    """Bytes."""
    noun = 'a size (bytes, or text such as "512m")'
    limits = tuple(_read_quantity(text, _UNITS, noun) for text in (lowest, highest))
    return ValueType(
        f"a size, {lowest} to {highest}", lambda value: _within(_read_quantity(value, _UNITS, noun), *limits)
    )


def span(lowest: str, highest: str) -> ValueType[float]:
    """Seconds."""
    noun = 'a time (seconds, or text such as "15m")'
    limits = tuple(_read_quantity(text, _SPANS, noun) for text in (lowest, highest))
    return ValueType(
        f"a time, {lowest} to {highest}",
        lambda value: float(_within(_read_quantity(value, _SPANS, noun), *limits)),
    )


def many(kind: ValueType[T], noun: str, most: int = 64) -> ValueType[tuple[T, ...]]:
    def read(value: Any) -> tuple[T, ...]:
        values = _expect(value, list, "a list")
        if len(values) > most:
            raise ValueError(f"has {len(values)} entries, the limit is {most}")
        return tuple(kind.read(each) for each in values)

    return ValueType(f"a list of {noun}", read)


def _read_text(value: Any) -> str:
    text = _expect(value, str, "text")
    if "\0" in text:
        raise ValueError("contains a NUL")
    return text


def choice(*words: str) -> ValueType[str]:
    def read(value: Any) -> str:
        if _read_text(value) not in words:
            raise ValueError("is none of the allowed words")
        return _read_text(value)

    return ValueType(" or ".join(words), read)


TEXT: Final = ValueType("text", _read_text)
_OBJECT: Final = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def _read_object(value: Any) -> str:
    text = _read_text(value)
    if text and not _OBJECT.fullmatch(text):
        raise ValueError("is no name of a Kubernetes object")
    return text


OBJECT: Final = ValueType("the name of an object, or empty", _read_object)


def _read_image(value: Any) -> str:
    text = _read_text(value)
    if text != "*" and ("/" not in text or any(letter.isspace() or letter in "*?[" for letter in text)):
        raise ValueError("has an entry that is neither a whole reference nor the beginning of some")
    return text


IMAGES: Final = many(ValueType("a reference", _read_image), 'references, or their beginnings with a slash, or "*"')

ADDRESS: Final[ValueType[Address]] = ValueType("an address", lambda value: ipaddress.ip_address(_read_text(value)))


def _read_pool4(value: Any) -> IPv4Network:
    network = IPv4Network(_read_text(value))
    if not network.is_private or network.is_loopback or network.is_link_local or not 8 <= network.prefixlen <= 24:
        raise ValueError("is no private block of that size")
    return network


def _read_pool6(value: Any) -> IPv6Network:
    network = IPv6Network(_read_text(value))
    if not network.subnet_of(IPv6Network("fc00::/7")) or not 32 <= network.prefixlen <= 96:
        raise ValueError("is no unique local block of that size")
    return network


POOL4: Final = ValueType("a private block, /8 to /24", _read_pool4)
POOL6: Final = ValueType("a block within fc00::/7, /32 to /96", _read_pool6)


def _read_hosts(value: Any) -> HostList:
    texts = [_read_text(each) for each in _expect(value, list, "a list")]
    try:
        return HostList.parse(texts)
    except InvalidEntry as error:
        raise ValueError(f"has an entry {error.text!r} which {error.cause}") from error


HOSTS: Final = ValueType("a list of hosts, as --allowed-hosts takes them", _read_hosts)


def _read_listen(value: Any) -> str:
    text = _read_text(value)
    if not text:
        return text
    host, _, port = text.rpartition(":")
    ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    if not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("has no port")
    return text


_NAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,62})(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}))*")


def _read_name(value: Any) -> str:
    text = _read_text(value)
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        if not _NAME.fullmatch(text):
            raise ValueError("has an entry that is no name and no address") from None
        return text


LISTEN: Final = ValueType("ADDRESS:PORT, or empty", _read_listen)
NAMES: Final = many(ValueType("a name or an address", _read_name), "names and addresses")

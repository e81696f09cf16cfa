"""k8e.toml: what the administrator of a machine decides, read once when the daemon starts.

Strict, because a setting that is misspelt and ignored is a machine that is configured differently than somebody thinks:
whatever is not understood is an error that names the file, the key and what is allowed there. The lowest room: nothing
of ours but `k8e.policy` is imported.

A new section is a frozen dataclass whose fields are made by `key`, a line in `Settings`, and its table in
docs/settings.md (tests/settings shows when these disagree).
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from k8e.policy import Address, HostList, InvalidEntry

T = TypeVar("T")

USUAL: Final = Path("/etc/k8e/k8e.toml")
MAX_FILE: Final = 1 << 20


class SettingsError(Exception):
    """The file is not one that the daemon can work with. `key` is `section.key`, or empty."""

    def __init__(self, code: str, file: Path, error: str, *, key: str = "", detail: str = "", hint: str = "") -> None:
        self.code = code
        self.file = file
        self.key = key
        self.error = error
        self.detail = detail
        self.hint = hint
        super().__init__(f"{code}: {error}" + (f" ({detail})" if detail else ""))


# Kinds of values


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    allowed: str  # for people; docs/settings.md has the same words
    read: Callable[[Any], T]  # from TOML; ValueError says what is wrong


def key(default: object, kind: Kind[T]) -> T:
    """A field of a section. The default is spelt as in the file."""
    value: Any = field(default=kind.read(default), metadata={"kind": kind, "default": default})
    return value  # type: ignore[no-any-return]


def optional(kind: Kind[T]) -> Kind[T | None]:
    """May be left out; None is how its default is spelt."""
    return Kind(kind.allowed, lambda value: None if value is None else kind.read(value))


def _expect(value: Any, kind: type[T], noun: str) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"is not {noun}")
    return value


def _within(value: T, lowest: Any, highest: Any) -> T:
    if not lowest <= value <= highest:  # which a NaN is not
        raise ValueError("is out of range")
    return value


FLAG: Final = Kind("true or false", lambda value: _expect(value, bool, "true or false"))


def count(lowest: int, highest: int) -> Kind[int]:
    return Kind(f"{lowest} to {highest}", lambda value: _within(_expect(value, int, "a whole number"), lowest, highest))


def number(lowest: float, highest: float) -> Kind[float]:
    def read(value: Any) -> float:
        given: float = (
            _expect(value, float, "a number") if isinstance(value, float) else _expect(value, int, "a number")
        )
        return _within(float(given), lowest, highest)

    return Kind(f"{lowest:g} to {highest:g}", read)


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


def size(lowest: str, highest: str) -> Kind[int]:
    """Bytes."""
    noun = 'a size (bytes, or text such as "512m")'
    limits = tuple(_read_quantity(text, _UNITS, noun) for text in (lowest, highest))
    return Kind(f"a size, {lowest} to {highest}", lambda value: _within(_read_quantity(value, _UNITS, noun), *limits))


def span(lowest: str, highest: str) -> Kind[float]:
    """Seconds."""
    noun = 'a time (seconds, or text such as "15m")'
    limits = tuple(_read_quantity(text, _SPANS, noun) for text in (lowest, highest))
    return Kind(
        f"a time, {lowest} to {highest}",
        lambda value: float(_within(_read_quantity(value, _SPANS, noun), *limits)),
    )


def choice(*words: str) -> Kind[str]:
    def read(value: Any) -> str:
        if value not in words:
            raise ValueError("is none of them")
        return str(value)

    return Kind(" or ".join(f'"{word}"' for word in words), read)


def many(kind: Kind[T], noun: str, most: int = 64) -> Kind[tuple[T, ...]]:
    def read(value: Any) -> tuple[T, ...]:
        values = _expect(value, list, "a list")
        if len(values) > most:
            raise ValueError(f"has {len(values)} entries, the limit is {most}")
        return tuple(kind.read(each) for each in values)

    return Kind(f"a list of {noun}", read)


def _read_text(value: Any) -> str:
    text = _expect(value, str, "text")
    if "\0" in text:
        raise ValueError("contains a NUL")
    return text


TEXT: Final = Kind("text", _read_text)


def _read_path(value: Any) -> Path:
    path = Path(_read_text(value))
    if not path.is_absolute():
        raise ValueError("is not an absolute path")
    return path


PATH: Final = Kind("an absolute path", _read_path)
ADDRESS: Final[Kind[Address]] = Kind("an address", lambda value: ipaddress.ip_address(_read_text(value)))


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


POOL4: Final = Kind("a private block, /8 to /24", _read_pool4)
POOL6: Final = Kind("a block within fc00::/7, /32 to /96", _read_pool6)


def _read_hosts(value: Any) -> HostList:
    texts = [_read_text(each) for each in _expect(value, list, "a list")]
    try:
        return HostList.parse(texts)
    except InvalidEntry as error:
        raise ValueError(f"has an entry {error.text!r} which {error.cause}") from error


HOSTS: Final = Kind("a list of hosts, as --allowed-hosts takes them", _read_hosts)


# Sections


@dataclass(frozen=True, slots=True)
class EgressSettings:
    """The network of sandboxes."""

    pool4: IPv4Network = key("10.203.0.0/16", POOL4)
    pool6: IPv6Network = key("fd6b:3865:6e65::/48", POOL6)
    nameservers: tuple[Address, ...] = key([], many(ADDRESS, "addresses", 8))
    allowed_hosts: HostList | None = key(None, optional(HOSTS))


@dataclass(frozen=True, slots=True)
class LimitsSettings:
    """What a session gets that says nothing."""

    cpus: float = key(0.5, number(0.01, 1024))
    memory: int = key("512m", size("16m", "16t"))
    pids: int = key(512, count(8, 1 << 22))
    disk: int = key("2g", size("1m", "1024t"))
    ttl: float = key("1h", span("1s", "30d"))


@dataclass(frozen=True, slots=True)
class QuotasSettings:
    """What one payer may have at the same time. 0 is no limit."""

    sessions: int = key(256, count(0, 1_000_000))
    children: int = key(16, count(0, 1_000_000))
    cpus: float = key(0, number(0, 1_000_000))
    memory: int = key(0, size("0", "1024t"))
    disk: int = key(0, size("0", "1024t"))
    creates_per_minute: int = key(0, count(0, 1_000_000))
    concurrent_runs: int = key(0, count(0, 1_000_000))
    images: int = key(256, count(0, 1_000_000))
    image_bytes: int = key("64g", size("0", "1024t"))


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Sandboxes that are made ahead."""

    enabled: bool = key(True, FLAG)
    min: int = key(1, count(0, 1000))
    max: int = key(8, count(0, 1000))
    free_memory: float = key(0.2, number(0, 1))
    prewarm: bool = key(False, FLAG)


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


LISTEN: Final = Kind("ADDRESS:PORT, or empty", _read_listen)
NAMES: Final = many(Kind("a name or an address", _read_name), "names and addresses")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Who comes from other machines."""

    listen: str = key("127.0.0.1:50051", LISTEN)
    names: tuple[str, ...] = key([], NAMES)


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """The log of who did what."""

    required: bool = key(False, FLAG)
    code: bool = key(False, FLAG)
    size: int = key("16m", size("64k", "16g"))
    files: int = key(8, count(1, 1000))


@dataclass(frozen=True, slots=True)
class ApprovalsSettings:
    """Who answers for people."""

    same_user: bool = key(True, FLAG)
    life: float = key("1h", span("1s", "1d"))


@dataclass(frozen=True, slots=True)
class ImagesSettings:
    """How much of a stranger's image is taken."""

    layer_bytes: int = key("16g", size("1m", "16t"))
    layer_entries: int = key(2_000_000, count(1, 100_000_000))
    ratio: int = key(400, count(10, 1_000_000))


@dataclass(frozen=True, slots=True)
class Settings:
    egress: EgressSettings = EgressSettings()
    limits: LimitsSettings = LimitsSettings()
    quotas: QuotasSettings = QuotasSettings()
    gateway: GatewaySettings = GatewaySettings()
    pool: PoolSettings = PoolSettings()
    audit: AuditSettings = AuditSettings()
    approvals: ApprovalsSettings = ApprovalsSettings()
    images: ImagesSettings = ImagesSettings()


# Reading


def find_file() -> Path | None:
    """The one that K8E_CONFIG names, else the usual one if it is there."""
    named = os.environ.get("K8E_CONFIG")
    if named:
        return Path(named).absolute()
    return USUAL if USUAL.exists() else None


def load() -> Settings:
    """Without a file the defaults. Raises SettingsError."""
    file = find_file()
    return Settings() if file is None else read_file(file)


def read_file(file: Path) -> Settings:
    try:
        with file.open("rb") as source:
            found = os.fstat(source.fileno())
            content = source.read(MAX_FILE + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        hint = "see to the file, or let K8E_CONFIG name another one"
        raise SettingsError(
            "settings_unreadable", file, f"{file} cannot be read", detail=str(error), hint=hint
        ) from error
    if not stat.S_ISREG(found.st_mode) or len(content) > MAX_FILE:
        raise SettingsError("settings_unreadable", file, f"{file} is no file of settings")
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        # Whoever can write it decides what sandboxes may do.
        hint = f"chown root {file}; chmod go-w {file}"
        raise SettingsError("settings_untrusted", file, f"{file} could be changed by somebody else", hint=hint)
    try:
        return read_table(file, tomllib.loads(content.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError("settings_syntax", file, f"{file} is not TOML", detail=str(error)) from error


def read_table(file: Path, table: Mapping[str, Any]) -> Settings:
    sections = {each.name: type(each.default) for each in dataclasses.fields(Settings)}
    read: dict[str, Any] = {}
    for name, content in table.items():
        if name not in sections:
            raise SettingsError(
                "settings_unknown", file, f"{file}: there is no section [{name}]", key=name, hint=_list(sections)
            )
        if not isinstance(content, dict):
            raise SettingsError("settings_invalid", file, f"{file}: {name} is not a section", key=name)
        read[name] = _read_section(file, name, sections[name], content)
    return Settings(**read)


def _read_section(file: Path, section: str, kind: type[Any], content: Mapping[str, Any]) -> Any:
    known = {each.name: each for each in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in content.items():
        where = f"{section}.{name}"
        if name not in known:
            error = f"{file}: there is no key {name} in [{section}]"
            raise SettingsError("settings_unknown", file, error, key=where, hint=_list(known))
        allowed: Kind[Any] = known[name].metadata["kind"]
        try:
            values[name] = allowed.read(value)
        except ValueError as error:
            raise SettingsError(
                "settings_invalid",
                file,
                f"{file}: {where} {error}",
                key=where,
                detail=f"it is {value!r}"[:200],
                hint=f"allowed: {allowed.allowed}",
            ) from error
    return kind(**values)


def _list(names: Mapping[str, object]) -> str:
    return f"one of: {', '.join(names)}"

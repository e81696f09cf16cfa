"""Reads the values of agentkernel.toml. A wrong value raises ValueError, or ProfileError with its own hint. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from k8e.policy import HostList, InvalidEntry
from k8e.profiles.errors import ProfileError
from k8e.profiles.profile import PROFILES
from k8e.profiles.sandbox_policy import check_name, find_language


def list_words(words: Iterable[str]) -> str:
    return ", ".join(words)


def one_of(words: Any) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError("is none of what is allowed")
        return value

    return read


def read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is not true or false")
    return value


def read_text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("is not text")
    return value


def read_absolute(value: Any) -> str:
    text = read_text(value)
    if not text.startswith("/") or ".." in text.split("/"):
        raise ValueError("is not an absolute path")
    return text


def read_mode(value: Any) -> int:
    text = read_text(value)
    if not 3 <= len(text) <= 4 or not set(text) <= set("01234567") or int(text, 8) > 0o777:
        raise ValueError("is not the mode of a file")
    return int(text, 8)


def read_count(lowest: int, highest: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError("is not a whole number")
        if not lowest <= value <= highest:
            raise ValueError("is out of range")
        return value

    return read


def read_cpus(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("is not a number")
    if not 0.01 <= value <= 1024:
        raise ValueError("is out of range")
    return float(value)


def read_size(lowest: int, highest: int) -> Callable[[Any], int]:
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

    def read(value: Any) -> int:
        size = value
        if isinstance(value, str):
            number, unit = value[:-1].rstrip(), value[-1:].lower()
            if unit.isdecimal():
                number, unit = value, ""
            if not number.isascii() or not number.isdecimal() or unit not in units:
                raise ValueError('is not a size (bytes, or text such as "512m")')
            size = int(number) * units[unit]
        return read_count(lowest, highest)(size)

    return read


def read_megabytes(value: Any) -> int:
    return read_count(16, 1 << 24)(value) << 20


def read_hosts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("is not a list of hosts")
    try:
        return HostList.parse(value).texts
    except InvalidEntry as error:
        raise ProfileError("invalid_host", f"has an entry {error.text!r}: {error.cause}", hint=error.hint) from error


def read_image(value: Any) -> str:
    text = read_text(value)
    if text.startswith("-") or not text.isascii() or not text.isprintable() or " " in text or len(text) > 255:
        raise ValueError("is not the name of an image")
    return text


def read_language(value: Any) -> str:
    text = read_text(value)
    find_language(text)
    return text


Key = tuple[str, str, Callable[[Any], Any]]  # the option that it sets, the allowed values, the function that reads it
KEYS: Final[Mapping[str, Mapping[str, Key]]] = {
    "sandbox": {
        "name": ("name", "1 to 63 of A-Z a-z 0-9 _ -", lambda value: check_name(read_text(value))),
        "runtime": ("language", "a language", read_language),
        "base_image": ("image", "the name of an image", read_image),
    },
    "security": {
        "profile": ("profile", list_words(PROFILES), one_of(PROFILES)),
        "network": ("network", "true or false", read_flag),
        "mount_cwd": ("mount_cwd", "true or false", read_flag),
        "mount_home": ("mount_home", "true or false", read_flag),
        "pass_env": ("pass_env", "true or false", read_flag),
        "read_only": ("read_only", "true or false", read_flag),
        "allowed_hosts": ("allowed_hosts", "a list of hosts", read_hosts),
    },
    "resources": {
        "cpus": ("cpus", "0.01 to 1024", read_cpus),
        "vcpus": ("cpus", "0.01 to 1024", read_cpus),
        "memory": ("memory", "a size, 16m to 16t", read_size(16 << 20, 1 << 44)),
        "memory_mb": ("memory", "16 to 16777216", read_megabytes),
        "disk": ("disk", "a size, 1m to 1024t", read_size(1 << 20, 1 << 50)),
        "pids": ("pids", "8 to 4194304", read_count(8, 1 << 22)),
    },
}

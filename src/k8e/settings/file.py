"""Finds and reads the file of settings, and refuses one that other users can write."""

from __future__ import annotations

import dataclasses
import os
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from k8e.errors import ExplainedError
from k8e.settings.sections import Settings
from k8e.settings.values import ValueType

USUAL: Final = Path("/etc/k8e/k8e.toml")
MAX_FILE: Final = 1 << 20


class SettingsError(ExplainedError):
    """The daemon cannot use the file. `key` is `section.key`, or empty."""

    def __init__(self, code: str, file: Path, error: str, *, key: str = "", detail: str = "", hint: str) -> None:
        super().__init__(code, error, detail=detail, hint=hint)
        self.file = file
        self.key = key


def find_file() -> Path | None:
    """Returns the file that K8E_CONFIG names, else the usual one if it exists."""
    named = os.environ.get("K8E_CONFIG")
    if named:
        return Path(named).absolute()
    return USUAL if USUAL.exists() else None


def load() -> Settings:
    """Reads the settings; without a file, the defaults. Raises SettingsError."""
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
        hint = f"it has to be a plain file of at most {MAX_FILE} bytes"
        raise SettingsError("settings_unreadable", file, f"{file} is no file of settings", hint=hint)
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        # A user who can write the file decides what sandboxes may do.
        hint = f"chown root {file}; chmod go-w {file}"
        raise SettingsError("settings_untrusted", file, f"{file} can be written by other users", hint=hint)
    try:
        return read_table(file, tomllib.loads(content.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "docs/settings.md has the sections and keys; values are as in TOML"
        raise SettingsError("settings_syntax", file, f"{file} is not TOML", detail=str(error), hint=hint) from error


def read_table(file: Path, table: Mapping[str, Any]) -> Settings:
    sections = {each.name.replace("_", "."): type(each.default) for each in dataclasses.fields(Settings)}
    read: dict[str, Any] = {}
    for name, content in _flatten(table, sections):
        if name not in sections:
            raise SettingsError(
                "settings_unknown", file, f"{file}: there is no section [{name}]", key=name, hint=_list(sections)
            )
        if not isinstance(content, dict):
            hint = f"[{name}] on a line of its own, the keys below it"
            raise SettingsError("settings_invalid", file, f"{file}: {name} is not a section", key=name, hint=hint)
        read[name.replace(".", "_")] = _read_section(file, name, sections[name], content)
    return Settings(**read)


def _flatten(table: Mapping[str, Any], sections: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Lists the sections by their whole names: [runtimes.kata] is a table in a table."""
    outer = {name.partition(".")[0] for name in sections if "." in name}
    for name, content in table.items():
        if name in outer and isinstance(content, dict):
            yield from ((f"{name}.{inner}", value) for inner, value in content.items())
        else:
            yield name, content


def _read_section(file: Path, section: str, kind: type[Any], content: Mapping[str, Any]) -> Any:
    known = {each.name: each for each in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in content.items():
        where = f"{section}.{name}"
        if name not in known:
            error = f"{file}: there is no key {name} in [{section}]"
            raise SettingsError("settings_unknown", file, error, key=where, hint=_list(known))
        allowed: ValueType[Any] = known[name].metadata["kind"]
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

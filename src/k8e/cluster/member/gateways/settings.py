"""The settings of a gateway: the administrator's count, and the cluster's fill what they leave out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k8e.cluster.errors import StartFailed


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the administrator's settings, as every daemon of this machine has them."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        hint = f"correct {path}; docs/settings.md has its form"
        raise StartFailed("settings_unreadable", f"{path} cannot be read", detail=str(error), hint=hint) from error


def merge_settings(given: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Keeps what the administrator has set; the rest of these sections is ours."""
    merged = dict(given)
    for section, values in own.items():
        merged[section] = {**values, **dict(given.get(section) or {})}
    return merged


def write_toml(value: Mapping[str, Any], prefix: str = "") -> str:
    """A file of settings: tables of plain values, lists, and lists of flat tables. JSON's texts are TOML's, too."""
    plain = {name: each for name, each in value.items() if not isinstance(each, dict)}
    lines = [f"{_key(name)} = {_value(each)}\n" for name, each in plain.items()]
    for name, each in value.items():
        if isinstance(each, dict):
            path = f"{prefix}{_key(name)}"
            lines.append(f"\n[{path}]\n{write_toml(each, f'{path}.')}")
    return "".join(lines)


def _key(name: str) -> str:
    return json.dumps(name)


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(name)} = {_value(each)}' for name, each in value.items())}}}"
    return json.dumps(value)

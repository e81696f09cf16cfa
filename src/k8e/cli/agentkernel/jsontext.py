"""JSON for requests, without the 8 ms that importing `json` takes."""

from __future__ import annotations

from k8e.cli.client.http import quote_json


def pack(value: object) -> str:
    if isinstance(value, str):
        return quote_json(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote_json(key)}: {pack(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(pack, value)) + "]"
    raise TypeError(type(value))

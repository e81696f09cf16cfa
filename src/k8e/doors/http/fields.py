"""Reads the values of a JSON object or a query one by one, each by its type."""

from __future__ import annotations

import base64
import binascii
import enum
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from k8e.core.errors import Fault, Kind, correct
from k8e.doors.errors import invalid

_DECODER = json.JSONDecoder()
_OBJECT = "Send one JSON object: docs/http-api.md has its members."

Value = TypeVar("Value")
Choice = TypeVar("Choice", bound=enum.Enum)


def decode_object(body: bytes) -> dict[str, Any]:
    try:
        # What json.loads finds out about the encoding of any bytes takes as long as to decode these.
        plain = body[:1] == b"{" and body[1:2] != b"\0"
        value = _DECODER.decode(body.decode("utf-8", "surrogatepass")) if plain else json.loads(body)
    except (ValueError, RecursionError) as error:
        problem = "the request's body is not JSON"
        raise Fault(Kind.INVALID, "invalid_json", problem, detail=str(error), hint=_OBJECT) from error
    if not isinstance(value, dict):
        raise Fault(Kind.INVALID, "invalid_json", "the request's body is not a JSON object", hint=_OBJECT)
    return value


class Fields:
    """The values of one object. `finish` refuses those that were not read. None is the same as absent."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def take_text(self, name: str, default: str = "") -> str:
        if name not in self._values:  # as most are not: nothing to check
            return default
        return self._take(name, str, "a string", default)

    def take_flag(self, name: str) -> bool:
        if name not in self._values:
            return False
        return self._take(name, bool, "true or false", False)

    def take_number(self, name: str, default: float) -> float:
        value = self._values.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "is not a number")
        try:
            return float(value)
        except OverflowError:
            raise self._wrong(name, "is too large a number") from None

    def take_count(self, name: str, default: int) -> int:
        value = self._take(name, int, "a whole number", default)
        if isinstance(value, bool):
            raise self._wrong(name, "is not a whole number")
        return value

    def take_texts(self, name: str) -> list[str] | None:
        """None when it is not there, which is not the same as an empty list."""
        if name not in self._values:
            return None
        values = self._values.pop(name)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            hint = 'such as ["one", "two"]; a single one stands in a list, too'
            raise self._wrong(name, "is not a list of strings", hint)
        return values

    def take_words(self, name: str) -> str | list[str]:
        """One text, or a list of them."""
        if isinstance(self._values.get(name), str):
            return self.take_text(name)
        return self.take_texts(name) or []

    def take_fields(self, name: str) -> Fields:
        return Fields(self._take(name, dict, "an object", {}), f"{self._prefix}{name}.")

    def take_each(self, name: str) -> list[Fields]:
        """A list of objects."""
        values = self._take(name, list, "a list", [])
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise self._wrong(f"{name}[{index}]", "is not an object")
        return [Fields(value, f"{self._prefix}{name}[{index}].") for index, value in enumerate(values)]

    def take_object(self, name: str) -> dict[str, Any]:
        """As it is; the caller reads it."""
        return self._take(name, dict, "an object", {})

    def take_mapping(self, name: str) -> dict[str, str]:
        mapping = self._take(name, dict, "an object", {})
        for key, value in mapping.items():
            if not isinstance(value, str):
                raise invalid(f"{self._prefix}{name}", f"the value of {key!r} is not a string")
        return mapping

    def take_choice(self, name: str, kinds: type[Choice]) -> Choice | None:
        """A member of an enum, by its value."""
        if name not in self._values:
            return None
        text = self.take_text(name)
        try:
            return kinds(text)
        except ValueError:
            known = ", ".join(str(member.value) for member in kinds)
            raise invalid(self._prefix + name, f"{text!r} is no {name}", hint=f"one of: {known}") from None

    def take_bytes(self, name: str) -> bytes:
        """`name` as text or `name_base64`, not both."""
        encoded = self.take_text(f"{name}_base64")
        text = self.take_text(name)
        if encoded and text:
            raise invalid(f"{self._prefix}{name}", f"both {name} and {name}_base64 are given")
        if not encoded:
            return text.encode("utf-8", "surrogateescape")
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise invalid(f"{self._prefix}{name}_base64", "not base64") from error

    def finish(self) -> None:
        if self._values:
            raise self._wrong(next(iter(self._values)), "is not known here")

    def _take(self, name: str, kind: type[Value], noun: str, default: Value) -> Value:
        value = self._values.pop(name, default)
        if not isinstance(value, kind):
            raise self._wrong(name, f"is not {noun}")
        return value

    def _wrong(self, name: str, what: str, hint: str = "") -> Fault:
        field = self._prefix + name
        return invalid(field, f"{field} {what}", hint or correct(field))

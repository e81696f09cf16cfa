"""Arguments of tools become specs of core. Errors name the parameter."""

from __future__ import annotations

import base64
import binascii

from k8e.core.model import OUTPUT_LIMIT, RunSpec
from k8e.doors.errors import invalid
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.tools.schemas import DEFAULT_OUTPUT


def take_session(fields: Fields) -> str:
    named, alias = fields.take_text("session_id"), fields.take_text("name")
    if named and alias and named != alias:
        raise invalid("name", "session_id and name are two names for one thing, and differ", hint="give one of them")
    return named or alias


def take_timeout(fields: Fields) -> float:
    if "timeout" in fields and "timeout_ms" in fields:
        raise invalid("timeout_ms", "timeout and timeout_ms are both given", hint="give one of them")
    default = RunSpec("").timeout
    if "timeout_ms" in fields:
        return fields.take_number("timeout_ms", default * 1000) / 1000
    return fields.take_number("timeout", default)


def take_limit(fields: Fields, name: str = "max_output") -> int:
    limit = fields.take_count(name, DEFAULT_OUTPUT)
    if not 2 <= limit <= OUTPUT_LIMIT:
        raise invalid(name, f"{name} must be 2 to {OUTPUT_LIMIT}")
    return limit


def take_encoding(fields: Fields) -> str:
    encoding = fields.take_text("encoding", "utf-8")
    if encoding not in ("utf-8", "base64"):
        raise invalid("encoding", f"{encoding!r} is no encoding", hint="utf-8 or base64")
    return encoding


def decode_base64(content: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid("content", "content is not base64") from error


def encode_words(words: list[str]) -> tuple[bytes, ...]:
    return tuple(word.encode("utf-8", "surrogateescape") for word in words)


def take_command(fields: Fields) -> tuple[list[str], RunSpec]:
    """The words, and their run in a session that the tool names later. No shell reads them."""
    words = fields.take_words("command")
    if isinstance(words, str):
        hint = "a list of words for no shell; for a line of a shell: ['sh', '-c', '...']"
        raise invalid("command", "command is one text", hint=hint)
    if not words:
        raise invalid("command", "command is empty", hint="a list such as ['python3', '-c', 'print(1)']")
    spec = RunSpec(
        "",
        argv=encode_words(words),
        timeout=take_timeout(fields),
        workdir=fields.take_text("cwd"),
        env=fields.take_mapping("env"),
    )
    return words, spec

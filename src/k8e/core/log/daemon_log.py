"""The daemon log: one line for each event, `event key=value ...`.

Ids, counts and codes; never code, output, environment or content of files.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Final

LOGGER: Final = logging.getLogger("k8e.core")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:/@+-]+")


def format_event(event: str, fields: dict[str, object]) -> str:
    return " ".join([event, *[f"{name}={_quote(value)}" for name, value in fields.items()]])


def _quote(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def note(event: str, **fields: object) -> None:
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("%s", format_event(event, fields))


def warn(event: str, **fields: object) -> None:
    LOGGER.warning("%s", format_event(event, fields))

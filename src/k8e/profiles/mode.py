"""Compatibility modes: what the commands of an AI agent need, as a table.

A mode has the vendor's hosts. It does not name package registries: they are on the machine's default list of hosts
(docs/egress.md), so that a company mirror works. The engine refuses metadata services in every mode.
"""

from __future__ import annotations

from k8e.profiles.errors import ProfileError
from k8e.profiles.hosts import EVERYWHERE, Hosts
from k8e.profiles.profile import MODERATE, STRICT, Profile
from k8e.profiles.record import Record


class Mode(Record):
    name: str
    hosts: Hosts
    mount_cwd: bool
    isolation: Profile  # the profile when the user names none


NATIVE = Mode("native", EVERYWHERE, False, MODERATE)
CLAUDE = Mode("claude", Hosts(("api.anthropic.com", "cdn.anthropic.com"), usual=True), True, MODERATE)
CODEX = Mode("codex", Hosts(("api.openai.com", "cdn.openai.com"), usual=True), True, STRICT)
GEMINI = Mode("gemini", Hosts(("*.googleapis.com",), usual=True), True, MODERATE)

MODES = {mode.name: mode for mode in (NATIVE, CLAUDE, CODEX, GEMINI)}


def find_mode(name: str) -> Mode:
    if name not in MODES:
        raise ProfileError(
            "unknown_mode", f"there is no compatibility mode {name!r}", hint=f"one of: {', '.join(MODES)}"
        )
    return MODES[name]

"""k8e.toml: what the administrator of a machine decides, read once when the daemon starts.

Strict, because a setting that is misspelt and ignored is a machine that is configured differently than somebody thinks:
whatever is not understood is an error that names the file, the key and what is allowed there. The lowest room: nothing
of ours but `k8e.policy` is imported.

A new section is a frozen dataclass whose fields are made by `key`, a line in `Settings` (sections.py), and its table in
docs/settings.md (tests/settings shows when these disagree).
"""

from __future__ import annotations

from k8e.settings.file import SettingsError, find_file, load, read_file
from k8e.settings.sections import (
    ApprovalsSettings,
    AuditSettings,
    EgressSettings,
    GatewaySettings,
    ImagesSettings,
    LimitsSettings,
    PoolSettings,
    QuotasSettings,
    Settings,
)

__all__ = [
    "ApprovalsSettings",
    "AuditSettings",
    "EgressSettings",
    "GatewaySettings",
    "ImagesSettings",
    "LimitsSettings",
    "PoolSettings",
    "QuotasSettings",
    "Settings",
    "SettingsError",
    "find_file",
    "load",
    "read_file",
]

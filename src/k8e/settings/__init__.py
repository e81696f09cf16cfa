"""Reads k8e.toml, the administrator's settings, once when the daemon starts.

Strict: an unknown key or a wrong value is an error that names the file, the key and the allowed values. If the daemon
ignored it, the machine would be configured differently than its administrator expects. Of k8e only `k8e.policy`,
`k8e.errors` and `k8e.damage` may be imported.

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
    KataSettings,
    KubernetesSettings,
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
    "KataSettings",
    "KubernetesSettings",
    "LimitsSettings",
    "PoolSettings",
    "QuotasSettings",
    "Settings",
    "SettingsError",
    "find_file",
    "load",
    "read_file",
]

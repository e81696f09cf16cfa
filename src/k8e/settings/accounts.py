"""The service accounts of the cluster that may call, each with its tenants and its scope: [kubernetes] accounts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from k8e.settings.values import ValueType, choice

EVERY: Final = "*"  # as a name: every account of the namespace
MOST: Final = 1000
_SCOPES: Final = ("run", "operator", "admin")
_KEYS: Final = frozenset(("account", "tenants", "scope"))
_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME: Final = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_TENANT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")
_TENANTS: Final = 64  # of an operator or admin, as of a key


@dataclass(frozen=True, slots=True)
class AccountRule:
    namespace: str
    name: str
    tenants: tuple[str, ...]  # the first is the one of new sessions
    scope: str = "run"


def find_rule(rules: Sequence[AccountRule], namespace: str, name: str) -> AccountRule | None:
    """An account's own rule comes before the one for its namespace."""
    found = {rule.name: rule for rule in rules if rule.namespace == namespace}
    return found.get(name) or found.get(EVERY)


def _read(value: Any) -> tuple[AccountRule, ...]:
    if not isinstance(value, list):
        raise ValueError("is not a list")
    if len(value) > MOST:
        raise ValueError(f"has {len(value)} entries, the limit is {MOST}")
    rules: dict[tuple[str, str], AccountRule] = {}
    for number, entry in enumerate(value, 1):
        try:
            rule = _read_rule(entry)
        except ValueError as error:
            raise ValueError(f"has an entry, number {number}, which {error}") from error
        if (rule.namespace, rule.name) in rules:
            raise ValueError(f"has two entries for {rule.namespace}/{rule.name}")
        rules[rule.namespace, rule.name] = rule
    return tuple(rules.values())


def _read_rule(entry: Any) -> AccountRule:
    if not isinstance(entry, dict):
        raise ValueError("is not a table")
    if unknown := entry.keys() - _KEYS:
        raise ValueError(f"has an unknown key {sorted(unknown)[0]}")
    account, tenants = entry.get("account"), entry.get("tenants")
    scope = choice(*_SCOPES).read(entry.get("scope", "run"))
    namespace, slash, name = account.partition("/") if isinstance(account, str) else ("", "", "")
    if not slash or not _NAMESPACE.fullmatch(namespace) or not (name == EVERY or _NAME.fullmatch(name)):
        raise ValueError("has no account NAMESPACE/NAME or NAMESPACE/*")
    if not isinstance(tenants, list) or not tenants or not all(_is_tenant(each) for each in tenants):
        raise ValueError("has no list of tenants")
    if len(set(tenants)) != len(tenants) or len(tenants) > (1 if scope == "run" else _TENANTS):
        raise ValueError("has too many tenants: one for the scope run, and each once")
    return AccountRule(namespace, name, tuple(tenants), scope)


def _is_tenant(value: object) -> bool:
    return isinstance(value, str) and _TENANT.fullmatch(value) is not None


ACCOUNTS: Final[ValueType[tuple[AccountRule, ...]]] = ValueType(
    "a list of tables, each with account, tenants and scope", _read
)


def _read_audience(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 253 or not value.isprintable():
        raise ValueError("is no audience")
    return value


AUDIENCE: Final = ValueType("text that is not empty", _read_audience)

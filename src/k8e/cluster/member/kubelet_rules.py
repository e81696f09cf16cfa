"""Removes the chains that kubelets put into the tables of iptables (KUBE-...), and tables that are empty then. Rules of
others in the same tables stay."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_TABLES: Final = ("mangle", "nat", "filter")
_PREFIX: Final = "KUBE-"


def remove_kubelet_rules() -> None:
    for family in ("ip", "ip6"):
        for table in _TABLES:
            if (found := _list(family, table)) is not None:
                _run("\n".join(plan_removal(family, table, found)))
            if (rest := _list(family, table)) is not None and is_empty(rest):
                _run(f"delete table {family} {table}")


def plan_removal(family: str, table: str, found: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields commands of nft: first the rules that lead to the kubelet's chains, then these."""
    entries = list(found)
    where = f"{family} {table}"
    chains = [entry["chain"]["name"] for entry in entries if "chain" in entry]
    ours = [name for name in chains if name.startswith(_PREFIX)]
    for rule in (entry["rule"] for entry in entries if "rule" in entry):
        if rule["chain"] not in ours and any(_leads_to(part, ours) for part in rule["expr"]):
            yield f"delete rule {where} {rule['chain']} handle {rule['handle']}"
    yield from (f"flush chain {where} {name}" for name in ours)
    yield from (f"delete chain {where} {name}" for name in ours)


def is_empty(found: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a table has no rule, no chain of its own, and lets everything through: iptables makes it again."""
    for entry in found:
        if "metainfo" in entry or "table" in entry:
            continue
        if "chain" not in entry or entry["chain"].get("policy") != "accept":
            return False
    return True


def _leads_to(part: Mapping[str, Any], chains: list[str]) -> bool:
    return any((part.get(verb) or {}).get("target") in chains for verb in ("jump", "goto"))


def _list(family: str, table: str) -> list[dict[str, Any]] | None:
    try:
        done = subprocess.run(
            ["nft", "--json", "--handle", "list", "table", family, table],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return None
    if done.returncode != 0:
        return None
    found: list[dict[str, Any]] = json.loads(done.stdout)["nftables"]
    return found


def _run(commands: str) -> None:
    if commands:
        subprocess.run(["nft", "--file", "-"], input=commands, capture_output=True, text=True)

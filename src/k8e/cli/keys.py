"""`k8e sandbox-apikey`: keys for programs on other machines."""

from __future__ import annotations

from k8e.cli.client import open_client
from k8e.cli.view import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def create(options: argparse.Namespace) -> int:
    wanted: dict[str, Any] = {"name": options.name, "scope": options.scope, "for_ever": options.ttl is None}
    if options.ttl is not None:
        wanted["ttl"] = options.ttl
    if options.tenant:
        wanted["tenant_ids"] = options.tenant
    return show(open_client().create_key(wanted))


def list_keys(options: argparse.Namespace) -> int:
    return show(open_client().list_keys(), "keys")


def delete(options: argparse.Namespace) -> int:
    return show(open_client().delete_key(options.name))

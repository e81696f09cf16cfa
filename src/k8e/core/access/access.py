"""Who may see and do what. The doors say who calls; every rule about it is here.

A session belongs to an owner, a user of this machine or REMOTE, and to a tenant. A user of this machine sees the
sessions of their uid and names tenants freely; a caller with an API key sees the sessions of the key's tenants. The two
never meet: a tenant of the gateway and a local user's tenant of the same name are different things.

A tenant has parts, `tenant/part`: the sessions of one AI agent, of several that come with the same key. No user can
write such a name. A caller with the tenant sees its parts and pays for them; a caller confined to a part sees nothing
else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Caller, Scope

PART: Final = "/"
_RANKS: Final[Mapping[Scope, int]] = {Scope.RUN: 0, Scope.OPERATOR: 1, Scope.ADMIN: 2}


class Payer(NamedTuple):
    """Quotas and turns are counted for each payer."""

    owner: int
    tenant: str


def local_caller(uid: int, pid: int = 0) -> Caller:
    """A user of this machine. The daemon's own user is its admin, as root is: that user could change its files."""
    own = uid != 0 and uid == os.geteuid()
    return Caller(uid, scope=Scope.ADMIN if own else Scope.RUN, pid=pid)


def sees_all(caller: Caller) -> bool:
    return (caller.uid == 0 or caller.scope is Scope.ADMIN) and not caller.confined


def may_see(caller: Caller, owner: int, tenant: str) -> bool:
    if not caller.meant.covers(owner, tenant):
        return False
    if sees_all(caller):
        return True
    if caller.uid != owner:
        return False
    own = (caller.tenant, *caller.tenants)
    return not caller.tenant or tenant in own or (not caller.confined and tenant.partition(PART)[0] in own)


def find_scope(caller: Caller) -> Scope:
    """Root of this machine is its admin without a key, and so is the daemon's own user."""
    return Scope.ADMIN if sees_all(caller) else caller.scope


def require_scope(caller: Caller, scope: Scope) -> None:
    held = find_scope(caller)
    if _RANKS[held] < _RANKS[scope]:
        raise Fault(
            Kind.DENIED,
            "scope_missing",
            f"this needs the scope {scope.value}",
            detail=f"the caller has {held.value}",
            hint=f"Use a key with the scope {scope.value}, or ask for one.",
        )


def choose_tenant(caller: Caller, wanted: str) -> str:
    """The tenant that a new session belongs to."""
    if wanted and not may_see(caller, caller.uid, wanted):
        hint = "Leave the tenant out, or use a key of that tenant."
        error = "the session would belong to another tenant"
        raise Fault(Kind.DENIED, "wrong_tenant", error, hint=hint, field="tenant")
    return wanted or caller.tenant or "default"


def find_payer(owner: int, tenant: str) -> Payer:
    """A local user pays for all of their tenants together; they could name as many as they like."""
    return Payer(owner, tenant.partition(PART)[0] if owner == REMOTE else "")

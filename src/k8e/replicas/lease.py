"""The rules of the lease that one replica of the gateway holds. Pure: times are given, and objects returned.

Clocks of machines are never compared. A candidate counts from when it saw the lease change, the holder from when it
began the renewal that succeeded; the holder's time is the shorter one, so between the two no replica leads.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Final, Self

from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease

from k8e.engine.kubernetes import names

LIFE: Final = 6.0  # seconds from a change that a candidate saw until it takes the lease
RENEWAL: Final = 2.0  # seconds between two renewals
PATIENCE: Final = 4.0  # seconds from the last renewal until the holder ends
ADDRESS: Final = "k8e.dev/address"  # annotation: where the holder serves, once it does
MCP_ADDRESS: Final = "k8e.dev/mcp-address"  # annotation: the same for MCP over HTTP


def lease_name(gateway: str) -> str:
    return f"k8e-gateway-{gateway}"


@dataclass(frozen=True, slots=True)
class Sight:
    """The lease as it was seen."""

    holder: str  # empty: it is free
    term: int  # one more for each holder
    address: str  # empty: the holder does not serve yet
    version: str
    uid: str
    mcp_address: str = ""

    @classmethod
    def read(cls, lease: Lease) -> Self:
        meta, spec = lease.metadata or ObjectMeta(), lease.spec or LeaseSpec()
        notes = meta.annotations or {}
        address, mcp_address = notes.get(ADDRESS, ""), notes.get(MCP_ADDRESS, "")
        holder, version, uid = spec.holderIdentity or "", meta.resourceVersion or "", meta.uid or ""
        return cls(holder, spec.leaseTransitions or 0, address, version, uid, mcp_address)


class Candidate:
    """Decides when a replica may take the lease."""

    def __init__(self, identity: str) -> None:
        self._identity = identity
        self._version = ""
        self._changed = 0.0

    def wait(self, sight: Sight | None, now: float) -> float:
        """Seconds until the lease may be taken, if it does not change before; 0: now."""
        if sight is None or not sight.holder:
            return 0.0
        if sight.holder == self._identity:
            return 0.0  # taken by a request whose answer was lost: identities are never used twice
        if sight.version != self._version:
            self._version, self._changed = sight.version, now
        return max(0.0, self._changed + LIFE - now)


def make_lease(
    gateway: str,
    identity: str,
    before: Sight | None,
    *,
    term: int,
    address: str = "",
    mcp_address: str = "",
    now: float,
) -> Lease:
    """Makes the object to write: held by that replica, or free, instead of the one that was seen before."""
    time = datetime.datetime.fromtimestamp(now, datetime.UTC)
    time = time.replace(microsecond=time.microsecond or 1)  # the API wants six digits, and zeros would be left out
    meta = ObjectMeta(
        name=lease_name(gateway),
        labels=dict(names.labels(gateway)),
        annotations={name: value for name, value in ((ADDRESS, address), (MCP_ADDRESS, mcp_address)) if value},
    )
    if before is not None:
        meta.resourceVersion, meta.uid = before.version, before.uid
    spec = LeaseSpec(holderIdentity=identity, leaseDurationSeconds=round(LIFE), leaseTransitions=term, renewTime=time)
    return Lease(apiVersion="coordination.k8s.io/v1", kind="Lease", metadata=meta, spec=spec)

"""Namespaces per tenant: an engine for each tenant's namespace, behind one that knows which sandbox is where.

The cluster's administrator makes a tenant's namespace, labels it, and gives the gateway its rights there
(deploy/kubernetes/tenant.yaml). A tenant without one is refused. What belongs to no tenant, the tries of runtimes and
the sandboxes of the gateway's own users, is in the gateway's namespace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace

from k8e.engine import EngineError, Mount, Observation, Place, SandboxSpec, Usage
from k8e.engine.kubernetes.engine import KubernetesEngine
from k8e.engine.kubernetes.options import NODE, ClusterOptions
from k8e.link.model import Sandbox
from k8e.policy import HostList

TENANT: Final = "k8e.dev/tenant"  # label of a namespace: whose sandboxes are made there
HOME: Final = "k8e.dev/gateway-namespace"  # label of the same: by the gateway of which namespace


def find_namespaces(namespaces: Sequence[Namespace], home: str) -> Mapping[str, Sequence[str]]:
    """The namespaces of each tenant; more than one is a mistake."""
    found: dict[str, list[str]] = {}
    for each in namespaces:
        meta = each.metadata or ObjectMeta()
        labels = meta.labels or {}
        if labels.get(HOME) == home and (tenant := labels.get(TENANT)) and meta.name and not meta.deletionTimestamp:
            found.setdefault(tenant, []).append(meta.name)
    return found


class TenantEngine(KubernetesEngine):
    """The engine of the gateway's own namespace, and of those of tenants."""

    def __init__(self, options: ClusterOptions, key_file: Path, kubeconfig: Path | None = None) -> None:
        if options.egress == NODE:
            cause = "the helpers of the nodes know the gateway's namespace only"
            raise EngineError("egress", cause, "tenant_namespaces works with egress = policy, cilium or open")
        super().__init__(options, key_file, kubeconfig)
        self._files = (key_file, kubeconfig)
        self._rooms: dict[str, KubernetesEngine] = {}  # by namespace
        self._homes: dict[str, str] = {}  # namespaces of tenants
        self._where: dict[str, KubernetesEngine | None] = {}  # of sandboxes; None: in the gateway's namespace
        self._looking = asyncio.Lock()
        self._guard: Callable[[], None] | None = None

    def obey(self, guard: Callable[[], None]) -> None:
        super().obey(guard)
        self._guard = guard
        for room in self._rooms.values():
            room.obey(guard)

    # Where -----------------------------------------------------------------------------------------------------------

    async def _room_for(self, tenant: str) -> KubernetesEngine | None:
        """None: it is made in the gateway's namespace."""
        if not tenant:
            return None
        if tenant not in self._homes:
            await self._look()
        if tenant not in self._homes:
            hint = (
                f"deploy/kubernetes/tenant.yaml makes one: label it {TENANT}={tenant}, {HOME}={self._options.namespace}"
            )
            raise EngineError("namespace", f"the tenant {tenant} has no namespace in the cluster", hint)
        return self._rooms[self._homes[tenant]]

    async def _look(self) -> None:
        """Reads the labels of all namespaces. A tenant keeps the namespace that it had: its sandboxes are there."""
        async with self._looking:
            found = find_namespaces(await self._api.list_global(Namespace), self._options.namespace)
            for tenant, names in found.items():
                if len(names) > 1 and tenant not in self._homes:
                    cause = f"the tenant {tenant} has several namespaces: {', '.join(sorted(names))}"
                    raise EngineError("namespace", cause, f"take the label {TENANT} from all but one")
                self._homes.setdefault(tenant, names[0])
                if names[0] not in self._rooms and self._homes[tenant] == names[0]:
                    room = KubernetesEngine(replace(self._options, namespace=names[0]), *self._files)
                    if self._guard is not None:
                        room.obey(self._guard)
                    self._rooms[names[0]] = room

    async def _room_of(self, sandbox: str) -> KubernetesEngine | None:
        """Looks for one that is not known: the gateway before this one made it."""
        if sandbox not in self._where:
            await self.list()
        return self._where.get(sandbox)

    async def list(self) -> Sequence[str]:
        """EngineError also when one namespace cannot be read: its sandboxes are not to be taken for gone."""
        await self._look()
        found: dict[str, KubernetesEngine | None] = dict.fromkeys(await super().list())
        for room in self._rooms.values():
            found |= dict.fromkeys(await room.list(), room)
        self._where |= found
        return sorted(found)

    # Sandboxes -------------------------------------------------------------------------------------------------------

    async def keep_ready(self, wanted: Mapping[SandboxSpec, int]) -> Mapping[SandboxSpec, int] | None:
        """None is ready ahead: whose it will be is not known, and so not where."""
        return {}

    async def create(self, sandbox: str, spec: SandboxSpec) -> None:
        room = await self._room_for(spec.tenant)
        if self._where.setdefault(sandbox, room) is not room:
            raise EngineError("sandbox", f"{sandbox} exists already")
        await (super().create(sandbox, spec) if room is None else room.create(sandbox, spec))

    async def start(self, sandbox: str, spec: SandboxSpec) -> None:
        room = await self._room_of(sandbox)
        await (super().start(sandbox, spec) if room is None else room.start(sandbox, spec))

    async def bind(self, sandbox: str, mounts: Sequence[Mount]) -> None:
        await super().bind(sandbox, mounts)  # which refuses them

    async def attach(self, sandbox: str) -> tuple[Sandbox, Place]:
        room = await self._room_of(sandbox)
        return await (super().attach(sandbox) if room is None else room.attach(sandbox))

    async def observe(self, sandbox: str) -> Observation:
        room = self._where.get(sandbox)
        return await (super().observe(sandbox) if room is None else room.observe(sandbox))

    async def measure(self, sandbox: str) -> Usage:
        room = self._where.get(sandbox)
        return await (super().measure(sandbox) if room is None else room.measure(sandbox))

    async def prolong(self, sandbox: str, life: float) -> None:
        room = self._where.get(sandbox)
        await (super().prolong(sandbox, life) if room is None else room.prolong(sandbox, life))

    async def find_address(self, sandbox: str) -> str:
        room = self._where.get(sandbox)
        return await (super().find_address(sandbox) if room is None else room.find_address(sandbox))

    async def set_egress(self, sandbox: str, hosts: HostList) -> None:
        room = self._where.get(sandbox)
        await (super().set_egress(sandbox, hosts) if room is None else room.set_egress(sandbox, hosts))

    async def stop(self, sandbox: str) -> None:
        room = await self._room_of(sandbox)
        await (super().stop(sandbox) if room is None else room.stop(sandbox))

    async def destroy(self, sandbox: str) -> None:
        room = await self._room_of(sandbox)
        await (super().destroy(sandbox) if room is None else room.destroy(sandbox))
        self._where.pop(sandbox, None)

    async def set_aside(self, sandbox: str) -> str:
        room = await self._room_of(sandbox)
        return await (super().set_aside(sandbox) if room is None else room.set_aside(sandbox))

    async def close(self) -> None:
        for room in self._rooms.values():
            await room.close()
        await super().close()

"""The policies of a gateway in the cluster: one for all its sandboxes, and one for each list that some of them has.

A list's policy is there before the first pod that has it, and is removed when no pod has it any more. Several gateways
with the same key may make and remove the same one at the same time. So a gateway writes to a policy after its pod is
there (`mark_used`), and removes one only in the version that it had before its pods were looked for: the second
one notices. A policy that is missing for a moment opens nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Final

from lightkube.resources.core_v1 import Pod
from lightkube.resources.networking_v1 import NetworkPolicy

from k8e.engine import EngineError
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.api import Api, ApiError, ApiRefused
from k8e.engine.kubernetes.cilium.objects import (
    GROUP,
    NOW,
    USED,
    VERSION,
    CiliumNetworkPolicy,
    find_list,
    policy_name,
)
from k8e.engine.kubernetes.cilium.rules import build_base, build_list
from k8e.engine.kubernetes.egress_objects import LIST, digest_list
from k8e.engine.kubernetes.object_watch import ObjectWatch
from k8e.engine.tasks import Once, finish
from k8e.link.noise import AGENT_PORT
from k8e.policy import HostList

log = logging.getLogger("k8e.engine.kubernetes")

_ATTEMPTS: Final = 3  # to find a policy that others remove at the same time
_NO_CRD: Final = "the cluster does not serve CiliumNetworkPolicy (cilium.io/v2)"
_HINT: Final = 'install Cilium as the cluster\'s network, or set [kubernetes] egress = "node"'


class ListPolicies:
    def __init__(self, api: Api, pods: ObjectWatch[Pod], gateway: str, nameservers: Sequence[str]) -> None:
        self._api = api
        self._pods = pods
        self._gateway = gateway
        self._nameservers = nameservers
        self._begun: Once[str, None] = Once()
        self._made: Once[str, None] = Once()  # by digest
        self._left: set[str] = set()  # digests of policies that an earlier gateway has made
        self._held: Counter[str] = Counter()  # digests of lists whose pod is not there yet
        self._writing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def hold(self, hosts: HostList) -> AsyncIterator[None]:
        """The policy of that list is there, and stays at least until the end of the block."""
        digest = digest_list(hosts)
        self._held[digest] += 1
        try:
            await self._begun.get("", self._begin)
            await self._made.get(digest, lambda: self._make_list(hosts))
            yield
        finally:
            self._held[digest] -= 1

    async def mark_used(self, hosts: HostList) -> None:
        """Called when a pod has the list: from now on no gateway removes its policy without seeing that pod."""
        digest = digest_list(hosts)
        name = policy_name(self._gateway, digest)
        mark = {"op": "add", "path": f"/metadata/annotations/{names.escape(USED)}", "value": secrets.token_hex(8)}
        for _ in range(_ATTEMPTS):
            try:
                await self._api.patch(CiliumNetworkPolicy, name, [mark])
                return
            except ApiRefused as refused:
                if refused.code != 404:
                    raise
            self._made.tasks.pop(digest, None)
            await self._made.get(digest, lambda: self._make_list(hosts))
        raise EngineError("egress", f"{name} is removed again and again", "see who deletes it: `kubectl get cnp -w`")

    async def sweep(self) -> None:
        """Removes the policies that no pod has. What cannot be removed now is, after the end of another sandbox."""
        used = {find_list(pod) for pod in self._pods.objects.values()}
        for digest in {*self._made.tasks, *self._left} - used:
            if not self._held[digest]:
                try:
                    await finish(self._remove_unused(digest))
                except ApiError as error:
                    log.warning("policy_not_removed digest=%s cause=%s", digest, error)

    async def remove_base(self) -> None:
        """For who has made a gateway for a moment only, and has no sandbox any more."""
        await self.sweep()
        found = await self._api.get(CiliumNetworkPolicy, names.policy_name(self._gateway))
        if found is not None and found.metadata is not None:
            await self._api.delete(CiliumNetworkPolicy, found.metadata.name or "", found.metadata.uid or "")

    # -----------------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Once: makes what holds for all sandboxes, and finds what an earlier gateway with the same key has left."""
        if not await self._api.serves(GROUP, VERSION):
            raise EngineError("egress", _NO_CRD, _HINT)
        other = names.policy_name(self._gateway)
        if await self._api.get(NetworkPolicy, other) is not None:
            # It opens the agent's port to every list, so that reaching an agent would prove nothing.
            cause = f"the NetworkPolicy {other} is left from another setting of egress"
            raise EngineError("egress", cause, f"kubectl -n {self._api.namespace} delete networkpolicy {other}")
        await finish(self._make(build_base(self._gateway)))
        policies, _ = await self._api.list(CiliumNetworkPolicy, names.selector(self._gateway))
        prefix = policy_name(self._gateway, "")
        known = ((one.metadata.name or "") if one.metadata is not None else "" for one in policies)
        self._left = {name.removeprefix(prefix) for name in known if name.startswith(prefix)}
        await self._pods.ready()
        await self.sweep()

    async def _make_list(self, hosts: HostList) -> None:
        await finish(self._make(build_list(self._gateway, hosts, self._nameservers, AGENT_PORT)))

    async def _make(self, policy: CiliumNetworkPolicy) -> None:
        async with self._writing:
            try:
                await self._api.create(policy)
            except ApiRefused as refused:
                if refused.code != 409:
                    raise
                await self._check(policy)

    async def _check(self, wanted: CiliumNetworkPolicy) -> None:
        """The one that is there may be of an earlier version of k8e, or with other name servers: then it is replaced,
        which holds for the pods that have it, too."""
        assert wanted.metadata is not None
        found = await self._api.get(CiliumNetworkPolicy, wanted.metadata.name or "")
        if found is None:
            await self._api.create(wanted)
        elif found.specs != wanted.specs:
            found.specs = wanted.specs
            await self._api.replace(found)

    async def _remove_unused(self, digest: str) -> None:
        name = policy_name(self._gateway, digest)
        async with self._writing:
            if self._held[digest]:
                return
            found = await self._api.get(CiliumNetworkPolicy, name)
            if found is not None and found.metadata is not None:
                if await self._is_used(digest):
                    return
                meta = found.metadata
                await self._api.delete(CiliumNetworkPolicy, name, meta.uid or "", version=meta.resourceVersion or "")
            self._made.tasks.pop(digest, None)
            self._left.discard(digest)

    async def _is_used(self, digest: str) -> bool:
        """Asks the server: another gateway's pod may be younger than what the watch knows."""
        for label in (LIST, NOW):
            pods, _ = await self._api.list(Pod, f"{names.selector(self._gateway)},{label}={digest}")
            if any(find_list(pod) == digest for pod in pods):
                return True
        return False

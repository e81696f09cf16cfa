"""The warm pools of a gateway: a SandboxTemplate and a SandboxWarmPool for each kind of sandbox, made when the kind is
first wanted and removed when neither core nor a claim has a use for it. The cluster keeps the pods ready."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from lightkube.resources.core_v1 import Pod

from k8e.engine import EngineError
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.agent_sandbox import (
    WARM,
    SandboxClaim,
    SandboxTemplate,
    SandboxWarmPool,
    build_pool,
    build_template,
    name_kind,
)
from k8e.engine.kubernetes.api import Api, ApiError, ApiRefused
from k8e.engine.kubernetes.object_watch import ObjectWatch
from k8e.engine.kubernetes.phases import Phase, read_state
from k8e.engine.tasks import Once, finish

_SEEN: Final = 20.0  # seconds for the controller to notice a new pool
_UNKNOWN: Final = -1
_HINT: Final = "see that the agent-sandbox controller runs, with --extensions; `kubectl describe swp` says more"

K = TypeVar("K", SandboxTemplate, SandboxWarmPool)


class WarmPools:
    def __init__(self, api: Api, pods: ObjectWatch[Pod], claims: ObjectWatch[SandboxClaim], gateway: str) -> None:
        self._api = api
        self._pods = pods
        self._claims = claims
        self._gateway = gateway
        self._made: Once[str, str] = Once()
        self._replicas: dict[str, int] = {}  # as they are in the cluster, as far as this gateway knows
        self._held: Counter[str] = Counter()
        self._writing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def hold(self, pod: Pod) -> AsyncIterator[str]:
        """Yields the name of the pool of such pods, which stays at least until the end of the block. It is made unless
        it is there, and known to the controller: a claim that came before its pool would wait for a minute."""
        name = name_kind(pod, self._gateway)
        self._held[name] += 1
        try:
            yield await self._made.get(name, lambda: self._make(name, pod))
        finally:
            self._held[name] -= 1

    def forget(self, name: str) -> None:
        """It is not there any more: it is made again when it is wanted again."""
        self._replicas.pop(name, None)
        self._made.tasks.pop(name, None)

    async def _make(self, name: str, pod: Pod) -> str:
        async with self._writing:
            await finish(self._create(build_template(name, pod, self._gateway)))
            await finish(self._create(build_pool(name, self._gateway, 0)))
        await self._wait_until_seen(name)
        return name

    async def _create(self, one: K) -> None:
        try:
            await self._api.create(one)
        except ApiRefused as refused:
            # Its name is a digest of all that it says: the one that is there says the same.
            if refused.code != 409:
                raise

    async def _wait_until_seen(self, name: str) -> None:
        fields = f"metadata.name={name}"
        try:
            async with asyncio.timeout(_SEEN):
                while True:
                    found, version = await self._api.list(SandboxWarmPool, fields=fields)
                    if not found:
                        raise EngineError("warm pool", f"{name} was deleted while it was being made")
                    if any(map(_is_seen, found)):
                        self._replicas[name] = _read_replicas(found[0])
                        return
                    watch = self._api.watch(SandboxWarmPool, version, fields=fields)
                    async with contextlib.aclosing(watch) as events:
                        async for _, one in events:
                            if _is_seen(one):
                                self._replicas[name] = _read_replicas(one)
                                return
        except TimeoutError:
            raise EngineError("warm pool", f"no controller took note of {name} in {_SEEN:g} s", _HINT) from None

    # How many --------------------------------------------------------------------------------------------------------

    async def keep(self, wanted: Mapping[str, int]) -> None:
        """Has so many ready in each pool, which `hold` has made, and none in all others. A pool that is not wanted and
        that no claim refers to is removed."""
        async with self._writing:
            for name in {*self._replicas, *wanted}:
                if name not in wanted and not self._held[name] and name not in self._list_used():
                    await finish(self._remove(name))
                elif self._replicas.get(name) != wanted.get(name, 0):
                    await finish(self._resize(name, wanted.get(name, 0)))

    async def adopt(self) -> None:
        """Takes on the pools that an earlier gateway with the same key has left: the next `keep` decides on them."""
        selector = names.selector(self._gateway)
        pools, _ = await self._api.list(SandboxWarmPool, selector)
        templates, _ = await self._api.list(SandboxTemplate, selector)
        for template in templates:  # also without its pool: an earlier gateway was killed between the two
            self._replicas[_name(template)] = _UNKNOWN
        for pool in pools:
            self._replicas[_name(pool)] = _read_replicas(pool)

    def list_ready(self, name: str) -> Sequence[Pod]:
        return [pod for pod in self._pods.objects.values() if _is_ready(pod, name)]

    def _list_used(self) -> Iterable[str]:
        return (one.spec.warm_pool_ref.name for one in self._claims.objects.values() if one.spec is not None)

    async def _resize(self, name: str, replicas: int) -> None:
        operations = [{"op": "add", "path": "/spec/replicas", "value": replicas}]
        try:
            await self._api.patch(SandboxWarmPool, name, operations)
        except ApiRefused as refused:
            if refused.code != 404:
                raise
            self.forget(name)  # an administrator has deleted it
        else:
            self._replicas[name] = replicas

    async def _remove(self, name: str) -> None:
        self.forget(name)  # first: a caller that wants it from now on makes it again, when this is done
        try:
            await self._delete(SandboxWarmPool, name)
            await self._delete(SandboxTemplate, name)
        except ApiError:
            self._replicas[name] = _UNKNOWN
            raise

    async def _delete(self, kind: type[K], name: str) -> None:
        found = await self._api.get(kind, name)
        if found is not None and found.metadata is not None:
            await self._api.delete(kind, name, found.metadata.uid or "")


def _name(one: SandboxTemplate | SandboxWarmPool) -> str:
    return one.metadata.name or "" if one.metadata is not None else ""


def _read_replicas(pool: SandboxWarmPool) -> int:
    replicas = pool.spec.replicas if pool.spec is not None else None
    return _UNKNOWN if replicas is None else replicas


def _is_seen(pool: SandboxWarmPool) -> bool:
    meta, status = pool.metadata, pool.status
    return meta is not None and status is not None and status.observed_generation >= (meta.generation or 1)


def _is_ready(pod: Pod, pool: str) -> bool:
    labels = (pod.metadata.labels or {}) if pod.metadata is not None else {}
    return labels.get(names.POOL) == pool and WARM in labels and read_state(pod).phase is Phase.RUNNING

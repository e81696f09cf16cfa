"""Finds, ends and removes what the engine made of a sandbox, by its name alone: it is right after any crash."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import PersistentVolumeClaim, Pod

from k8e.engine import EngineError
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.api import Api
from k8e.engine.kubernetes.object_watch import ObjectWatch
from k8e.engine.kubernetes.sandbox_claims import SandboxClaims

_PATIENCE: Final = 30.0  # seconds for a kubelet to end a pod; a node that is gone never says so
_NO_VOLUME: Final = "set [kubernetes] storage_class, and sessions get volumes that outlive their pods"


class Removal:
    def __init__(self, api: Api, watch: ObjectWatch[Pod], claims: SandboxClaims, gateway: str) -> None:
        self._api = api
        self._watch = watch
        self._claims = claims
        self._gateway = gateway

    async def list(self) -> set[str]:
        """Asks the server, not the watch: an answer includes what was done a moment ago."""
        selector = names.selector(self._gateway)
        pods, _ = await self._api.list(Pod, selector)
        claims, _ = await self._api.list(PersistentVolumeClaim, selector)
        metadata = [*(pod.metadata for pod in pods), *(claim.metadata for claim in claims)]
        own = {names.find_sandbox(each) for each in metadata if names.owns(each, self._gateway)}
        return {*own, *(await self._claims.list())} - {""}

    async def exists(self, sandbox: str) -> bool:
        claimed = await self._claims.find(sandbox)
        return bool(claimed or await self.find_pod(sandbox) or await self.find_claim(sandbox))

    async def find_pod(self, sandbox: str) -> Pod | None:
        pod = await self._api.get(Pod, names.object_name(sandbox))
        return pod if pod is not None and names.owns(pod.metadata, self._gateway) else None

    async def find_claim(self, sandbox: str) -> PersistentVolumeClaim | None:
        claim = await self._api.get(PersistentVolumeClaim, names.object_name(sandbox))
        return claim if claim is not None and names.owns(claim.metadata, self._gateway) else None

    async def destroy(self, sandbox: str) -> None:
        if (claimed := await self._claims.find(sandbox)) is not None:
            await self._claims.end(claimed)
            return
        await self.end_pod(sandbox)
        claim = await self.find_claim(sandbox)
        if claim is not None and claim.metadata is not None:
            await self._remove_claim(claim.metadata)

    async def _remove_claim(self, meta: ObjectMeta) -> None:
        """Returns when it is gone, which is some time after its last pod: until then its name is taken."""
        name, uid = meta.name or "", meta.uid or ""
        fields = f"metadata.name={name}"
        try:
            async with asyncio.timeout(_PATIENCE):
                while True:
                    if not await self._api.delete(PersistentVolumeClaim, name, uid):
                        return
                    found, version = await self._api.list(PersistentVolumeClaim, fields=fields)
                    if not any(one.metadata is not None and one.metadata.uid == uid for one in found):
                        return
                    watch = self._api.watch(PersistentVolumeClaim, version, fields=fields)
                    async with contextlib.aclosing(watch) as events:
                        async for event, one in events:
                            if event == "DELETED" and one.metadata is not None and one.metadata.uid == uid:
                                return
        except TimeoutError:
            cause = f"{name} was deleted {_PATIENCE:g} s ago and is still there"
            raise EngineError("volume", cause, f"`kubectl describe pvc {name}` says what uses it") from None

    async def stop(self, sandbox: str) -> None:
        if await self.find_claim(sandbox) is None:
            if not await self.exists(sandbox):
                raise EngineError("sandbox", f"{sandbox} does not exist")
            raise EngineError("files", f"the files of {sandbox} are its pod's, and would end with it", _NO_VOLUME)
        await self.end_pod(sandbox)

    async def end_pod(self, sandbox: str) -> None:
        """Returns when it is gone from its node, or its node cannot be asked."""
        pod = await self.find_pod(sandbox)
        if pod is None or pod.metadata is None:
            return
        name, uid = pod.metadata.name or "", pod.metadata.uid or ""
        if await self._api.delete(Pod, name, uid):
            try:
                async with asyncio.timeout(_PATIENCE):
                    await self._watch.wait(name, lambda found: _is_gone(found, uid) or None)
            except TimeoutError:
                await self._api.delete(Pod, name, uid, grace=0)
        self._watch.forget(name, uid)

    async def set_aside(self, sandbox: str) -> str:
        """A volume stays, and its pod ends; without a volume the pod stays, until its life is over. Both belong to no
        gateway from then on."""
        if (claimed := await self._claims.find(sandbox)) is not None:
            return await self._claims.set_aside(claimed)
        claim = await self.find_claim(sandbox)
        if claim is not None and claim.metadata is not None:
            await self.end_pod(sandbox)
            patch = names.disown(claim.metadata.uid or "", self._gateway)
            await self._api.patch(PersistentVolumeClaim, claim.metadata.name or "", patch)
            return f"persistentvolumeclaim/{self._api.namespace}/{claim.metadata.name}"
        pod = await self.find_pod(sandbox)
        if pod is None or pod.metadata is None:
            return ""
        patch = names.disown(pod.metadata.uid or "", self._gateway)
        self._watch.put(await self._api.patch(Pod, pod.metadata.name or "", patch))
        return f"pod/{self._api.namespace}/{pod.metadata.name}"


def _is_gone(pod: Pod | None, uid: str) -> bool:
    return pod is None or pod.metadata is None or pod.metadata.uid != uid

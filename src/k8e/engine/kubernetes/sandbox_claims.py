"""The claims of a gateway's sandboxes on warm pools: takes a pod, prolongs its time, gives it back. A claim has one pod
for its life. The controller replaces a pod that was deleted; that one is another sandbox, and the claim's is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from lightkube.models.meta_v1 import Condition
from lightkube.resources.core_v1 import Pod

from k8e.engine import EngineError
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.agent_sandbox import (
    GROUP,
    VERSION,
    SandboxClaim,
    build_sandbox_claim,
    find_assigned_name,
    find_pod_name,
    format_time,
    read_condition,
)
from k8e.engine.kubernetes.api import Api, ApiRefused
from k8e.engine.kubernetes.complaints import find_complaint
from k8e.engine.kubernetes.object_watch import ObjectWatch
from k8e.engine.kubernetes.phases import Phase, State, read_state
from k8e.engine.kubernetes.warm_pools import WarmPools
from k8e.engine.tasks import Once, cancel_and_wait, finish

_PATIENCE: Final = 30.0  # seconds for a kubelet to end a pod; a node that is gone never says so
_POOL_GONE: Final = ("WarmPoolNotFound", "TemplateNotFound")


class NameTaken(EngineError):
    """A claim of that name exists: nothing was made, and nothing is to be cleared up."""


class SandboxClaims:
    def __init__(self, api: Api, pods: ObjectWatch[Pod], gateway: str, *, enabled: bool) -> None:
        self._api = api
        self._pods = pods
        self._gateway = gateway
        self._watch = ObjectWatch(api, SandboxClaim, names.selector(gateway))
        self.pools = WarmPools(api, pods, self._watch, gateway)
        self._beginning: Once[str, bool] = Once()
        self._served: bool | None = None if enabled else False

    async def ready(self) -> bool:
        """Whether the cluster has agent-sandbox, asked once; then returns when all claims are known."""
        if self._served is None:
            self._served = await self._beginning.get("", self._begin)
        if self._served:
            await self._watch.ready()
        return self._served

    async def _begin(self) -> bool:
        if not await self._api.serves(GROUP, VERSION):
            return False
        await self.pools.adopt()
        return True

    async def close(self) -> None:
        await self._watch.close()

    # Taking ----------------------------------------------------------------------------------------------------------

    async def take(self, sandbox: str, pod: Pod, life: float, deadline: float, expect: Callable[[Pod], None]) -> Pod:
        """Claims a pod of that kind and returns it when it runs. The caller clears up when that fails. `expect` is told
        of the pod that it will probably be."""
        async with self.pools.hold(pod) as pool:
            claim = build_sandbox_claim(sandbox, pool, self._gateway, time.time() + life)
            # To its end: a request that is cut off may still be carried out, after the clearing up.
            made = await finish(self._create(claim))
        try:
            async with asyncio.timeout(deadline):
                return await self._wait_for_pod(made, expect)
        except TimeoutError:
            raise await self._explain(made, deadline) from None

    async def _create(self, claim: SandboxClaim) -> SandboxClaim:
        try:
            made = await self._api.create(claim)
        except ApiRefused as refused:
            if refused.code == 409:
                raise NameTaken("sandbox", "a claim of that name exists already") from refused
            raise
        self._watch.put(made)
        return made

    async def _wait_for_pod(self, claim: SandboxClaim, expect: Callable[[Pod], None]) -> Pod:
        """The claim's state names the pod, the pod's own says when it runs; what keeps it from being made is told by
        the claim."""
        name, uid = _identify(claim)

        def look_at_claim(found: SandboxClaim | None) -> str | None:
            self._check(found, uid)
            if found is None:
                return None
            expected = self._pods.find(find_assigned_name(found))
            if expected is not None and read_state(expected).phase is Phase.RUNNING:
                expect(expected)
            return find_pod_name(found) or None

        pod_name = await self._watch.wait(name, look_at_claim)
        failing: asyncio.Task[None] = asyncio.create_task(self._watch.wait(name, lambda found: self._check(found, uid)))
        running = asyncio.create_task(self._pods.wait(pod_name, _look_at_pod))
        try:
            await asyncio.wait({failing, running}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                failing.result()  # raises
            return running.result()
        finally:
            await cancel_and_wait(failing)
            await cancel_and_wait(running)

    def _check(self, claim: SandboxClaim | None, uid: str) -> None:
        """Raises EngineError for a claim that will never have a pod."""
        if claim is None or claim.metadata is None or claim.metadata.uid != uid:
            raise EngineError("sandbox", "its claim was deleted")
        condition = read_condition(claim)
        if condition is None or condition.status == "True":
            return
        if condition.reason in _POOL_GONE and claim.spec is not None:
            self.pools.forget(claim.spec.warm_pool_ref.name)
            raise EngineError("warm pool", condition.message, "it was deleted; it is made again for the next sandbox")
        if "forbidden" in condition.message:
            control = "pod security" if "PodSecurity" in condition.message else "pod"
            raise EngineError(control, condition.message, "a quota or an admission rule of the namespace refuses it")

    async def _explain(self, claim: SandboxClaim, deadline: float) -> EngineError:
        name, _ = _identify(claim)
        now = self._watch.find(name) or claim
        pod = self._pods.find(find_pod_name(now) or name)
        if pod is None or pod.metadata is None:
            state, said = State(Phase.PENDING, _say(read_condition(now))), ""
        else:
            state, said = read_state(pod), await find_complaint(self._api, pod.metadata.uid or "")
        return EngineError(state.control, f"it did not start in {deadline:g} s: {said or state.cause}", state.hint)

    # Finding ---------------------------------------------------------------------------------------------------------

    def has(self, sandbox: str) -> bool:
        claim = self._watch.find(names.object_name(sandbox))
        return claim is not None and names.owns(claim.metadata, self._gateway)

    def find_pod(self, sandbox: str) -> Pod | None:
        """The pod that the sandbox was given, as long as it is there. Its agent's key was written down before or when
        it was given; the controller's replacement for a pod that was deleted has none."""
        claim = self._watch.find(names.object_name(sandbox))
        pod = self._pods.find(find_pod_name(claim)) if claim is not None else None
        meta = pod.metadata if pod is not None else None
        return pod if meta is not None and names.AGENT_KEY in (meta.annotations or {}) else None

    async def find(self, sandbox: str) -> SandboxClaim | None:
        """Asks the server."""
        if not await self.ready():
            return None
        claim = await self._api.get(SandboxClaim, names.object_name(sandbox))
        return claim if claim is not None and names.owns(claim.metadata, self._gateway) else None

    async def list(self) -> Sequence[str]:
        """Asks the server, not the watch: an answer includes what was done a moment ago."""
        if not await self.ready():
            return ()
        claims, _ = await self._api.list(SandboxClaim, names.selector(self._gateway))
        return [names.find_sandbox(one.metadata) for one in claims if names.owns(one.metadata, self._gateway)]

    # Its time, and its end -------------------------------------------------------------------------------------------

    async def prolong(self, sandbox: str, life: float) -> None:
        claim = self._watch.find(names.object_name(sandbox))
        if claim is None:
            return
        name, uid = _identify(claim)
        operations = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "replace", "path": "/spec/lifecycle/shutdownTime", "value": format_time(time.time() + life)},
        ]
        self._watch.put(await self._api.patch(SandboxClaim, name, operations))

    async def end(self, claim: SandboxClaim) -> None:
        """Returns when its pod is gone from its node, or its node cannot be asked, and the claim with it."""
        name, uid = _identify(claim)
        pod = self._pods.find(find_pod_name(self._watch.find(name) or claim))
        self._watch.put(claim)  # so that the watch has it, whose end is waited for
        if await self._api.delete(SandboxClaim, name, uid, foreground=True):
            try:
                await self._wait_until_gone(name, uid)
            except TimeoutError:
                await self._give_up(name, uid, pod)
        self._watch.forget(name, uid)
        if pod is not None and pod.metadata is not None:
            self._pods.forget(pod.metadata.name or "", pod.metadata.uid or "")

    async def _wait_until_gone(self, name: str, uid: str) -> None:
        def look(found: SandboxClaim | None) -> bool | None:
            return True if found is None or found.metadata is None or found.metadata.uid != uid else None

        async with asyncio.timeout(_PATIENCE):
            await self._watch.wait(name, look)

    async def _give_up(self, name: str, uid: str, pod: Pod | None) -> None:
        """Without waiting for its node."""
        if pod is not None and pod.metadata is not None:
            await self._api.delete(Pod, pod.metadata.name or "", pod.metadata.uid or "", grace=0)
        try:
            await self._wait_until_gone(name, uid)
        except TimeoutError:
            cause = f"its claim {name} was deleted {2 * _PATIENCE:g} s ago and is still there"
            raise EngineError("sandbox", cause, f"`kubectl describe sandboxclaim {name}` says more") from None

    async def set_aside(self, claim: SandboxClaim) -> str:
        """Its pod goes on until the claim's time is over; the claim belongs to no gateway from now on."""
        name, uid = _identify(claim)
        self._watch.put(await self._api.patch(SandboxClaim, name, names.disown(uid, self._gateway)))
        return f"sandboxclaim/{self._api.namespace}/{name}"


def _identify(claim: SandboxClaim) -> tuple[str, str]:
    assert claim.metadata is not None
    return claim.metadata.name or "", claim.metadata.uid or ""


def _look_at_pod(pod: Pod | None) -> Pod | None:
    """Returns it when it runs; None: not yet. EngineError when it never will."""
    if pod is None:
        return None
    state = read_state(pod)
    if state.phase is Phase.PENDING:
        return None
    if state.phase is not Phase.RUNNING:
        raise EngineError(state.control, state.cause, state.hint)
    return pod


def _say(condition: Condition | None) -> str:
    return (
        f"{condition.reason}: {condition.message}" if condition is not None else "no controller took note of its claim"
    )

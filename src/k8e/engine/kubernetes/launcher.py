"""Starts the pod of a sandbox or claims one, and waits for it; reaches the agents of those that run."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from lightkube.resources.core_v1 import Pod

from k8e.engine import EngineError, SandboxSpec
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.agent_sandbox import WARM
from k8e.engine.kubernetes.api import Api, ApiError, ApiRefused
from k8e.engine.kubernetes.cilium.egress import CiliumEgress
from k8e.engine.kubernetes.cluster import Cluster
from k8e.engine.kubernetes.complaints import find_complaint
from k8e.engine.kubernetes.egress import Egress
from k8e.engine.kubernetes.images import HOST_IMAGE
from k8e.engine.kubernetes.object_watch import ObjectWatch
from k8e.engine.kubernetes.options import CILIUM, NODE, ClusterOptions
from k8e.engine.kubernetes.phases import Phase, State, read_state
from k8e.engine.kubernetes.pods import PodPlan, build_pod
from k8e.engine.kubernetes.sandbox_claims import SandboxClaims
from k8e.engine.tasks import finish
from k8e.link import AgentLink
from k8e.link.dial import Sealed
from k8e.link.errors import LinkError, ProtocolViolation
from k8e.link.noise import AGENT_PORT, GatewayKey, PodDialer, pod_arguments
from k8e.policy import NOTHING

log = logging.getLogger("k8e.engine.kubernetes")

_ANSWER: Final = 30.0  # seconds from an agent's start until it answers
_GONE: Final = State(Phase.ENDED, "its pod was deleted")
_TEST_FAILED: Final = (409, 422)  # a JSON patch whose tests do not hold
_GREETING: Final = 5.0
_REMEMBERED: Final = 60.0  # seconds for which the cluster is not asked again what a kind's pods can be


class Launcher:
    def __init__(
        self,
        api: Api,
        watch: ObjectWatch[Pod],
        claims: SandboxClaims,
        cluster: Cluster,
        options: ClusterOptions,
        key: GatewayKey,
        egress: Egress | CiliumEgress,
    ) -> None:
        self._api = api
        self._watch = watch
        self._claims = claims
        self._cluster = cluster
        self._options = options
        self._key = key
        self._egress = egress
        self._gateway = names.gateway_label(key.public)
        self._kinds: dict[SandboxSpec, tuple[float, Pod]] = {}

    async def claim(self, sandbox: str, spec: SandboxSpec, expect: Callable[[Pod], None]) -> Pod:
        """Takes a pod of a warm pool; returns it when it runs and its list of hosts is in force. The caller clears up
        when it does not. `expect` is told of the pod that it will probably be."""
        kind = await self.describe_kind(spec)
        await self._cluster.prepare()
        life = spec.life or self._options.life
        async with self._egress.prepare(spec.egress):
            pod = await self._claims.take(sandbox, kind, life, self._options.deadline, expect)
            return await self._enforce(spec, pod)

    async def describe_kind(self, spec: SandboxSpec) -> Pod:
        """The pod of a warm pool for such sandboxes. Under CILIUM a pool has one list, which is a label of its pods: a
        label that comes later is in force seconds later."""
        hosts = spec.egress if self._options.egress == CILIUM else NOTHING
        key, now = replace(spec, egress=hosts, life=0.0), time.monotonic()
        at, pod = self._kinds.get(key, (-math.inf, None))
        if pod is None or now - at > _REMEMBERED:
            pod = build_pod(key, await self._plan("", spec), self._options)
            self._kinds = {one: kept for one, kept in self._kinds.items() if now - kept[0] <= _REMEMBERED}
            self._kinds[key] = now, pod
        return pod

    async def launch(self, sandbox: str, spec: SandboxSpec, claim: str = "", node: str = "") -> Pod:
        """Makes a pod; returns it when it runs and its list of hosts is in force. The caller clears up when it does
        not."""
        plan = await self._plan(sandbox, spec, claim, node)
        await self._cluster.prepare()
        async with self._egress.prepare(spec.egress):
            # To its end: a request that is cut off may still be carried out, after the clearing up.
            pod = await finish(self._create(build_pod(spec, plan, self._options)))
            return await self._enforce(spec, await self._wait_until_it_runs(pod))

    async def _enforce(self, spec: SandboxSpec, pod: Pod) -> Pod:
        """Nothing but our agent runs in the pod before."""
        if self._options.egress not in (NODE, CILIUM):
            return pod
        assert pod.metadata is not None
        name = pod.metadata.name or ""
        await self._egress.enforce(name, pod.metadata.uid or "", spec.egress)
        return self._watch.find(name) or pod

    async def _plan(self, sandbox: str, spec: SandboxSpec, claim: str = "", node: str = "") -> PodPlan:
        runtime_class = await self._cluster.require(spec.runtime)
        named = runtime_class.metadata.name if runtime_class is not None and runtime_class.metadata else ""
        return PodPlan(
            sandbox,
            self._gateway,
            self._key.public.hex(),
            agent_arguments=pod_arguments(self._key.public),
            runtime_class=named or "",
            image=self._options.image if spec.image == HOST_IMAGE else spec.image,
            user_namespace=await self._cluster.has_user_namespaces(spec.runtime, runtime_class),
            claim=claim,
            node=node,
        )

    async def _create(self, pod: Pod) -> Pod:
        try:
            made = await self._api.create(pod)
        except ApiRefused as refused:
            if refused.code == 409:
                raise EngineError("sandbox", "a pod of that name exists already") from refused
            control = "pod security" if "PodSecurity" in refused.cause else refused.control
            raise EngineError(control, refused.cause, refused.hint) from refused
        self._watch.put(made)
        return made

    async def _wait_until_it_runs(self, pod: Pod) -> Pod:
        assert pod.metadata is not None
        name, uid = pod.metadata.name or "", pod.metadata.uid or ""

        def look(found: Pod | None) -> State | None:
            state = self._state_of(found, uid)
            return None if state.phase is Phase.PENDING else state

        try:
            async with asyncio.timeout(self._options.deadline):
                state = await self._watch.wait(name, look)
        except TimeoutError:
            waiting = self._state_of(self._watch.find(name), uid)
            said = await find_complaint(self._api, uid)
            cause = f"it did not start in {self._options.deadline:g} s: {said or waiting.cause}"
            raise EngineError(waiting.control, cause, waiting.hint) from None
        if state.phase is not Phase.RUNNING:
            raise EngineError(state.control, state.cause, state.hint)
        return self._watch.find(name) or pod

    def _state_of(self, pod: Pod | None, uid: str) -> State:
        if pod is None or pod.metadata is None or pod.metadata.uid != uid:
            return _GONE
        return read_state(pod)

    # The agent -------------------------------------------------------------------------------------------------------

    def find(self, sandbox: str) -> Pod | None:
        """The pod of a sandbox that was made before, by what is known of the cluster: both watches have to be ready."""
        if self._claims.has(sandbox):
            return self._claims.find_pod(sandbox)
        pod = self._watch.find(names.object_name(sandbox))
        return pod if pod is not None and names.owns(pod.metadata, self._gateway) else None

    async def open_link(self, sandbox: str, pod: Pod | None = None) -> AgentLink:
        """`pod`: the one that it was just given."""
        pod = pod or self.find(sandbox)
        if pod is None or pod.metadata is None or pod.status is None or not pod.status.podIP:
            raise ProtocolViolation("its pod is not there")
        name, uid = pod.metadata.name or "", pod.metadata.uid or ""
        known = (pod.metadata.annotations or {}).get(names.AGENT_KEY, "")

        async def pin(public: bytes) -> None:
            await self._pin(sandbox, name, uid, public)

        dialer = PodDialer(
            pod.status.podIP,
            AGENT_PORT,
            uid=uid,
            key=self._key,
            pinned=bytes.fromhex(known) if known else None,
            pin=pin,
        )

        async def dial() -> Sealed:
            # An address may be another pod's by now; the channel would notice, but only at the deadline.
            state = self._state_of(self._watch.find(name), uid)
            if state.phase is not Phase.RUNNING:
                raise ProtocolViolation(state.cause)
            return await dialer()

        return await AgentLink.open(dial, instance=dialer.instance, deadline=_ANSWER)

    async def greet(self, pod: Pod) -> None:
        """Writes down the key of a warm pod's agent, so that a claim need not: a write to the cluster takes about as
        long as all else of a claim that is ours. It happens only while no claim has the pod: one that replaces the pod
        of a sandbox never gets a key ahead, and so is not taken for it."""
        assert pod.metadata is not None
        assert pod.status is not None
        name, uid = pod.metadata.name or "", pod.metadata.uid or ""
        warm = (pod.metadata.labels or {}).get(WARM, "")

        async def pin(public: bytes) -> None:
            where = f"/metadata/annotations/{names.escape(names.AGENT_KEY)}"
            operations: list[dict[str, str | None]] = [
                {"op": "test", "path": "/metadata/uid", "value": uid},
                {"op": "test", "path": f"/metadata/labels/{names.escape(WARM)}", "value": warm},
                {"op": "test", "path": where, "value": None},
                {"op": "add", "path": where, "value": public.hex()},
            ]
            self._watch.put(await self._api.patch(Pod, name, operations))

        try:
            async with asyncio.timeout(_GREETING):
                sealed = await PodDialer(pod.status.podIP or "", AGENT_PORT, uid=uid, key=self._key, pin=pin)()
            sealed.socket.close()
        except (ApiError, LinkError, OSError, TimeoutError) as error:  # the claim itself tries again
            log.info("warm_pod_not_greeted pod=%s cause=%s", name, error)

    async def _pin(self, sandbox: str, name: str, uid: str, public: bytes) -> None:
        """Writes the agent's key and the sandbox to the pod, once: two gateways that are first at the same time agree
        on one. A test for null is one that the name is not there yet (so in the library of the API server)."""
        key, owner = (f"/metadata/annotations/{names.escape(each)}" for each in (names.AGENT_KEY, names.SANDBOX))
        operations: list[dict[str, str | None]] = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "test", "path": key, "value": None},
            {"op": "add", "path": key, "value": public.hex()},
            {"op": "add", "path": owner, "value": sandbox},
        ]
        try:
            self._watch.put(await self._api.patch(Pod, name, operations))
        except ApiRefused as refused:
            if refused.code not in _TEST_FAILED:
                raise ConnectionError(str(refused)) from refused
            pod = await self._get(name)
            meta = pod.metadata if pod is not None else None
            if meta is None or meta.uid != uid or (meta.annotations or {}).get(names.AGENT_KEY) != public.hex():
                raise ProtocolViolation("its agent has another key than the one that answered first") from refused
            assert pod is not None
            self._watch.put(pod)
        except ApiError as error:
            raise ConnectionError(str(error)) from error

    async def _get(self, name: str) -> Pod | None:
        try:
            return await self._api.get(Pod, name)
        except ApiError as error:
            raise ConnectionError(str(error)) from error

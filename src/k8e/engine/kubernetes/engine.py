"""The Kubernetes engine: a sandbox is a claim on a pod of a warm pool, or, where the cluster has no such claims or the
sandbox a volume that outlives it, a pod of its own.

The cluster's objects are the engine's only memory. Each is named after its sandbox and labelled with its gateway, so
that `destroy` and `list` are right after any crash, and a pod ends by itself when no gateway ever comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod
from lightkube.resources.node_v1 import RuntimeClass

from k8e.damage import Damage
from k8e.engine import (
    EngineError,
    Limits,
    Mount,
    MountRefused,
    Observation,
    Place,
    Room,
    Runtime,
    RuntimeReport,
    SandboxSpec,
    Usage,
)
from k8e.engine.images import Images
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.api import Api, ApiError
from k8e.engine.kubernetes.cilium.egress import CiliumEgress
from k8e.engine.kubernetes.cluster import Cluster
from k8e.engine.kubernetes.early_link import EarlyLink
from k8e.engine.kubernetes.egress import Egress
from k8e.engine.kubernetes.gateway_key import load_key
from k8e.engine.kubernetes.images import HOST_IMAGE, ClusterImages
from k8e.engine.kubernetes.launcher import Launcher
from k8e.engine.kubernetes.object_watch import ObjectWatch
from k8e.engine.kubernetes.options import CILIUM, NODE, ClusterOptions
from k8e.engine.kubernetes.phases import Phase, count_oom_kills, read_state
from k8e.engine.kubernetes.place import PLACE
from k8e.engine.kubernetes.pods import build_claim
from k8e.engine.kubernetes.removal import Removal
from k8e.engine.kubernetes.sandbox_claims import NameTaken, SandboxClaims
from k8e.engine.kubernetes.usage import measure
from k8e.engine.links import Links
from k8e.engine.tasks import Makings, finish
from k8e.link import AgentLink
from k8e.link.errors import LinkError
from k8e.link.model import Sandbox
from k8e.link.noise import AGENT_PORT
from k8e.policy import NOTHING, HostList

log = logging.getLogger("k8e.engine.kubernetes")

_BARE: Final = ObjectMeta()
_GREETINGS: Final = 16  # at once
_PROBE_LIMITS: Final = Limits(cpus=1.0, memory=256 << 20, pids=64, disk=64 << 20)


class KubernetesEngine:
    """Implements `engine.Engine`."""

    def __init__(self, options: ClusterOptions, key_file: Path, kubeconfig: Path | None = None) -> None:
        self._options = options
        self._key = load_key(key_file)
        gateway = names.gateway_label(self._key.public)
        self._gateway = gateway
        self._api = Api(options.namespace, kubeconfig)
        self._watch = ObjectWatch(self._api, Pod, names.selector(gateway))
        self._claims = SandboxClaims(self._api, self._watch, gateway, enabled=options.claims)
        self._cluster = Cluster(self._api, options, gateway, AGENT_PORT)
        self._egress = self._choose_egress()
        self._launcher = Launcher(self._api, self._watch, self._claims, self._cluster, options, self._key, self._egress)
        self._removal = Removal(self._api, self._watch, self._claims, gateway)
        self._links = Links(self._launcher.open_link)
        self._images = ClusterImages(options.images)
        self._makings = Makings()
        self._works: dict[Runtime, RuntimeReport] = {}

    def _choose_egress(self) -> Egress | CiliumEgress:
        if self._options.egress == CILIUM:
            return CiliumEgress(self._api, self._watch, self._gateway, self._options.nameservers)
        return Egress(self._api, self._watch, self._key)

    @property
    def gateway(self) -> str:
        """The label of all that this engine makes."""
        return self._gateway

    def obey(self, guard: Callable[[], None]) -> None:
        """Changes nothing in the cluster while `guard` raises an EngineError."""
        self._api.guard = guard

    @property
    def images(self) -> Images:
        return self._images

    # Runtimes --------------------------------------------------------------------------------------------------------

    async def probe(self) -> Sequence[RuntimeReport]:
        return [await self._try(runtime) for runtime in Runtime]

    async def choose(self, wanted: Runtime | None = None) -> RuntimeReport:
        order = tuple(Runtime) if wanted is None else (wanted,)
        for runtime in order:
            if (report := await self._try(runtime)).available:
                return report
        return self._works[order[0]]

    async def _try(self, runtime: Runtime) -> RuntimeReport:
        """Remembers what works, and tries again what does not: clusters change."""
        if runtime not in self._works or not self._works[runtime].available:
            self._works[runtime] = await self._report(runtime)
        return self._works[runtime]

    async def _report(self, runtime: Runtime) -> RuntimeReport:
        sandbox = f"probe-{runtime.value}-{secrets.token_hex(4)}"
        try:
            found = await self._cluster.require(runtime)
            await self.create(sandbox, SandboxSpec(runtime, limits=_PROBE_LIMITS))
        except EngineError as error:
            return RuntimeReport(
                runtime, available=False, reason=str(error), hint=error.hint or "`kubectl describe` says more"
            )
        finally:
            await finish(self._forget(sandbox))
        return RuntimeReport(runtime, available=True, version=_name_class(found))

    async def describe_runtime(self, runtime: Runtime) -> str:
        """Says what the cluster has for it. EngineError when it has nothing."""
        return _name_class(await self._cluster.require(runtime))

    async def _forget(self, sandbox: str) -> None:
        with contextlib.suppress(EngineError):  # listed as any other: the next daemon removes it
            await self.destroy(sandbox)

    async def edition(self, spec: SandboxSpec) -> str:
        self._check(spec)
        await self._cluster.require(spec.runtime)
        options = self._options
        parts = (
            *(importlib.metadata.version("k8e"), options.agent_image, options.image, spec.image, options.egress),
            *(spec.runtime.value, options.classes.get(spec.runtime), options.storage_class, self._gateway),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    async def keep_ready(self, wanted: Mapping[SandboxSpec, int]) -> Mapping[SandboxSpec, int] | None:
        if not await self._claims.ready():
            return None
        await self._watch.ready()
        pools = self._claims.pools
        if self._options.storage_class:  # a volume is made with its sandbox: what has one cannot be claimed
            await pools.keep({})
            return None
        ready, numbers, greeting = {}, {}, list[Pod]()
        async with contextlib.AsyncExitStack() as stack:
            for spec, number in wanted.items():
                try:
                    self._check(spec)
                    await stack.enter_async_context(self._egress.prepare(spec.egress))
                    name = await stack.enter_async_context(pools.hold(await self._launcher.describe_kind(spec)))
                except ApiError:
                    raise
                except EngineError as error:  # no session of that kind can be made either
                    log.info("kind_not_kept runtime=%s cause=%s", spec.runtime.value, error)
                    continue
                pods = pools.list_ready(name)
                new = [pod for pod in pods if names.AGENT_KEY not in ((pod.metadata or _BARE).annotations or {})]
                numbers[name], ready[spec] = number, len(pods) - len(new)
                greeting += new
            await pools.keep(numbers)
        await asyncio.gather(*(self._launcher.greet(pod) for pod in greeting[:_GREETINGS]))
        return ready

    # Creating --------------------------------------------------------------------------------------------------------

    async def create(self, sandbox: str, spec: SandboxSpec) -> None:
        self._check(spec)
        await self._watch.ready()
        await self._makings.do(sandbox, self._make(sandbox, spec), taken="exists already")

    def _check(self, spec: SandboxSpec) -> None:
        """Refuses what a pod cannot be, before anything is made."""
        if spec.image != HOST_IMAGE:
            self._images.refer(spec.image)
        if spec.shape.mounts or spec.shape.slots:
            _refuse_mounts()
        if spec.egress != NOTHING and self._options.egress not in (NODE, CILIUM):
            _refuse_hosts()
        if spec.shares and not self._options.storage_class:
            cause = "a workspace can be shared only where it is a volume"
            raise EngineError("shared workspace", cause, "set [kubernetes] storage_class")

    async def _make(self, sandbox: str, spec: SandboxSpec) -> None:
        if await self._claims.ready() and not self._options.storage_class:
            await self._claim(sandbox, spec)
            return
        await self._cluster.require(spec.runtime)
        if await self._removal.exists(sandbox):
            raise EngineError("sandbox", f"{sandbox} exists already")
        claim, node = await self._find_shared(spec.shares)
        try:
            if self._options.storage_class and not claim:
                made = await finish(self._api.create(build_claim(sandbox, self._gateway, spec.limits, self._options)))
                claim = made.metadata.name or "" if made.metadata is not None else ""
            await self._bring_up(sandbox, spec, claim, node)
        except BaseException:
            await finish(self._destroy(sandbox))
            raise

    async def _claim(self, sandbox: str, spec: SandboxSpec) -> None:
        """That there is no other claim of its name is for the server to see: each request counts here."""
        if self._launcher.find(sandbox) is not None or self._claims.has(sandbox):
            raise EngineError("sandbox", f"{sandbox} exists already")
        early = EarlyLink(lambda pod: self._launcher.open_link(sandbox, pod))
        try:
            pod = await self._launcher.claim(sandbox, spec, early.begin)
            await self._connect(sandbox, lambda: early.take(pod))
        except NameTaken:
            raise
        except BaseException:
            await finish(self._destroy(sandbox))
            raise
        finally:
            await early.close()

    async def _find_shared(self, owner: str) -> tuple[str, str]:
        """The volume of the sandbox whose workspace is shared, and the node that has it."""
        if not owner:
            return "", ""
        claim, pod = await self._removal.find_claim(owner), await self._removal.find_pod(owner)
        if claim is None or claim.metadata is None or pod is None or pod.spec is None:
            raise EngineError("shared workspace", f"{owner} is not there, or has no volume")
        return claim.metadata.name or "", pod.spec.nodeName or ""

    async def _bring_up(self, sandbox: str, spec: SandboxSpec, claim: str, node: str) -> None:
        pod = await self._launcher.launch(sandbox, spec, claim, node)
        await self._connect(sandbox, lambda: self._launcher.open_link(sandbox, pod))

    async def _connect(self, sandbox: str, dial: Callable[[], Coroutine[Any, Any, AgentLink]]) -> None:
        try:
            await self._links.open(sandbox, lambda _: dial())
        except LinkError as error:
            hint = "the gateway must reach the addresses of pods: run it in the cluster, or route them to it"
            raise EngineError("agent", f"no answer from the sandbox: {error}", hint) from error

    async def bind(self, sandbox: str, mounts: Sequence[Mount]) -> None:
        _refuse_mounts()

    # Using -----------------------------------------------------------------------------------------------------------

    async def _find(self, sandbox: str) -> Pod | None:
        await self._watch.ready()
        await self._claims.ready()
        return self._launcher.find(sandbox)

    async def find_address(self, sandbox: str) -> str:
        """The address of its pod; empty when it has none."""
        pod = await self._find(sandbox)
        return (pod.status.podIP or "") if pod is not None and pod.status is not None else ""

    async def attach(self, sandbox: str) -> tuple[Sandbox, Place]:
        pod = await self._find(sandbox)
        if pod is None:
            raise EngineError("sandbox", f"{sandbox} is not running")
        state = read_state(pod)
        if state.phase is not Phase.RUNNING:
            raise EngineError("sandbox", f"{sandbox} is not running: {state.cause}", state.hint)
        try:
            return await self._links.open(sandbox), PLACE
        except LinkError as error:
            raise EngineError("sandbox", f"{sandbox} does not answer: {error}") from error

    async def observe(self, sandbox: str) -> Observation:
        pod = await self._find(sandbox)
        if pod is None:
            return Observation(alive=False, oom_kills=0)
        alive, oom_kills = read_state(pod).phase is Phase.RUNNING, count_oom_kills(pod)
        if self._options.egress != NODE:
            return Observation(alive, oom_kills)  # Cilium, too, tells a gateway nothing
        refusals, unknown = await self._egress.refusals(pod)
        return Observation(alive, oom_kills, tuple(refusals), unknown)

    async def measure(self, sandbox: str) -> Usage:
        try:
            link, _ = await self.attach(sandbox)
            return await measure(link)
        except (EngineError, LinkError):
            return Usage(0.0, 0)

    async def prolong(self, sandbox: str, life: float) -> None:
        """A pod of its own cannot be prolonged: Kubernetes only lets its deadline come nearer."""
        if await self._claims.ready():
            await self._claims.prolong(sandbox, life)

    async def measure_room(self) -> Room | None:
        return await self._cluster.measure_room()

    async def default_egress(self) -> HostList:
        return NOTHING

    async def set_egress(self, sandbox: str, hosts: HostList) -> None:
        pod = await self._find(sandbox)
        if pod is None or pod.metadata is None:
            raise EngineError("sandbox", f"{sandbox} does not exist")
        if self._options.egress in (NODE, CILIUM):
            await self._egress.set_hosts(pod.metadata.name or "", hosts)
        elif hosts != NOTHING:
            _refuse_hosts()

    # Stopping and starting -------------------------------------------------------------------------------------------

    async def stop(self, sandbox: str) -> None:
        await self._makings.end(sandbox)
        await self._watch.ready()
        async with self._links.ended(sandbox):
            await finish(self._removal.stop(sandbox))

    async def start(self, sandbox: str, spec: SandboxSpec) -> None:
        self._check(spec)
        await self._watch.ready()
        await self._makings.do(sandbox, self._wake(sandbox, spec), taken="is being started already")

    async def _wake(self, sandbox: str, spec: SandboxSpec) -> None:
        pod = await self._removal.find_pod(sandbox)
        if pod is not None and read_state(pod).phase in (Phase.RUNNING, Phase.PENDING):
            raise EngineError("sandbox", f"{sandbox} is running already")
        claim = await self._removal.find_claim(sandbox)
        if claim is None or claim.metadata is None:
            raise EngineError("sandbox", f"{sandbox} cannot be started: there is no volume with its files")
        await self._removal.end_pod(sandbox)
        try:
            await self._bring_up(sandbox, spec, claim.metadata.name or "", "")
        except BaseException:
            async with self._links.ended(sandbox):
                await finish(self._removal.end_pod(sandbox))
            raise

    # Ending ----------------------------------------------------------------------------------------------------------

    async def destroy(self, sandbox: str) -> None:
        await self._makings.end(sandbox)
        await self._destroy(sandbox)

    async def _destroy(self, sandbox: str) -> None:
        await self._watch.ready()
        async with self._links.ended(sandbox):
            await self._removal.destroy(sandbox)
        await self._egress.release()

    async def set_aside(self, sandbox: str) -> str:
        await self._watch.ready()
        async with self._links.ended(sandbox):
            return await self._removal.set_aside(sandbox)

    async def list(self) -> Sequence[str]:
        return sorted(await self._removal.list())

    def damages(self) -> Sequence[Damage]:
        return ()  # it has no files but its key, without which it does not begin

    async def remove_policy(self) -> None:
        if isinstance(self._egress, CiliumEgress):
            await self._egress.remove_policy()
        else:
            await self._cluster.remove_policy()

    async def close(self) -> None:
        await self._makings.close()
        await self._links.close()
        await self._claims.close()
        self._egress.close()
        await self._watch.close()
        await self._api.close()


def _name_class(found: RuntimeClass | None) -> str:
    named = found.metadata.name if found is not None and found.metadata is not None else ""
    return f"RuntimeClass {named}" if named else "the cluster's own"


def _refuse_mounts() -> None:
    cause = "a pod sees no directory of the gateway's machine"
    raise MountRefused("mounts", cause, "copy the files into the sandbox: `k8e sandbox cp`, or the SDK's files")


def _refuse_hosts() -> None:
    cause = "[kubernetes] egress says that nothing in this cluster applies a list of hosts"
    raise EngineError("egress", cause, 'leave the list out, or set egress = "node" or "cilium"')

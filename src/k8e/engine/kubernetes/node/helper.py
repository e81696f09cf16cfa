"""The helper of a node: one watch of the node's sandboxes, and for each the rules that its list asks for.

The cluster's objects say what is wanted, the kernel has what is in force, and the state directory has what explains
the one by the other. So a helper that was killed at any moment leaves rules in force, and the next one goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Final

from lightkube.resources.core_v1 import Pod

from k8e.damage import Damages
from k8e.engine import EngineError, Refusal
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.api import Api, ApiError, ApiRefused
from k8e.engine.kubernetes.egress_objects import InForce, Wanted, read_in_force, read_wanted
from k8e.engine.kubernetes.gateway_key import load_key
from k8e.engine.kubernetes.node.machine import NodeMachine
from k8e.engine.kubernetes.node.pod_link import find_link
from k8e.engine.kubernetes.node.reports import Reports
from k8e.engine.kubernetes.object_watch import ObjectWatch
from k8e.engine.kubernetes.options import RESOLVER
from k8e.engine.local.network.addresses import Pool
from k8e.engine.local.network.network import Network
from k8e.engine.tasks import cancel_and_wait, finish_in_thread
from k8e.link.noise import AGENT_PORT
from k8e.link.noise.handshake import KEY_SIZE
from k8e.policy import Address

log = logging.getLogger("k8e.node")

_AGAIN: Final = 1.0  # seconds until something that failed is tried again
_ENDED: Final = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class HelperOptions:
    node: str
    namespace: str
    address: str  # of the node, where gateways reach the helper
    port: int
    state: Path
    nameservers: Sequence[Address] = ()  # none: those of /etc/resolv.conf


class _News(ObjectWatch[Pod]):
    """Tells the helper, too."""

    def __init__(self, api: Api, node: str, helper: NodeHelper) -> None:
        super().__init__(api, Pod, names.managed_selector(), fields=f"spec.nodeName={node}")
        self._helper = helper

    def _tell(self, names: Iterable[str]) -> None:
        changed = list(names)
        super()._tell(changed)
        for name in changed:
            self._helper.look_at(name)


class NodeHelper:
    def __init__(self, options: HelperOptions, api: Api) -> None:
        tag = name_rules(options.state)
        options.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._options = options
        self._api = api
        self._key = load_key(options.state / "helper.pem")
        self._machine = NodeMachine(tag, options.state, IPv4Address(RESOLVER), AGENT_PORT)
        self._network = Network(
            tag,
            self._machine.record_of,
            pool=Pool(v6=None),
            nameservers=options.nameservers,
            damages=Damages(options.state),
            machine=self._machine,
        )
        self._watch = _News(api, options.node, self)
        self._reports = Reports(self._key, self._list_gateways, self._tell_refusals)
        self._port = options.port
        self._pods: dict[str, str] = {}  # name to uid: those that have rules
        self._applied: dict[str, Wanted] = {}  # by uid
        self._at_work: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()

    async def start(self) -> None:
        """Returns when all pods of the node are known, and those that are gone have no rules any more."""
        self._port = await self._reports.start(self._options.address, self._options.port)
        while True:
            try:
                await self._watch.ready()
                break
            except ApiError as error:
                log.warning("pods_unknown cause=%s", error)
                await asyncio.sleep(_AGAIN)
        there = {_uid_of(pod) for pod in self._watch.objects.values()}
        for uid in self._network.sandboxes() - there:
            await self._network.remove(uid)
        log.info("helper_started node=%s port=%d key=%s", self._options.node, self._port, self._key.public.hex()[:16])

    async def close(self) -> None:
        """Rules stay in force."""
        await self._watch.close()
        for task in list(self._at_work.values()):
            await cancel_and_wait(task)
        await self._reports.close()
        await self._network.close()

    # One pod ---------------------------------------------------------------------------------------------------------

    def look_at(self, name: str) -> None:
        """One task for each pod at a time; news while it works make it look again."""
        if name in self._at_work:
            self._again.add(name)
            return
        self._at_work[name] = asyncio.get_running_loop().create_task(self._settle(name))

    async def _settle(self, name: str) -> None:
        try:
            while True:
                self._again.discard(name)
                try:
                    failed = not await self._look(name)
                except EngineError as error:
                    log.warning("pod_not_settled pod=%s cause=%s", name, error)
                    failed = True
                if failed:
                    await asyncio.sleep(_AGAIN)
                elif name not in self._again:
                    return
        finally:
            del self._at_work[name]

    async def _look(self, name: str) -> bool:
        """False: to be tried again."""
        pod = self._watch.find(name)
        uid = _uid_of(pod) if pod is not None else ""
        former = self._pods.get(name, "")
        ended = pod is None or (pod.status is not None and pod.status.phase in _ENDED)
        if former and (ended or former != uid):
            await self._forget(name, former)
        if pod is None or ended:
            return True
        wanted, address = read_wanted(pod), (pod.status.podIP if pod.status is not None else None) or ""
        if wanted is None or not address:
            return True  # not ours to rule, or no network yet: there will be news
        error = ""
        try:
            await self._apply(name, uid, address, wanted, _hostname_of(pod))
        except EngineError as failure:
            log.warning("list_not_applied pod=%s generation=%d cause=%s", name, wanted.generation, failure)
            error = str(failure)
        await self._acknowledge(
            pod, InForce(wanted.generation, self._options.address, self._port, self._key.public.hex(), error)
        )
        return not error

    async def _apply(self, name: str, uid: str, address: str, wanted: Wanted, hostname: str) -> None:
        if self._applied.get(uid) == wanted:
            return
        if not self._network.knows(uid):
            if ip_address(address).version != 4:
                raise EngineError("pod network", f"{address} is no IPv4 address", "pods with IPv6 only cannot be yet")
            await self._forget_address(address, uid)
            link = await finish_in_thread(find_link, uid, address)
            await finish_in_thread(self._machine.note_link, uid, link)
            self._pods[name] = uid
            if uid in self._network.sandboxes():
                await self._resume(uid, hostname)
            else:
                try:
                    await self._network.open(uid, wanted.hosts, hostname, lay=self._machine.adopt)
                except EngineError:
                    await self._network.detach(uid)  # closed, and tried again as after a crash
                    raise
        self._pods[name] = uid
        await self._network.set_hosts(uid, wanted.hosts)
        self._applied[uid] = wanted

    async def _resume(self, uid: str, hostname: str) -> None:
        """Goes on where another helper was, however far it got: each step is done again."""
        await self._network.resume(uid, hostname)
        wire = await finish_in_thread(self._machine.wire_of, uid)
        assert wire is not None, "it was resumed"
        await finish_in_thread(self._machine.adopt, wire, uid)

    async def _forget_address(self, address: str, uid: str) -> None:
        """Addresses are used again: what an earlier pod had goes before."""
        for other in self._network.sandboxes() - {uid}:
            with contextlib.suppress(EngineError):
                if (await finish_in_thread(self._machine.link_of, other)).address == address:
                    await self._network.remove(other)

    async def _forget(self, name: str, uid: str) -> None:
        await self._network.remove(uid)
        self._pods.pop(name, None)
        self._applied.pop(uid, None)

    async def _acknowledge(self, pod: Pod, state: InForce) -> None:
        if read_in_force(pod) == state:
            return
        assert pod.metadata is not None
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        change = {"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [state.condition(now)]}}
        try:
            self._watch.put(await self._api.merge_status(Pod, pod.metadata.name or "", change))
        except ApiRefused as refused:
            if refused.code not in (404, 409):  # gone, or another one by now
                raise

    # Refusals --------------------------------------------------------------------------------------------------------

    def _list_gateways(self) -> Mapping[str, bytes]:
        """Those that have pods here. A label is a digest of the key, so no pod can name another key for it."""
        found = {}
        for pod in self._watch.objects.values():
            meta = pod.metadata
            text = (meta.annotations or {}).get(names.GATEWAY_KEY, "") if meta is not None else ""
            with contextlib.suppress(ValueError):
                key = bytes.fromhex(text)
                if len(key) == KEY_SIZE:
                    found[names.gateway_label(key)] = key
        return found

    def _tell_refusals(self, label: str, uid: str) -> Sequence[Refusal]:
        name = next((name for name, each in self._pods.items() if each == uid), "")
        pod = self._watch.find(name)
        labels = (pod.metadata.labels if pod is not None and pod.metadata is not None else None) or {}
        if labels.get(names.GATEWAY) != label:
            raise EngineError("pod", "there is none of that gateway here")
        return self._network.refusals(uid)


def name_rules(state: Path) -> str:
    """Returns the tag by which the rules of the helper with this state are known."""
    return hashlib.sha256(str(state).encode()).hexdigest()[:8]


def _uid_of(pod: Pod) -> str:
    return (pod.metadata.uid if pod.metadata is not None else None) or ""


def _hostname_of(pod: Pod) -> str:
    return (pod.spec.hostname if pod.spec is not None else None) or "sandbox"

"""The gateway's part of egress: writes the list that it wants to the pod, waits until the helper of the pod's node has
it in force, and asks the helper what was refused."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from lightkube.resources.core_v1 import Pod

from k8e.engine import EngineError, Refusal
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.api import Api, ApiRefused
from k8e.engine.kubernetes.egress_objects import WANTED, InForce, Wanted, read_in_force, read_wanted
from k8e.engine.kubernetes.node_channel import ChannelBroken, HelperLinks
from k8e.engine.kubernetes.object_watch import ObjectWatch
from k8e.engine.tasks import finish
from k8e.link.noise import GatewayKey
from k8e.policy import HostList

_PATIENCE: Final = 15.0  # seconds for a helper to have a list in force
_AT_ONCE: Final = 2.0  # seconds for a helper to say what was refused
_TEST_FAILED: Final = (409, 422)  # a JSON patch whose tests do not hold
_GONE: Final = InForce(-1, "", 0, "", "its pod was deleted")
_HINT: Final = "the helper of the node (DaemonSet k8e-node-helper) has to run there: docs/kubernetes-egress.md"


class Egress:
    def __init__(self, api: Api, watch: ObjectWatch[Pod], key: GatewayKey) -> None:
        self._api = api
        self._watch = watch
        self._helpers = HelperLinks(key)
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def prepare(self, hosts: HostList) -> AsyncIterator[None]:
        """Nothing has to be there before the pod."""
        yield

    async def release(self) -> None:
        """The helper removes what it has made for a pod."""

    async def enforce(self, name: str, uid: str, hosts: HostList) -> None:
        """Returns when that list is in force in a new pod, or in one of a warm pool, which was made with none."""
        _, wanted = self._state_of(name)
        if wanted.hosts == hosts:
            await self._wait(name, uid, wanted.generation)
        else:
            await self.set_hosts(name, hosts)

    async def _wait(self, name: str, uid: str, generation: int) -> None:
        """Returns when that list, or a later one, is in force. EngineError: it is not, and the one before it is."""

        def look(pod: Pod | None) -> InForce | None:
            if pod is None or pod.metadata is None or pod.metadata.uid != uid:
                return _GONE
            found = read_in_force(pod)
            return found if found is not None and found.generation >= generation else None

        try:
            async with asyncio.timeout(_PATIENCE):
                found = await self._watch.wait(name, look)
        except TimeoutError:
            node = _node_of(self._watch.find(name))
            cause = f"the helper of node {node} has not applied the list in {_PATIENCE:g} s"
            raise EngineError("egress", cause, _HINT) from None
        if found.error:
            raise EngineError("egress", found.error, "" if found is _GONE else _HINT)

    async def set_hosts(self, name: str, hosts: HostList) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            pod, before = self._state_of(name)
            wanted = Wanted(before.generation + 1, hosts)
            pod = await self._write(pod, wanted)
            assert pod.metadata is not None
            try:
                await self._wait(name, pod.metadata.uid or "", wanted.generation)
            except BaseException:
                # The old list is in force, and stays so when the helper comes back.
                with contextlib.suppress(EngineError):  # the pod is gone, or the API server is
                    await finish(self._write(pod, Wanted(wanted.generation + 1, before.hosts)))
                raise

    def _state_of(self, name: str) -> tuple[Pod, Wanted]:
        pod = self._watch.find(name)
        before = read_wanted(pod) if pod is not None else None
        if pod is None or before is None:
            raise EngineError("egress", "the sandbox was made without control of its network", "create it again")
        return pod, before

    async def _write(self, pod: Pod, wanted: Wanted) -> Pod:
        assert pod.metadata is not None
        where = f"/metadata/annotations/{names.escape(WANTED)}"
        known = (pod.metadata.annotations or {}).get(WANTED)  # None: a test for null is one that it is not there
        operations: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": pod.metadata.uid},
            {"op": "test", "path": where, "value": known},
            {"op": "add", "path": where, "value": wanted.text()},
        ]
        try:
            written = await self._api.patch(Pod, pod.metadata.name or "", operations)
        except ApiRefused as refused:
            if refused.code in _TEST_FAILED:
                raise EngineError(
                    "egress", "another gateway changed the list at the same time", "try again"
                ) from refused
            raise
        self._watch.put(written)
        return written

    async def refusals(self, pod: Pod) -> tuple[Sequence[Refusal], str]:
        """Since the last call; or why they are not known."""
        helper = read_in_force(pod)
        if helper is None or pod.metadata is None:
            return (), "no helper has answered for the sandbox's node"
        try:
            async with asyncio.timeout(_AT_ONCE):
                question = {"refusals": pod.metadata.uid}
                answer = await self._helpers.ask(helper.address, helper.port, helper.key, question)
            if error := answer.get("error"):
                return (), f"the helper of the node: {error}"
            return tuple(_read(each) for each in answer["refusals"]), ""
        except (OSError, TimeoutError, ChannelBroken, LookupError, ValueError, TypeError, AttributeError) as error:
            return (), f"the helper of node {_node_of(pod)} does not answer: {str(error) or type(error).__name__}"

    def close(self) -> None:
        self._helpers.close()


def _read(fields: Any) -> Refusal:
    host, address, port, reason, at = fields
    return Refusal(str(host), str(address), int(port), str(reason), float(at))


def _node_of(pod: Pod | None) -> str:
    return (pod.spec.nodeName if pod is not None and pod.spec is not None else None) or "?"

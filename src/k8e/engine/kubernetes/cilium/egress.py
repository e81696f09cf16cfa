"""Gives pods their lists under Cilium: a label of the pod selects the policy of the list. Knows when it is in force.

Cilium does not say in the cluster's objects which rules a node applies. So the gateway tries them, from outside:

    the agent's port    is opened by the policy of the pod's list, and by nothing else
    a port for a turn   is opened by a label that changes together with the list
    a closed port       is opened by nothing: an answer says that no policy is enforced

A sandbox cannot open a port of its own by whatever it does: packets are dropped before they reach it.
"""

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
from k8e.engine.kubernetes.cilium.objects import (
    CLOSED_PORT,
    NOW,
    TURN,
    TURN_PORTS,
    CiliumEndpoint,
    belongs_to,
    find_list,
    find_turn,
    has_labels,
)
from k8e.engine.kubernetes.cilium.policies import ListPolicies
from k8e.engine.kubernetes.egress_objects import LIST, digest_list
from k8e.engine.kubernetes.object_watch import ObjectWatch
from k8e.engine.tasks import cancel_and_wait, finish
from k8e.link.noise import AGENT_PORT
from k8e.policy import HostList

# Seconds for a list to be in force. Cilium itself waits for five of them when labels of a pod change, so that all nodes
# know the new ones (its setting identity-change-grace-period).
_PATIENCE: Final = 30.0
_ATTEMPT: Final = 0.3  # for an answer to one packet, which may have been dropped
_TEST_FAILED: Final = (409, 422)  # a JSON patch whose tests do not hold
_AGENT: Final = "see that Cilium's agent runs on the node: `kubectl -n kube-system get pods -l k8s-app=cilium -o wide`"
_FILTER: Final = f"{_AGENT}; its setting `labels` must not leave out labels of k8e.dev"
_OFF: Final = (
    "Cilium's setting enable-policy must not be never; and a gateway in the network of a node (hostNetwork) is let in "
    "whatever the policies say: run it in a pod of its own"
)


class CiliumEgress:
    def __init__(self, api: Api, watch: ObjectWatch[Pod], gateway: str, nameservers: Sequence[str]) -> None:
        self._api = api
        self._watch = watch
        self._policies = ListPolicies(api, watch, gateway, nameservers)
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def prepare(self, hosts: HostList) -> AsyncIterator[None]:
        """The block makes a pod with that list, and calls `enforce`."""
        async with self._policies.hold(hosts):
            yield

    async def enforce(self, name: str, uid: str, hosts: HostList) -> None:
        """Returns when the list that the pod was made with is in force."""
        await self._policies.mark_used(hosts)
        await self._prove(name, uid, {LIST: digest_list(hosts)}, (AGENT_PORT,))

    async def set_hosts(self, name: str, hosts: HostList) -> None:
        digest = digest_list(hosts)
        async with self._locks.setdefault(name, asyncio.Lock()):
            pod = self._watch.find(name)
            if pod is None or pod.metadata is None or not find_list(pod):
                raise EngineError("egress", "the sandbox was made without control of its network", "create it again")
            before, uid = find_list(pod), pod.metadata.uid or ""
            if before == digest:
                return
            async with self._policies.hold(hosts):
                pod = await self._relabel(pod, digest)
                try:
                    await self._policies.mark_used(hosts)
                    turn = find_turn(pod)
                    await self._prove(name, uid, {NOW: digest, TURN: str(turn)}, (TURN_PORTS[turn], AGENT_PORT))
                except BaseException:
                    # The old list, whose policy is still there, is in force or comes back.
                    with contextlib.suppress(EngineError):  # the pod is gone, or the API server is
                        await finish(self._relabel(pod, before))
                    raise
        await self._policies.sweep()

    async def refusals(self, pod: Pod) -> tuple[Sequence[Refusal], str]:
        """Cilium tells them to those who watch a node (Hubble), not to a gateway."""
        return (), ""

    def close(self) -> None:
        pass

    async def release(self) -> None:
        """After the end of a sandbox: removes the policies of lists that no pod has."""
        await self._policies.sweep()

    async def remove_policy(self) -> None:
        await self._policies.remove_base()

    # -----------------------------------------------------------------------------------------------------------------

    async def _relabel(self, pod: Pod, digest: str) -> Pod:
        assert pod.metadata is not None
        known, turn = pod.metadata.labels or {}, (find_turn(pod) + 1) % len(TURN_PORTS)
        now, number = (f"/metadata/labels/{names.escape(each)}" for each in (NOW, TURN))
        operations: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": pod.metadata.uid},
            {"op": "test", "path": now, "value": known.get(NOW)},  # None: that it is not there
            {"op": "test", "path": number, "value": known.get(TURN)},
            {"op": "add", "path": now, "value": digest},
            {"op": "add", "path": number, "value": str(turn)},
        ]
        try:
            written = await self._api.patch(Pod, pod.metadata.name or "", operations)
        except ApiRefused as refused:
            if refused.code in _TEST_FAILED:
                cause = "another gateway changed the list at the same time"
                raise EngineError("egress", cause, "try again") from refused
            raise
        self._watch.put(written)
        return written

    async def _prove(self, name: str, uid: str, labels: dict[str, str], ports: Sequence[int]) -> None:
        """Returns when Cilium has these labels of the pod, and every port answers. EngineError: it is not known, or
        nothing is enforced."""
        pod = self._watch.find(name)
        address = pod.status.podIP if pod is not None and pod.status is not None else None
        if not address:
            raise EngineError("egress", "its pod was deleted")
        waiting = "its agent has no endpoint for the pod with its labels", _FILTER
        closed = asyncio.create_task(_reach(address, CLOSED_PORT))
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._wait_for_endpoint(name, uid, labels)
                for port in ports:
                    waiting = f"port {port} of the pod does not answer, which the policy of its list opens", _AGENT
                    await _reach(address, port)
                # The packet to the closed port went first. Its answer, if there is one, is here by now, and the task
                # needs a few rounds of the loop to say so.
                for _ in range(5):
                    await asyncio.sleep(0)
        except TimeoutError:
            cause = f"Cilium has not applied the list in {_PATIENCE:g} s: {waiting[0]}"
            raise EngineError("egress", cause, waiting[1]) from None
        finally:
            open_to_all = closed.done()
            await cancel_and_wait(closed)
        if open_to_all:
            cause = f"port {CLOSED_PORT} of the pod answers, which no policy opens: policies are not enforced here"
            raise EngineError("egress", cause, _OFF)

    async def _wait_for_endpoint(self, name: str, uid: str, labels: dict[str, str]) -> None:
        fields = f"metadata.name={name}"

        def is_there(one: CiliumEndpoint) -> bool:
            return belongs_to(one, uid) and has_labels(one, labels)

        while True:
            found, version = await self._api.list(CiliumEndpoint, fields=fields)
            if any(map(is_there, found)):
                return
            async with contextlib.aclosing(self._api.watch(CiliumEndpoint, version, fields=fields)) as events:
                async for event, one in events:
                    if event in ("ADDED", "MODIFIED") and is_there(one):
                        return


async def _reach(address: str, port: int) -> None:
    """Returns when a packet came back from there: an accepted connection, or a refused one. What is dropped on its way
    is sent again."""
    while True:
        try:
            async with asyncio.timeout(_ATTEMPT):
                _, writer = await asyncio.open_connection(address, port)
        except ConnectionRefusedError:
            return
        except TimeoutError:
            continue
        except OSError:  # no way there, yet
            await asyncio.sleep(_ATTEMPT)
            continue
        writer.close()
        return

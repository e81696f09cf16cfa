"""Asks a cluster what it can do: which runtimes it has, whether its nodes give pods users of their own. Makes the one
object that all sandboxes of a gateway share, the policy of their network."""

from __future__ import annotations

from typing import Final

from lightkube.models.meta_v1 import LabelSelector, ObjectMeta
from lightkube.models.networking_v1 import NetworkPolicyIngressRule, NetworkPolicyPort, NetworkPolicySpec
from lightkube.resources.core_v1 import Node
from lightkube.resources.networking_v1 import NetworkPolicy
from lightkube.resources.node_v1 import RuntimeClass
from lightkube.utils.quantity import parse_quantity

from k8e.engine import EngineError, Room, Runtime
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.api import Api, ApiRefused
from k8e.engine.kubernetes.options import CILIUM, POLICY, ClusterOptions
from k8e.engine.tasks import Once

_RESOURCES: Final = ("cpu", "memory", "ephemeral-storage")
_NOT_HERE: Final = {Runtime.FIRECRACKER: "Kubernetes starts virtual machines by Kata Containers: use kata"}


class Cluster:
    def __init__(self, api: Api, options: ClusterOptions, gateway: str, port: int) -> None:
        self._api = api
        self._options = options
        self._gateway = gateway
        self._port = port
        self._policy: Once[str, None] = Once()

    async def require(self, runtime: Runtime) -> RuntimeClass | None:
        """The RuntimeClass of that runtime; None is the cluster's usual one. EngineError when it is not there."""
        name = self._options.classes.get(runtime)
        if name is None:
            raise EngineError(runtime.value, "not on Kubernetes", _NOT_HERE.get(runtime, "use another runtime"))
        if not name:
            return None
        classes = {one.metadata.name: one for one in await self._api.list_global(RuntimeClass) if one.metadata}
        if name not in classes:
            known = ", ".join(sorted(str(each) for each in classes)) or "none"
            raise EngineError(
                runtime.value,
                f"the cluster has no RuntimeClass {name}",
                f"install the runtime and its RuntimeClass, or name another by [kubernetes] {runtime.value}; "
                f"there is: {known}",
            )
        return classes[name]

    async def has_user_namespaces(self, runtime: Runtime, runtime_class: RuntimeClass | None) -> bool:
        """Whether every node's runtime says that it can give a pod users of its own. Asked for natively only: the
        others have a kernel of their own between a pod's users and the node's, and runsc says that it can and then
        cannot ("error setting namespace of type user": gVisor of July 2026 under containerd 2.4)."""
        if not self._options.user_namespaces or runtime is not Runtime.NATIVE:
            return False
        handler = runtime_class.handler if runtime_class is not None else ""
        try:
            nodes = await self._api.list_global(Node)
        except ApiRefused:  # an account without the right to list nodes: pods are as they are everywhere
            return False
        return bool(nodes) and all(_can_map_users(node, handler) for node in nodes)

    async def measure_room(self) -> Room:
        """Of all nodes that take pods, what the kubelet has for them."""
        room = Room(0, 0, 0)
        for node in await self._api.list_global(Node):
            if node.spec is None or not node.spec.unschedulable:
                given = (node.status.allocatable if node.status is not None else None) or {}
                cpus, memory, disk = (parse_quantity(given.get(name, "0")) or 0 for name in _RESOURCES)
                room = Room(room.cpus + float(cpus), room.memory + int(memory), room.disk + int(disk))
        return room

    async def prepare(self) -> None:
        """Makes what must be there before the first sandbox is."""
        if self._options.egress != CILIUM:  # which has policies of its own
            await self._policy.get("", self._make_policy)

    async def remove_policy(self) -> None:
        """For who has made a gateway for a moment only."""
        name = names.policy_name(self._gateway)
        found = await self._api.get(NetworkPolicy, name)
        if found is not None and found.metadata is not None:
            await self._api.delete(NetworkPolicy, name, found.metadata.uid or "")

    async def _make_policy(self) -> None:
        policy = build_policy(self._gateway, self._options, self._port)
        try:
            await self._api.create(policy)
        except ApiRefused as refused:
            if refused.code != 409:
                raise
            await self._check_policy(policy)

    async def _check_policy(self, wanted: NetworkPolicy) -> None:
        assert wanted.metadata is not None
        found = await self._api.get(NetworkPolicy, wanted.metadata.name or "")
        if found is None or found.spec != wanted.spec:
            raise EngineError(
                "network policy",
                f"{wanted.metadata.name} in {self._api.namespace} is not as this gateway made it",
                "delete it: the gateway makes it again",
            )


def _can_map_users(node: Node, handler: str) -> bool:
    handlers = (node.status.runtimeHandlers or ()) if node.status is not None else ()
    return any(
        (one.name or "") == handler and one.features is not None and bool(one.features.userNamespaces)
        for one in handlers
    )


def build_policy(gateway: str, options: ClusterOptions, port: int) -> NetworkPolicy:
    """Only the agent's port can be reached from outside. Under POLICY nothing can be reached from inside."""
    return NetworkPolicy(
        metadata=ObjectMeta(
            name=names.policy_name(gateway), namespace=options.namespace, labels=dict(names.labels(gateway))
        ),
        spec=NetworkPolicySpec(
            podSelector=LabelSelector(matchLabels=dict(names.labels(gateway))),
            policyTypes=["Ingress", "Egress"] if options.egress == POLICY else ["Ingress"],
            ingress=[NetworkPolicyIngressRule(ports=[NetworkPolicyPort(port=port, protocol="TCP")])],
        ),
    )

"""A gateway that is one of several: forwards from its first moment on, and does the rest while it leads."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

from k8e.core.store.mirrored import MirroredStore
from k8e.daemon.kubernetes import find_kubeconfig, name_secret
from k8e.daemon.paths import Paths, StartRefused
from k8e.doors.addresses import bind_port, bracket, split_address
from k8e.doors.grpc.forwarder import Forwarder
from k8e.engine import EngineError
from k8e.engine.kubernetes import Api, KubernetesEngine, SharedSecret
from k8e.replicas.environments import SecretEnvironments
from k8e.replicas.identity import SharedRegister
from k8e.replicas.leadership import Leadership, LeaseWatch, end_process
from k8e.replicas.objects import ObjectMirror
from k8e.settings import GatewaySettings, Settings

_DESCRIPTORS = 2  # of a forwarded connection


class Replica:
    environments: SecretEnvironments  # from `load` on

    def __init__(self, engine: KubernetesEngine, paths: Paths, settings: Settings) -> None:
        cluster = settings.kubernetes
        kubeconfig = find_kubeconfig(cluster)
        home, secret = name_secret(cluster)
        self._paths = paths
        self._listen = settings.gateway.listen
        self._mcp = settings.gateway.mcp
        self.mcp_peers = cluster.mcp_peers
        self._engine = engine
        self._lease_api = Api(cluster.namespace, kubeconfig)  # without a guard: the lease itself
        self._api = Api(cluster.namespace, kubeconfig)
        self._watch = LeaseWatch(self._lease_api, engine.gateway)
        identity = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._leadership = Leadership(self._lease_api, engine.gateway, identity, self._watch)
        self._secret_api = Api(home, kubeconfig)
        self._register = SharedRegister(SharedSecret(self._secret_api, secret))
        self._api.guard = self._secret_api.guard = self._leadership.guard
        engine.obey(self._leadership.guard)
        self._forwarders: list[Forwarder] = []
        self._host = _find_host(cluster.peers)
        self.gateway_settings: GatewaySettings = replace(settings.gateway, listen=cluster.peers)
        self.keep_keys = self._register.keep

    def open(self) -> None:
        """Accepts connections of clients, which wait until a gateway leads."""
        if not self._listen:
            hint = "[gateway] listen is where clients reach this gateway, [kubernetes] peers where the others do"
            raise StartRefused("gateway_closed", "one of several gateways has to listen", hint=hint)
        if bool(self._mcp) != bool(self.mcp_peers):
            hint = "[gateway] mcp is where clients reach this gateway, [kubernetes] mcp_peers where the others do"
            raise StartRefused("gateway_closed", "one of several gateways needs both addresses for MCP", hint=hint)
        self._forward("listen", self._listen, self._watch.leader)
        if self._mcp:
            self._forward("mcp", self._mcp, self._watch.mcp_leader)
        self._watch.open()
        for forwarder in self._forwarders:
            forwarder.open()

    def _forward(self, key: str, address: str, leader: Callable[[], Awaitable[str]]) -> None:
        host, port = split_address(address)
        try:
            listener = bind_port(host, port)
        except OSError as error:
            hint = f"Is the port taken? [gateway] {key} in k8e.toml names another one."
            text = f"the gateway cannot listen on {address}"
            raise StartRefused("gateway_closed", text, detail=str(error), hint=hint) from error
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        share = descriptors // (8 if self._mcp else 4) // _DESCRIPTORS
        self._forwarders.append(Forwarder(listener, leader, share))

    async def lead(self, stop: asyncio.Event) -> bool:
        """Waits until this replica leads; False: it was stopped before."""
        acquiring = asyncio.create_task(self._leadership.acquire())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({acquiring, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not acquiring.done():
            acquiring.cancel()
            await asyncio.wait({acquiring})
            return False
        acquiring.result()
        return True

    async def load(self) -> MirroredStore:
        """Returns what the leader before has left: its sessions, with the API keys in their file."""
        try:
            await self._register.load(self._paths.identity)
        except EngineError as error:
            raise StartRefused("engine_unusable", str(error), hint=error.hint or "docs/kubernetes.md") from error
        mirror = ObjectMirror(self._api, self._engine.gateway, self._leadership.term, end_process)
        self.environments = SecretEnvironments(self._api, self._engine.gateway, mirror)
        return await MirroredStore.load(mirror)

    async def serve(self, endpoint: str, mcp_port: int = 0) -> None:
        """Clients are forwarded here from now on."""
        _, port = split_address(endpoint)
        mcp_address = f"{bracket(_find_host(self.mcp_peers))}:{mcp_port}" if mcp_port else ""
        await self._leadership.publish(f"{bracket(self._host)}:{port}", mcp_address)

    async def close(self) -> None:
        await self._leadership.release()
        for forwarder in self._forwarders:
            forwarder.close()
        await self._watch.close()
        for api in (self._api, self._secret_api, self._lease_api):
            await api.close()


def _find_host(peers: str) -> str:
    """The address that the other replicas are told."""
    host, _ = split_address(peers)
    if host not in ("0.0.0.0", "::"):
        return host
    if told := os.environ.get("K8E_POD_IP", ""):
        return told
    hint = "set K8E_POD_IP from the pod's status.podIP, or let [kubernetes] peers name the address"
    raise StartRefused("gateway_closed", "the address for the other gateways is not known", hint=hint)

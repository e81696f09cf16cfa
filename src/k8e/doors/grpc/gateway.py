"""When the gateway is opened: not before it is wanted, and never in the way of the daemon's own start.

Imports nothing heavy itself. gRPC is loaded in a thread, with what has to be said to it before.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8e.core.access.keys import Keys
from k8e.core.contract import WholeService
from k8e.core.errors import Fault, Kind
from k8e.core.log.journal import format_event
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.http.answers import Json
from k8e.doors.request_memory import RequestMemory
from k8e.settings import GatewaySettings

if TYPE_CHECKING:
    from k8e.doors.grpc.handlers.agents import Attendance
    from k8e.doors.grpc.server import GrpcServer

_ENVIRONMENT: Final = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # we start processes, and its handlers would hang them
    "GRPC_VERBOSITY": "NONE",  # every scanner of ports would be a line
    # For keys that we do not have: TLS 1.2 finds nothing to agree on, and TLS 1.3 does not look here.
    "GRPC_SSL_CIPHER_SUITES": "ECDHE-RSA-AES256-GCM-SHA384",
}

log = logging.getLogger("k8e.doors.grpc")


def prepare_environment() -> None:
    """Before the first import of grpc in a process that serves."""
    os.environ.update(_ENVIRONMENT)


class Gateway:
    def __init__(
        self,
        service: WholeService,
        keys: Keys,
        settings: GatewaySettings,
        agents: Attendance,
        folder: Path,
        connection_limits: ConnectionLimits | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        self._memory = memory
        self._folder = folder
        self._connection_limits = connection_limits
        self._service = service
        self._agents = agents
        self._keys = keys
        self._settings = settings
        self._lock = asyncio.Lock()
        self._gateway: GrpcServer | None = None
        self.problem = ""  # why it is not open, if somebody tried

    async def open(self) -> GrpcServer:
        """Once; whoever comes second has the same. Raises Fault, and the next one tries again."""
        if not self._settings.listen:
            raise Fault(
                Kind.UNAVAILABLE, "gateway_closed", "the gateway is turned off", hint="[gateway] listen in k8e.toml"
            )
        async with self._lock:
            if self._gateway is None:
                try:
                    self._gateway = await self._open()
                    self.problem = ""
                except Fault as fault:
                    self.problem = fault.error
                    cause = {"cause": fault.error, "detail": fault.detail}
                    log.warning("%s", format_event(fault.code, {**cause, "hint": fault.hint}))
                    raise
            return self._gateway

    async def _open(self) -> GrpcServer:
        gateway = await asyncio.to_thread(self._load)
        host, _, _ = self._settings.listen.rpartition(":")
        if not ipaddress.ip_address(host.strip("[]")).is_loopback:
            self._service.expose()
        await gateway.open(self._settings.listen, self._settings.names)
        return gateway

    def _load(self) -> GrpcServer:
        prepare_environment()
        from k8e.doors.grpc.server import GrpcServer

        return GrpcServer(self._service, self._keys, self._agents, self._folder, self._connection_limits, self._memory)

    async def attempt(self) -> None:
        """A gateway that cannot be opened is no reason to stop: the log says why, and status does."""
        try:
            await self.open()
        except Fault as fault:
            self.problem = fault.error

    async def endpoint(self) -> str:
        return (await self.open()).endpoint

    def describe(self) -> Json:
        return {"endpoint": self._gateway.endpoint if self._gateway else None, "problem": self.problem}

    async def close(self, grace: float) -> None:
        if self._gateway is not None:
            await self._gateway.close(grace)

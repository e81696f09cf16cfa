"""The gateway, as the daemon sees it: opens the gRPC server when it is first used, never during the daemon's start.

Imports nothing heavy: gRPC is loaded in a thread, after its environment is set.
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
from k8e.core.log.daemon_log import format_event
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.request_memory import RequestMemory
from k8e.settings import GatewaySettings

if TYPE_CHECKING:
    from k8e.doors.grpc.handlers.agents import AgentDoor
    from k8e.doors.grpc.server import GrpcServer

_ENVIRONMENT: Final = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # its fork handlers would hang the processes that the daemon starts
    "GRPC_VERBOSITY": "NONE",  # every port scanner would write a line
    # For keys that the daemon does not have: TLS 1.2 finds no cipher, and TLS 1.3 does not read this.
    "GRPC_SSL_CIPHER_SUITES": "ECDHE-RSA-AES256-GCM-SHA384",
}

log = logging.getLogger("k8e.doors.grpc")


def prepare_environment() -> None:
    """Has to be called before a serving process first imports grpc."""
    os.environ.update(_ENVIRONMENT)


class Gateway:
    def __init__(
        self,
        service: WholeService,
        keys: Keys,
        settings: GatewaySettings,
        agents: AgentDoor,
        folder: Path,
        connection_limits: ConnectionLimits | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        self._service = service
        self._parts = (service, keys, agents, folder, connection_limits, memory)
        self._settings = settings
        self._file = folder / "gateway"
        self._lock = asyncio.Lock()
        self._server: GrpcServer | None = None
        self.problem = ""  # why the last attempt to open it failed

    async def open(self) -> GrpcServer:
        """Opens the server once. Raises Fault; the next call tries again."""
        if not self._settings.listen:
            error, hint = "the gateway is turned off", "[gateway] listen in k8e.toml"
            raise Fault(Kind.UNAVAILABLE, "gateway_closed", error, hint=hint)
        async with self._lock:
            if self._server is None:
                try:
                    self._server = await self._open()
                    self.problem = ""
                except Fault as fault:
                    self.problem = fault.error
                    cause = {"cause": fault.error, "detail": fault.detail}
                    log.warning("%s", format_event(fault.code, {**cause, "hint": fault.hint}))
                    raise
            return self._server

    async def _open(self) -> GrpcServer:
        try:
            server = await asyncio.to_thread(self._load)
        except ImportError as error:  # a library that its package takes for granted
            hint = "install what is missing, or use the image of `make images`"
            raise Fault(
                Kind.UNAVAILABLE, "gateway_closed", "gRPC cannot be loaded", detail=str(error), hint=hint
            ) from error
        host, _, _ = self._settings.listen.rpartition(":")
        if not ipaddress.ip_address(host.strip("[]")).is_loopback:
            await self._service.expose()
        await server.open(self._settings.listen, self._settings.names)
        await asyncio.to_thread(self._write_endpoint, server.endpoint)
        return server

    def _write_endpoint(self, endpoint: str) -> None:
        """For clients of this machine that have a credential and no endpoint: nothing about it is secret."""
        draft = self._file.with_name(".gateway")
        try:
            draft.write_text(f"{endpoint}\n")
            draft.chmod(0o644)
            draft.replace(self._file)
        except OSError as error:  # they find the usual port
            log.warning("%s", format_event("endpoint_not_written", {"cause": error}))

    def _load(self) -> GrpcServer:
        prepare_environment()
        from k8e.doors.grpc.server import GrpcServer

        return GrpcServer(*self._parts)

    async def attempt(self) -> None:
        """Opens it; where that fails the daemon goes on, and its log and status tell why."""
        try:
            await self.open()
        except Fault as fault:
            self.problem = fault.error

    async def endpoint(self) -> str:
        return (await self.open()).endpoint

    def describe(self) -> dict[str, str | None]:
        return {"endpoint": self._server.endpoint if self._server else None, "problem": self.problem}

    async def close(self, grace: float) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._file.unlink, missing_ok=True)
            await self._server.close(grace)

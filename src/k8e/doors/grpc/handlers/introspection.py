"""The two services that generic tools expect: health (grpc.health.v1) and reflection (grpc.reflection.v1alpha)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Final

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import aio as reflection

from k8e.core.errors import Fault, Kind
from k8e.doors.grpc.call import Call, Handler
from k8e.doors.grpc.methods import SERVICE

HEALTH: Final = "grpc.health.v1.Health"
_WATCHED: Final = 3600.0


class IntrospectionHandlers:
    def __init__(self) -> None:
        self._closing = asyncio.Event()
        self._reflection = reflection.ReflectionServicer((SERVICE, HEALTH, REFLECTION))

    @property
    def methods(self) -> Mapping[str, Handler]:
        """By path, not by name: they belong to other services."""
        return {
            f"/{HEALTH}/Check": Handler(self._check, unauthenticated=True),
            f"/{HEALTH}/Watch": Handler(self._watch, _WATCHED, unauthenticated=True),
            f"/{REFLECTION}/ServerReflectionInfo": Handler(self._reflect, _WATCHED),
        }

    def close(self) -> None:
        self._closing.set()

    def _show(self, service: str) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse
        if service not in ("", SERVICE):
            return states(status=states.SERVICE_UNKNOWN)
        return states(status=states.NOT_SERVING if self._closing.is_set() else states.SERVING)

    async def _check(self, call: Call) -> None:
        request = await call.read_one(health_pb2.HealthCheckRequest)
        if request.service not in ("", SERVICE):
            hint = f"It is called {SERVICE}; an empty name is the whole gateway."
            raise Fault(Kind.NOT_FOUND, "service_not_found", "there is no such service", field="service", hint=hint)
        await call.write(self._show(request.service))

    async def _watch(self, call: Call) -> None:
        request = await call.read_one(health_pb2.HealthCheckRequest)
        await call.write(self._show(request.service))
        await self._closing.wait()
        await call.write(self._show(request.service))

    async def _reflect(self, call: Call) -> None:
        async for answer in self._reflection.ServerReflectionInfo(_take(call), None):
            await call.write(answer)


async def _take(call: Call) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    while (request := await call.read(reflection_pb2.ServerReflectionRequest, _WATCHED)) is not None:
        yield request

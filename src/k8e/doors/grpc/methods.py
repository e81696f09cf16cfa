"""The methods of the service, read from its protobuf descriptor. Clients and the gateway use the same table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from k8e.doors.grpc import sandbox_pb2

SERVICE: Final = "sandbox.v1.SandboxService"
MAX_MESSAGE: Final = 64 << 20
# Around the content of a message: ids, a path, the environment. Content of exactly 64 MiB has to fit.
MESSAGE_ROOM: Final = 1 << 20
ERROR_KEY: Final = "sandbox-error-bin"
TENANT_KEY: Final = "sandbox-tenant"
OWNER_KEY: Final = "sandbox-owner"


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    request: type[Message]
    response: type[Message]

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


def _list_methods() -> Mapping[str, Method]:
    service = sandbox_pb2.DESCRIPTOR.services_by_name["SandboxService"]
    return {
        method.name: Method(method.name, GetMessageClass(method.input_type), GetMessageClass(method.output_type))
        for method in service.methods
    }


METHODS: Final = _list_methods()

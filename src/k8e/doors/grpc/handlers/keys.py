"""Login and API keys over gRPC."""

from __future__ import annotations

from collections.abc import Mapping

from k8e.core.access.keys import Keys
from k8e.doors.grpc import answers, requests
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import Call, Handler
from k8e.doors.grpc.errors import malformed


class KeyHandlers:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {
            "Login": Handler(self._login, unauthenticated=True),
            "CreateApiKey": Handler(self._create),
            "ListApiKeys": Handler(self._list),
            "DeleteApiKey": Handler(self._delete),
        }

    async def _login(self, call: Call) -> None:
        request = await call.read_one(pb.LoginRequest)
        if request.key_id:
            issued = await self._keys.login(request.key_id, request.csr, request.signature)
        elif call.admission is not None:
            issued = await self._keys.renew(call.admission.identity, request.csr)
        else:
            raise call.refusal or malformed("there is no key, and no certificate to renew")
        await call.write(answers.show_certificate(issued))

    async def _create(self, call: Call) -> None:
        spec = requests.read_key_spec(await call.read_one(pb.CreateApiKeyRequest))
        record, text = await self._keys.create(call.caller, spec)
        await call.write(pb.CreateApiKeyResponse(api_key=answers.show_key(record), key=text))

    async def _list(self, call: Call) -> None:
        await call.read_one(pb.ListApiKeysRequest)
        await call.write(pb.ListApiKeysResponse(api_keys=map(answers.show_key, await self._keys.list(call.caller))))

    async def _delete(self, call: Call) -> None:
        request = await call.read_one(pb.DeleteApiKeyRequest)
        await self._keys.delete(call.caller, request.name)
        await call.write(pb.DeleteApiKeyResponse())

"""The daemon's status and its images over gRPC."""

from __future__ import annotations

from collections.abc import Mapping

from k8e.core.contract import WholeService
from k8e.doors.grpc import answers
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import Call, Handler


class StatusHandlers:
    def __init__(self, service: WholeService) -> None:
        self._service = service

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {
            "Status": Handler(self._status, 120.0),
            "ListImages": Handler(self._list_images),
        }

    async def _status(self, call: Call) -> None:
        await call.read_one(pb.StatusRequest)
        await call.write(answers.show_status(await self._service.status(call.caller), call.caller))

    async def _list_images(self, call: Call) -> None:
        request = await call.read_one(pb.ListImagesRequest)
        images = await self._service.images.list(call.caller, request.name)
        await call.write(pb.ListImagesResponse(images=map(answers.show_image, images)))

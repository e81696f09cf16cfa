"""Questions to people, over gRPC."""

from __future__ import annotations

from collections.abc import Mapping

from k8e.core.contract import ApprovalService
from k8e.doors.grpc import answers, requests
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import MARGIN, Call, Handler


class Approvals:
    def __init__(self, approvals: ApprovalService) -> None:
        self._approvals = approvals

    def table(self) -> Mapping[str, Handler]:
        return {
            "ConfirmAction": Handler(self._confirm),
            "ApproveAction": Handler(self._approve),
            "ListApprovals": Handler(self._list),
        }

    async def _confirm(self, call: Call) -> None:
        request = await call.read_one(pb.ConfirmActionRequest)
        approval_id = request.approval_id
        if approval_id:
            if request.action or request.session_id or request.expires_in:
                raise requests.invalid("approval_id", "an earlier question has its session, its action and its end")
        else:
            seconds = request.expires_in or request.timeout or None
            asked = await self._approvals.ask(call.caller, request.session_id, request.action, seconds=seconds)
            approval_id = asked.approval_id
        if 0 < request.timeout <= 86_400:  # what makes no sense is refused by the service
            call.allow(request.timeout + MARGIN)
        approval = await self._approvals.wait(call.caller, approval_id, request.timeout)
        answer = pb.ConfirmActionResponse(
            approval_id=approval.approval_id,
            approved=approval.approved,
            reason=approval.reason,
            approval=answers.show_approval(approval),
        )
        await call.write(answer)

    async def _approve(self, call: Call) -> None:
        request = await call.read_one(pb.ApproveActionRequest)
        approval = await self._approvals.answer(
            call.caller, request.approval_id, approved=request.approved, reason=request.reason
        )
        await call.write(pb.ApproveActionResponse(approval=answers.show_approval(approval)))

    async def _list(self, call: Call) -> None:
        request = await call.read_one(pb.ListApprovalsRequest)
        if request.status not in ("", "pending", "all"):
            raise requests.invalid(
                "status", f"{request.status[:64]!r} is no choice of approvals", hint="pending or all"
            )
        approvals = await self._approvals.list(call.caller, all_states=request.status == "all")
        await call.write(pb.ListApprovalsResponse(approvals=map(answers.show_approval, approvals)))

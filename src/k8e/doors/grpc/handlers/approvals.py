"""Approvals over gRPC."""

from __future__ import annotations

from collections.abc import Mapping

from k8e.core.contract import ApprovalService
from k8e.doors.errors import invalid
from k8e.doors.grpc import answers
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import MARGIN, Call, Handler
from k8e.doors.requests import read_all


class ApprovalHandlers:
    def __init__(self, approvals: ApprovalService) -> None:
        self._approvals = approvals

    @property
    def methods(self) -> Mapping[str, Handler]:
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
                raise invalid("approval_id", "an earlier question has its session, its action and its end")
            if request.may_answer:
                await self._approvals.check_answer(call.caller, approval_id)
        else:
            seconds = request.expires_in or request.timeout or None
            asked = await self._approvals.ask(call.caller, request.session_id, request.action, seconds=seconds)
            approval_id = asked.approval_id
        if 0 < request.timeout <= 86_400:  # core refuses what makes no sense
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
        all_states = read_all("status", request.status or "pending", "pending", "approvals")
        approvals = await self._approvals.list(call.caller, all_states=all_states)
        await call.write(pb.ListApprovalsResponse(approvals=map(answers.show_approval, approvals)))

"""Approvals over HTTP, for `k8e sandbox confirm`, `approve` and `approvals`."""

from __future__ import annotations

from k8e.core.contract import ApprovalService
from k8e.doors.errors import invalid
from k8e.doors.http.answers import show_approval
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.routes import JSON, SESSIONS, Route
from k8e.doors.requests import read_all, read_flag


class ApprovalHandlers:
    def __init__(self, approvals: ApprovalService) -> None:
        self._approvals = approvals

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", (*SESSIONS, "*", "approvals"), self.ask, (JSON,)),
            Route("GET", ("v1", "approvals"), self.list),
            Route("GET", ("v1", "approvals", "*"), self.get),
            Route("POST", ("v1", "approvals", "*"), self.answer, (JSON,)),
        )

    async def ask(self, exchange: Exchange, request: Request) -> None:
        """Answers at once, so that the caller has an id to wait with, whatever happens to this connection."""
        fields = await exchange.read_fields(request)
        action = fields.take_text("action")
        seconds = fields.take_number("timeout", 0) if "timeout" in fields else None
        fields.finish()
        approval = await self._approvals.ask(exchange.caller, request.path[2], action, seconds=seconds)
        await exchange.send_json(201, show_approval(approval))

    async def get(self, exchange: Exchange, request: Request) -> None:
        text, may_answer = request.read_query(wait="0", may_answer="0")
        try:
            seconds = float(text)
        except ValueError:
            raise invalid("wait", f"{text[:64]!r} is no span of time", hint="seconds") from None
        if read_flag("may_answer", may_answer):
            await self._approvals.check_answer(exchange.caller, request.path[2])
        approval = await self._approvals.wait(exchange.caller, request.path[2], seconds)
        await exchange.send_json(200, show_approval(approval))

    async def list(self, exchange: Exchange, request: Request) -> None:
        (status,) = request.read_query(status="pending")
        all_states = read_all("status", status, "pending", "approvals")
        approvals = await self._approvals.list(exchange.caller, all_states=all_states)
        await exchange.send_json(200, {"approvals": [show_approval(approval) for approval in approvals]})

    async def answer(self, exchange: Exchange, request: Request) -> None:
        fields = await exchange.read_fields(request)
        if "approved" not in fields:
            raise invalid("approved", "approved is missing", hint="true or false")
        approved, reason = fields.take_flag("approved"), fields.take_text("reason")
        fields.finish()
        approval = await self._approvals.answer(exchange.caller, request.path[2], approved=approved, reason=reason)
        await exchange.send_json(200, {"ok": True, **show_approval(approval)})

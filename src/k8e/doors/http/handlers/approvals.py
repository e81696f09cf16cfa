"""Approvals over HTTP: what `k8e sandbox confirm`, `approve` and `approvals` ask for."""

from __future__ import annotations

from k8e.core.contract import ApprovalService
from k8e.doors.http.answers import show_approval
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.fields import Fields, invalid
from k8e.doors.http.route import JSON, SESSIONS, Route


class Approvals:
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
        """Answers at once: whoever waits has an id first, with which they can go on waiting whatever happens."""
        fields = await exchange.read_fields(request)
        action = fields.take_text("action")
        seconds = fields.take_number("timeout", 0) if "timeout" in fields else None
        fields.finish()
        approval = await self._approvals.ask(exchange.caller, request.path[2], action, seconds=seconds)
        await exchange.send_json(201, show_approval(approval))

    async def get(self, exchange: Exchange, request: Request) -> None:
        query = Fields(request.query)
        text = query.take_text("wait", "0")
        query.finish()
        try:
            seconds = float(text)
        except ValueError:
            raise invalid("wait", f"{text[:64]!r} is no span of time", hint="seconds") from None
        approval = await self._approvals.wait(exchange.caller, request.path[2], seconds)
        await exchange.send_json(200, show_approval(approval))

    async def list(self, exchange: Exchange, request: Request) -> None:
        query = Fields(request.query)
        status = query.take_text("status", "pending")
        query.finish()
        if status not in ("pending", "all"):
            raise invalid("status", f"{status[:64]!r} is no choice of approvals", hint="pending or all")
        approvals = await self._approvals.list(exchange.caller, all_states=status == "all")
        await exchange.send_json(200, {"approvals": [show_approval(approval) for approval in approvals]})

    async def answer(self, exchange: Exchange, request: Request) -> None:
        fields = await exchange.read_fields(request)
        if "approved" not in fields:
            raise invalid("approved", "approved is missing", hint="true or false")
        approved, reason = fields.take_flag("approved"), fields.take_text("reason")
        fields.finish()
        approval = await self._approvals.answer(exchange.caller, request.path[2], approved=approved, reason=reason)
        await exchange.send_json(200, {"ok": True, **show_approval(approval)})

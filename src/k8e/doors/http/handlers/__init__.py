"""The handlers of the HTTP door's routes, one file for each noun."""

from __future__ import annotations

from collections.abc import Callable

from k8e.core.access.keys import Keys
from k8e.core.contract import WarmService, WholeService
from k8e.doors.http.handlers.approvals import ApprovalHandlers
from k8e.doors.http.handlers.files import FileHandlers
from k8e.doors.http.handlers.images import ImageHandlers
from k8e.doors.http.handlers.keys import Gateway, KeyHandlers
from k8e.doors.http.handlers.ports import PortHandlers
from k8e.doors.http.handlers.runs import RunHandlers
from k8e.doors.http.handlers.sessions import SessionHandlers
from k8e.doors.http.handlers.status import StatusHandlers
from k8e.doors.http.handlers.terminals import TerminalHandlers
from k8e.doors.http.handlers.warm import WarmHandlers
from k8e.doors.http.routes import Handlers


def list_handlers(
    service: WholeService, warm: WarmService, render_metrics: Callable[[], str], keys: Keys, gateway: Gateway
) -> tuple[Handlers, ...]:
    return (
        StatusHandlers(service, render_metrics, gateway),
        SessionHandlers(service),
        RunHandlers(service),
        TerminalHandlers(service.terminals),
        FileHandlers(service.files),
        PortHandlers(service.ports),
        ApprovalHandlers(service.approvals),
        ImageHandlers(service.images),
        WarmHandlers(warm, service),
        KeyHandlers(keys, gateway),
    )

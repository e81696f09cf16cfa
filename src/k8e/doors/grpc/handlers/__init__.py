"""The handlers of the gateway's methods, one file for each noun."""

from __future__ import annotations

from collections.abc import Mapping

from k8e.core.access.keys import Keys
from k8e.core.contract import WholeService
from k8e.doors.grpc.call import Handler
from k8e.doors.grpc.handlers.agents import AgentDoor, AgentHandlers
from k8e.doors.grpc.handlers.approvals import ApprovalHandlers
from k8e.doors.grpc.handlers.files import FileHandlers
from k8e.doors.grpc.handlers.keys import KeyHandlers
from k8e.doors.grpc.handlers.runs import RunHandlers
from k8e.doors.grpc.handlers.sessions import SessionHandlers
from k8e.doors.grpc.handlers.status import StatusHandlers
from k8e.doors.grpc.handlers.terminals import TerminalHandlers


def list_handlers(service: WholeService, keys: Keys, agents: AgentDoor) -> Mapping[str, Handler]:
    """By the name of the method."""
    return {
        **SessionHandlers(service).methods,
        **RunHandlers(service.runs).methods,
        **TerminalHandlers(service.terminals).methods,
        **FileHandlers(service.files).methods,
        **ApprovalHandlers(service.approvals).methods,
        **AgentHandlers(agents).methods,
        **StatusHandlers(service).methods,
        **KeyHandlers(keys).methods,
    }

"""The reasons why sessions end or are stopped, and the faults that tell a caller so."""

from __future__ import annotations

from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.core.model import Phase
from k8e.core.sessions.live import Live

DESTROYED: Final = "destroyed"
EXPIRED: Final = "expired"
LOST: Final = "lost"
OUT_OF_MEMORY: Final = "out_of_memory"
UNRESPONSIVE: Final = "unresponsive"
NOT_ADOPTED: Final = "not_adopted"
STOPPED: Final = "stopped"
ABANDONED: Final = "abandoned"  # before it was ready; such a session leaves no record
FINISHED: Final = "finished"  # its one command has ended; nor does such a session
PARENT_ENDED: Final = "parent_ended"
UNBOUND: Final = "unbound"

DEAD: Final = frozenset({LOST, OUT_OF_MEMORY, UNRESPONSIVE, NOT_ADOPTED})  # the sandbox ended; no caller asked for it
SILENCE: Final = 30.0  # of a sandbox that was asked something, before it is ended
GONE_HINT: Final = "Create a new session; what was in the old one is gone."

_REASONS: Final = {
    DESTROYED: "it was destroyed",
    EXPIRED: "it expired: it was not used for longer than its ttl",
    LOST: "its sandbox ended by itself",
    OUT_OF_MEMORY: "its sandbox ran out of memory, and the machine ended it",
    UNRESPONSIVE: f"its sandbox did not answer for {SILENCE:g} s and was ended: too many processes, or no CPU left",
    NOT_ADOPTED: "a new daemon could not take its sandbox over, for a reason that is in its log",
    STOPPED: "it was stopped",
    FINISHED: "it was there for one command, which has ended",
    PARENT_ENDED: "its parent ended or was stopped, and it with it",
    UNBOUND: "its list of hosts could not be narrowed with its parent's",
}
# Why a session cannot be used, and what to do, by its phase.
_GONE: Final = "is being destroyed", "Create a new session; what was in this one is gone."
_UNUSABLE: Final = {
    Phase.CREATING: ("is still being created", "Try again when the answer to its creation has come."),
    Phase.ACTIVE: ("was started again meanwhile", "Stop it again."),
    Phase.STARTING: ("is being started", "Try again when the answer to that has come."),
    Phase.STOPPING: ("is being stopped", "Its files are kept; start it again when it has stopped."),
    Phase.DESTROYING: _GONE,
    Phase.DESTROYED: _GONE,
}


def describe_end(reason: str) -> str:
    return _REASONS.get(reason, reason)


def describe_unusable(live: Live) -> Fault:
    """A caller wants to use a session that is not active."""
    if live.stopped:
        return _describe_stopped(live)
    what, hint = _UNUSABLE[live.phase]
    error = f"session {live.session_id} {what}"
    detail = describe_end(live.record.reason) if live.record.reason else ""
    return Fault(Kind.CONFLICT, f"session_{live.phase.value}", error, detail=detail, hint=hint)


def describe_loss(live: Live) -> Fault:
    """A caller wants to go on with a session that was active a moment ago."""
    if live.there:
        return _describe_stopped(live)
    return Fault(
        Kind.NOT_FOUND,
        "session_not_found",
        f"there is no session {live.session_id} any more",
        detail=describe_end(live.record.reason),
        hint=GONE_HINT,
    )


def _describe_stopped(live: Live) -> Fault:
    return Fault(
        Kind.CONFLICT,
        "session_stopped",
        f"session {live.session_id} is stopped",
        detail=describe_end(live.record.reason),
        hint=f"Its files are kept. Start it: k8e sandbox start {live.session_id}",
    )

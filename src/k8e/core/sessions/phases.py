"""A session's life as one table: which phase follows which, by what happened. Pure.

Everything about the order of phases stands here. `Live.advance` is the only writer of a phase and asks `follow`; an
event that the table does not have for a phase is a defect of ours. docs/sessions.md shows the same table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from k8e.core.model import Phase


class Event(enum.Enum):
    BUILT = "built"  # its sandbox is ready
    STOP_BEGUN = "stop_begun"  # a caller stops it, its sandbox died, or its start failed
    STOPPED = "stopped"
    START_BEGUN = "start_begun"
    STARTED = "started"
    END_BEGUN = "end_begun"  # a caller destroys it, it expired, its sandbox died, or its creation failed
    ENDED = "ended"


# A stop and an end that failed, or that a daemon did not finish, are begun again.
FOLLOWING: Final[Mapping[Phase, Mapping[Event, Phase]]] = {
    Phase.CREATING: {Event.BUILT: Phase.ACTIVE, Event.END_BEGUN: Phase.DESTROYING},
    Phase.ACTIVE: {Event.STOP_BEGUN: Phase.STOPPING, Event.END_BEGUN: Phase.DESTROYING},
    Phase.STOPPING: {
        Event.STOP_BEGUN: Phase.STOPPING,
        Event.STOPPED: Phase.STOPPED,
        Event.END_BEGUN: Phase.DESTROYING,
    },
    Phase.STOPPED: {Event.START_BEGUN: Phase.STARTING, Event.END_BEGUN: Phase.DESTROYING},
    Phase.STARTING: {
        Event.STARTED: Phase.ACTIVE,
        Event.STOP_BEGUN: Phase.STOPPING,
        Event.END_BEGUN: Phase.DESTROYING,
    },
    Phase.DESTROYING: {Event.END_BEGUN: Phase.DESTROYING, Event.ENDED: Phase.DESTROYED},
    Phase.DESTROYED: {},
}


class ImpossibleEvent(Exception):
    """Core announced an event that cannot happen to a session in that phase."""


def follow(phase: Phase, event: Event) -> Phase:
    try:
        return FOLLOWING[phase][event]
    except KeyError:
        raise ImpossibleEvent(f"{event.value} happened to a session that is {phase.value}") from None

"""Asks for the last complaint about a pod: what a kubelet or a scheduler cannot do is said nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from lightkube.resources.core_v1 import Event

from k8e.engine.kubernetes.api import Api, ApiError


async def find_complaint(api: Api, uid: str) -> str:
    try:
        events, _ = await api.list(Event, fields=f"involvedObject.uid={uid},type=Warning")
    except ApiError:
        return ""
    return _last_message(events)


def _last_message(events: Sequence[Event]) -> str:
    def when(event: Event) -> str:
        last = event.lastTimestamp or event.eventTime or event.firstTimestamp
        return str(last or "")

    chosen = max(events, key=when, default=None)
    return f"{chosen.reason}: {chosen.message}" if chosen is not None else ""

"""The sessions that are not destroyed, and which of them a caller may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from k8e.core.access.access import Payer, find_payer, may_see
from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Caller
from k8e.core.sessions.ends import GONE_HINT
from k8e.core.sessions.live import Live, Name

REMEMBERED: Final = 1000  # ends of sessions of one payer, for a better answer than "never heard of it"
REMEMBERED_IN_ALL: Final = 5000


class Registry:
    """Answers a caller who may not see a session as if it did not exist."""

    def __init__(self) -> None:
        self._by_sandbox: dict[str, Live] = {}
        self._by_id: dict[str, dict[Name, Live]] = {}
        self._ended: dict[Payer, dict[Name, str]] = {}  # why; the latest last. By payer: none pushes out another's

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._by_sandbox.values()))

    def __len__(self) -> int:
        return len(self._by_sandbox)

    def check_name(self, live: Live) -> None:
        """Refuses a name that another session of the same owner and tenant has."""
        namesake = self._by_id.get(live.session_id, {}).get(live.name)
        if namesake is not None:
            raise Fault(
                Kind.CONFLICT,
                "session_exists",
                f"session {live.session_id} exists already",
                detail=f"it is {namesake.phase.value}",
                hint="Use it, destroy it first, or choose another id.",
            )

    def add(self, live: Live) -> None:
        self.check_name(live)
        self._by_id.setdefault(live.session_id, {})[live.name] = live
        self._by_sandbox[live.sandbox] = live
        if live.parent is not None:
            live.parent.children.append(live)
        self._forget_end(live.name)

    def remove(self, live: Live) -> None:
        del self._by_sandbox[live.sandbox]
        if live.parent is not None:
            live.parent.children.remove(live)
        namesakes = self._by_id[live.session_id]
        del namesakes[live.name]
        if not namesakes:
            del self._by_id[live.session_id]

    def remember_end(self, name: Name, reason: str) -> None:
        self._forget_end(name)
        ended = self._ended.setdefault(find_payer(*name[:2]), {})
        ended[name] = reason
        if len(ended) > REMEMBERED:
            self._forget_end(next(iter(ended)))
        elif sum(map(len, self._ended.values())) > REMEMBERED_IN_ALL:
            most = max(self._ended.values(), key=len)
            self._forget_end(next(iter(most)))

    def _forget_end(self, name: Name) -> None:
        payer = find_payer(*name[:2])
        ended = self._ended.get(payer, {})
        ended.pop(name, None)
        if not ended:
            self._ended.pop(payer, None)

    def find(self, caller: Caller, session_id: str) -> Live:
        namesakes = self._by_id.get(session_id, {})
        mine = namesakes.get((caller.uid, caller.tenant or "default", session_id))
        if mine is not None and caller.meant.covers(mine.session.owner, mine.session.tenant):
            return mine
        seen = [live for live in namesakes.values() if may_see(caller, live.session.owner, live.session.tenant)]
        if not seen:
            raise self.missing(caller, session_id)
        if len(seen) > 1:
            raise Fault(
                Kind.CONFLICT,
                "session_ambiguous",
                f"there are {len(seen)} sessions called {session_id}",
                detail="; ".join(sorted(_describe_owner(live) for live in seen)),
                hint="Say whose you mean: --tenant-id NAME and --owner UID, or --owner gateway (tenant_id, owner).",
            )
        return seen[0]

    def get(self, sandbox: str) -> Live | None:
        """For what belongs to a sandbox and was already shown to be the caller's."""
        return self._by_sandbox.get(sandbox)

    def find_sandbox(self, caller: Caller, sandbox: str) -> Live | None:
        live = self._by_sandbox.get(sandbox)
        return live if live and may_see(caller, live.session.owner, live.session.tenant) else None

    def missing(self, caller: Caller, session_id: str) -> Fault:
        """Tells a caller who could have seen the session why it is gone."""
        ends = (end for ended in self._ended.values() for end in ended.items())
        reasons = [why for name, why in ends if name[2] == session_id and may_see(caller, *name[:2])]
        if reasons:
            error, hint = f"there is no session {session_id} any more", GONE_HINT
        else:
            error, hint = f"there is no session {session_id}", "List your sessions, or create one."
        return Fault(Kind.NOT_FOUND, "session_not_found", error, detail=reasons[-1] if reasons else "", hint=hint)

    def visible(self, caller: Caller) -> list[Live]:
        return [live for live in self if may_see(caller, live.session.owner, live.session.tenant)]


def _describe_owner(live: Live) -> str:
    session = live.session
    whose = "the gateway's" if session.owner == REMOTE else f"uid {session.owner}'s"
    return f"{whose} in tenant {session.tenant}"

"""The table of a session's life: what follows what, and that docs/sessions.md shows the same."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.core.model import Phase
from k8e.core.sessions.phases import FOLLOWING, Event, ImpossibleEvent, follow

DOCS = Path(__file__).parents[2] / "docs"
LIVES = st.lists(st.sampled_from(Event))


def live_through(events: list[Event]) -> list[Phase]:
    """The phases of a new session to which these happen, without those that cannot."""
    phases = [Phase.CREATING]
    for event in events:
        if event in FOLLOWING[phases[-1]]:
            phases.append(follow(phases[-1], event))
    return phases


def find_reachable(start: Phase) -> set[Phase]:
    found, new = {start}, [start]
    while new:
        more = set(FOLLOWING[new.pop()].values()) - found
        found |= more
        new += more
    return found


def test_every_phase_can_be_reached() -> None:
    assert find_reachable(Phase.CREATING) == set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_every_session_can_come_to_its_end(phase: Phase) -> None:
    assert Phase.DESTROYED in find_reachable(phase)


@pytest.mark.parametrize("event", Event)
def test_nothing_happens_to_a_destroyed_session(event: Event) -> None:
    with pytest.raises(ImpossibleEvent, match="destroyed"):
        follow(Phase.DESTROYED, event)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.DESTROYED])
def test_every_other_session_can_be_ended(phase: Phase) -> None:
    assert follow(phase, Event.END_BEGUN) is Phase.DESTROYING


@given(LIVES)
def test_nothing_but_its_end_follows_once_it_is_begun(events: list[Event]) -> None:
    phases = live_through(events)
    if Phase.DESTROYING in phases:
        rest = phases[phases.index(Phase.DESTROYING) :]
        assert set(rest) <= {Phase.DESTROYING, Phase.DESTROYED}


@given(LIVES)
def test_each_stretch_of_activity_begins_with_a_build_or_a_start(events: list[Event]) -> None:
    phases = live_through(events)
    for before, phase in itertools.pairwise(phases):
        if phase is Phase.ACTIVE:
            assert before in (Phase.CREATING, Phase.STARTING)
        if phase is Phase.STOPPED:
            assert before is Phase.STOPPING
    assert Phase.CREATING not in phases[1:]


@given(st.sampled_from(Phase), st.sampled_from(Event))
def test_what_is_not_in_the_table_is_refused(phase: Phase, event: Event) -> None:
    if event in FOLLOWING[phase]:
        assert follow(phase, event) is FOLLOWING[phase][event]
    else:
        with pytest.raises(ImpossibleEvent, match=f"^{event.value} happened to a session that is {phase.value}$"):
            follow(phase, event)


def test_the_page_shows_the_same_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|[^|]*\|$", (DOCS / "sessions.md").read_text(), re.MULTILINE)
    shown = {
        Phase(phase): {Event(event): Phase(after) for after, event in re.findall(r"`(\w+)` \(`(\w+)`\)", cell)}
        for phase, cell in rows
    }
    assert shown == FOLLOWING

from __future__ import annotations

from k8e.core.pool.demand import HALF_LIFE, KINDS, MEMORY, Demand, Template
from k8e.engine import Limits, Runtime

USUAL = Template(Runtime.GVISOR)
OTHER = Template(Runtime.NATIVE)


def large(memory: int) -> Template:
    return Template(Runtime.GVISOR, limits=Limits(memory=memory))


def ask(demand: Demand, template: Template, now: float, times: int = 1) -> None:
    for _ in range(times):
        demand.note(template, now, usual=template == USUAL)


def test_without_requests_nothing_is_ready() -> None:
    assert Demand(1, 8).targets(0) == {}


def test_the_first_usual_one_brings_the_minimum() -> None:
    demand = Demand(2, 8)
    ask(demand, USUAL, 0)
    assert demand.targets(0) == {USUAL: 2}


def test_an_unusual_one_has_to_be_asked_for_twice() -> None:
    demand = Demand(1, 8)
    ask(demand, OTHER, 0)
    assert demand.targets(0) == {OTHER: 0}
    ask(demand, OTHER, MEMORY - 1)
    assert demand.targets(MEMORY - 1) == {OTHER: 1}


def test_it_follows_the_rate_and_falls_back() -> None:
    demand = Demand(1, 100)
    ask(demand, USUAL, 0, 40)
    sizes = [demand.targets(HALF_LIFE * number)[USUAL] for number in range(8)]
    assert sizes == [40, 20, 10, 5, 2, 1, 1, 1]
    assert demand.targets(MEMORY - 1) == {USUAL: 1}
    assert demand.targets(MEMORY) == {}


def test_a_steady_rate_has_a_steady_number() -> None:
    demand = Demand(1, 100)
    for second in range(600):
        ask(demand, USUAL, second)
    assert 35 <= demand.targets(600)[USUAL] <= 50


def test_there_are_never_more_than_the_maximum_and_the_last_asked_for_come_first() -> None:
    demand = Demand(1, 10)
    ask(demand, USUAL, 0, 50)
    assert demand.targets(0) == {USUAL: 10}
    ask(demand, OTHER, 0, 4)
    assert list(demand.targets(0).items()) == [(OTHER, 4), (USUAL, 6)]


def test_a_caller_who_invents_kinds_fills_nothing() -> None:
    demand = Demand(1, 8)
    for number in range(1000):
        ask(demand, large(1 << 30 | number), 0)
    assert len(demand._asked) == KINDS
    assert set(demand.targets(0).values()) == {0}


def test_one_that_is_kept_needs_no_request() -> None:
    demand = Demand(3, 8)
    demand.keep(USUAL)
    assert demand.targets(0) == {USUAL: 3}
    assert demand.targets(10 * MEMORY) == {USUAL: 3}
    ask(demand, USUAL, 10 * MEMORY, 5)
    assert demand.targets(10 * MEMORY) == {USUAL: 5}


def test_what_was_reserved_is_wanted_until_it_is_not() -> None:
    demand = Demand(1, 8)
    demand.reserve("claude", USUAL, 2)
    demand.reserve("codex", OTHER, 1)
    demand.reserve("gemini", USUAL, 1)
    assert demand.targets(10 * MEMORY) == {USUAL: 3, OTHER: 1}
    demand.reserve("claude", USUAL, 7)
    assert demand.targets(0) == {OTHER: 1, USUAL: 7}
    demand.reserve("claude", USUAL, 0)
    assert demand.targets(0) == {OTHER: 1, USUAL: 1}


def test_what_was_reserved_comes_before_what_is_guessed() -> None:
    demand = Demand(2, 3)
    ask(demand, USUAL, 0, 5)
    assert demand.targets(0) == {USUAL: 3}
    demand.reserve("claude", OTHER, 2)
    assert demand.targets(0) == {USUAL: 1, OTHER: 2}
    demand.reserve("claude", USUAL, 2)
    assert demand.targets(0) == {USUAL: 3}
    demand.reserve("codex", OTHER, 9)
    assert demand.targets(0) == {USUAL: 2, OTHER: 1}

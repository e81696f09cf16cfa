"""Wires that others named: bound to their rules, they are in the sets in which nft puts wires that we named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from k8e.engine.local.network.addresses import Pool
from k8e.engine.local.network.bindings import bind, unbind
from k8e.engine.local.network.rules import Layout
from k8e.engine.local.network.table import Table
from tests.engine.network.test_table import contents

POOL = Pool()
FOREIGN = Layout(prefix="", agent_port=10539)
SETS = ("wires", *(f"{name}{version}" for name in ("sources", "resolvers", "inner") for version in (4, 6)))
MAPS = ("refusing", "asking", "opening", "answering4", "answering6")


@pytest.fixture
def foreign(machine: None) -> Iterator[Table]:
    table = Table("k8e_foreign", layout=FOREIGN)
    table.replace(POOL.block(0))
    yield table
    table.close()


def told(table: Table) -> list[object]:
    return [*(contents(table, name, "set") for name in SETS), *(contents(table, name, "map") for name in MAPS)]


def test_it_is_whole_before_any_wire_is_there(foreign: Table) -> None:
    assert foreign.is_current()
    assert foreign.is_whole(len(POOL.block(0)))
    assert foreign.wires() == frozenset()


def test_bound_as_nft_would(foreign: Table) -> None:
    empty = told(foreign)
    own = Table("k8e_own")
    own.replace(POOL.block(0))
    for wire in POOL.block(0):
        foreign.commit(bind(foreign.name, wire))
        foreign.commit(bind(foreign.name, wire))  # as after a crash
    assert told(foreign) == told(own)
    own.close()
    for wire in POOL.block(0):
        foreign.commit(unbind(foreign.name, wire))
        foreign.commit(unbind(foreign.name, wire))
    assert told(foreign) == empty

"""The rules of the lease: who may take it, and when."""

from __future__ import annotations

import msgspec
from lightkube.resources.coordination_v1 import Lease

from k8e.replicas.lease import LIFE, PATIENCE, RENEWAL, Candidate, Sight, lease_name, make_lease

HELD = Sight(holder="a", term=3, address="10.0.0.1:50052", version="7", uid="u")


def test_a_holder_gives_up_before_a_candidate_takes_over() -> None:
    assert RENEWAL < PATIENCE < LIFE


def test_a_lease_that_is_not_there_or_free_may_be_taken() -> None:
    candidate = Candidate("b")
    assert candidate.wait(None, 100.0) == 0
    assert candidate.wait(Sight("", 3, "", "8", "u"), 100.0) == 0


def test_a_lease_that_is_held_is_taken_when_it_did_not_change_for_its_life() -> None:
    candidate = Candidate("b")
    assert candidate.wait(HELD, 100.0) == LIFE
    assert candidate.wait(HELD, 100.0 + LIFE - 1) == 1
    assert candidate.wait(HELD, 100.0 + LIFE) == 0


def test_each_change_begins_a_new_life() -> None:
    candidate = Candidate("b")
    candidate.wait(HELD, 100.0)
    renewed = Sight("a", 3, HELD.address, "8", "u")
    assert candidate.wait(renewed, 100.0 + LIFE) == LIFE


def test_one_that_this_replica_has_without_knowing_is_taken_again() -> None:
    assert Candidate("a").wait(HELD, 100.0) == 0


def test_a_lease_is_written_as_it_is_read() -> None:
    for now in (1_700_000_000.0, 1_700_000_000.25):
        lease = make_lease("gw", "a", HELD, term=4, address="10.0.0.1:50052", now=now)
        content = msgspec.json.encode(lease)
        time = msgspec.json.decode(content)["spec"]["renewTime"]
        assert len(time.partition(".")[2].rstrip("Z")) == 6, time  # else the API server refuses it
        assert Sight.read(msgspec.json.decode(content, type=Lease)) == Sight("a", 4, "10.0.0.1:50052", "7", "u")
        assert lease.metadata is not None
        assert lease.metadata.name == lease_name("gw")

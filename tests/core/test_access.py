"""Who sees what, and who may do what."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from k8e.core.access.access import (
    Payer,
    choose_tenant,
    find_payer,
    find_scope,
    local_caller,
    may_see,
    require_scope,
    sees_all,
)
from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Caller, Scope

ROOT, USER, BOUND = Caller(0), Caller(1000), Caller(1000, "red")
RUN = Caller(REMOTE, "red", name="a")
OPERATOR = Caller(REMOTE, "red", ("blue",), Scope.OPERATOR, "b")
ADMIN = Caller(REMOTE, "red", scope=Scope.ADMIN, name="c")

MINE, OTHERS = (1000, "red"), (1001, "red")
RED, BLUE, GREEN = (REMOTE, "red"), (REMOTE, "blue"), (REMOTE, "green")
PARTS = ONE, TWO = (REMOTE, "red/one"), (REMOTE, "red/two")


@pytest.mark.parametrize(
    ("caller", "seen"),
    [
        (ROOT, {MINE, (1000, "web"), OTHERS, RED, BLUE, GREEN}),
        (ADMIN, {MINE, (1000, "web"), OTHERS, RED, BLUE, GREEN}),
        (USER, {MINE, (1000, "web")}),
        (BOUND, {MINE}),
        (RUN, {RED}),
        (OPERATOR, {RED, BLUE}),
        (Caller(0, "red", confined=True), set()),
        (Caller(1000, "red", confined=True), {MINE}),
        (Caller(REMOTE, "red", ("blue",), Scope.ADMIN, "c", confined=True), {RED, BLUE}),
    ],
)
def test_what_a_caller_sees(caller: Caller, seen: set[tuple[int, str]]) -> None:
    everything = {MINE, (1000, "web"), OTHERS, RED, BLUE, GREEN}
    assert {one for one in everything if may_see(caller, *one)} == seen


@pytest.mark.parametrize(
    ("caller", "seen"),
    [
        (RUN, {ONE, TWO}),
        (ADMIN, {ONE, TWO}),
        (Caller(REMOTE, "re"), set()),
        (Caller(REMOTE, "blue"), set()),
        (Caller(REMOTE, "blue", ("red",), Scope.OPERATOR), {ONE, TWO}),
        (Caller(1000, "red"), set()),
        (Caller(REMOTE, "red/one", confined=True), {ONE}),
        (Caller(REMOTE, "red", confined=True), set()),
    ],
)
def test_a_tenant_sees_its_parts_and_a_part_nothing_but_itself(caller: Caller, seen: set[tuple[int, str]]) -> None:
    assert {one for one in PARTS if may_see(caller, *one)} == seen


def test_a_tenant_pays_for_its_parts() -> None:
    assert find_payer(*ONE) == find_payer(*TWO) == find_payer(*RED) == Payer(REMOTE, "red")


@pytest.mark.parametrize(
    ("caller", "wanted", "tenant"),
    [
        (USER, "", "default"),
        (USER, "any", "any"),
        (RUN, "", "red"),
        (RUN, "red", "red"),
        (RUN, "blue", None),
        (OPERATOR, "", "red"),
        (OPERATOR, "blue", "blue"),
        (OPERATOR, "green", None),
        (ADMIN, "green", "green"),
    ],
)
def test_whose_a_new_session_is(caller: Caller, wanted: str, tenant: str | None) -> None:
    if tenant is not None:
        assert choose_tenant(caller, wanted) == tenant
        return
    with pytest.raises(Fault) as refused:
        choose_tenant(caller, wanted)
    assert (refused.value.kind, refused.value.code) == (Kind.DENIED, "wrong_tenant")


def test_each_scope_includes_the_ones_before_it() -> None:
    order = [Scope.RUN, Scope.OPERATOR, Scope.ADMIN]
    for caller, held in ((USER, 0), (RUN, 0), (OPERATOR, 1), (ADMIN, 2), (ROOT, 2)):
        assert find_scope(caller) is order[held]
        for needed, scope in enumerate(order):
            if needed <= held:
                require_scope(caller, scope)
                continue
            with pytest.raises(Fault) as refused:
                require_scope(caller, scope)
            assert (refused.value.kind, refused.value.code) == (Kind.DENIED, "scope_missing")


def test_who_pays() -> None:
    assert find_payer(1000, "red") == find_payer(1000, "blue") == Payer(1000, "")
    assert find_payer(REMOTE, "red") == Payer(REMOTE, "red") != find_payer(REMOTE, "blue")


def test_the_daemons_own_user_is_its_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    own, other = local_caller(10001), local_caller(10002)
    assert (find_scope(own), find_scope(other)) == (Scope.ADMIN, Scope.RUN)
    assert sees_all(own)
    assert not sees_all(replace(own, confined=True))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert local_caller(0) == Caller(0)
    assert find_scope(local_caller(10001)) is Scope.RUN

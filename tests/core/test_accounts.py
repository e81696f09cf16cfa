"""Service accounts: which tokens are good, who their callers are, how long the cluster's answer is believed. It is a
table here; tests/kubernetes/replicas/test_tokens.py has a real one."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from k8e.core.access import accounts
from k8e.core.access.accounts import Accounts, Verdict, read_claims, review_unavailable
from k8e.core.errors import Kind
from k8e.core.model import REMOTE, Scope
from k8e.settings import SettingsError, read_file
from k8e.settings.accounts import ACCOUNTS, AccountRule, find_rule
from tests.core.rig import fault

RULES = ACCOUNTS.read(
    [
        {"account": "ci/*", "tenants": ["ci"]},
        {"account": "ci/boss", "tenants": ["ci", "other"], "scope": "operator"},
    ]
)


class StoppedClock:
    boot = "x"

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class Table:
    """Implements TokenReviews."""

    audience = "k8e"

    def __init__(self, **verdicts: Verdict) -> None:
        self.verdicts = verdicts
        self.asked: list[str] = []
        self.away = False
        self.open = asyncio.Event()
        self.open.set()

    async def review(self, token: str) -> Verdict:
        self.asked.append(token)
        await self.open.wait()
        if self.away:
            raise review_unavailable("connection refused")
        return self.verdicts.get(token.rpartition(".")[2], Verdict(cause="invalid bearer token"))

    async def close(self) -> None:
        pass


def token(signature: str, **claims: Any) -> str:
    payload = {"aud": ["k8e"], "exp": 4000, **claims}
    return ".".join(
        (
            *(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({}, payload)),
            signature,
        )
    )


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


def make(table: Table, clock: StoppedClock, rules: tuple[AccountRule, ...] = RULES) -> Accounts:
    return Accounts(rules, table, clock)


class TestWho:
    async def test_an_account_has_the_tenant_and_scope_of_its_rule(self, clock: StoppedClock) -> None:
        table = Table(boss=Verdict("ci", "boss"), builder=Verdict("ci", "builder"))
        found = make(table, clock)
        builder = await found.admit(token("builder"))
        assert (builder.caller.uid, builder.caller.tenant, builder.caller.scope) == (REMOTE, "ci", Scope.RUN)
        assert (builder.identity, builder.expires) == ("k8e:account:ci:builder", 4000)
        assert (builder.caller.name, builder.caller.label) == ("account:ci/builder", "account:ci/builder")
        boss = await found.admit(token("boss"))
        assert (boss.caller.tenant, boss.caller.tenants, boss.caller.scope) == ("ci", ("other",), Scope.OPERATOR)

    async def test_one_that_no_rule_names_is_refused(self, clock: StoppedClock) -> None:
        table = Table(x=Verdict("cd", "builder"))
        with fault(Kind.UNAUTHENTICATED, "account_not_mapped"):
            await make(table, clock).admit(token("x"))

    async def test_without_rules_nothing_is_asked(self, clock: StoppedClock) -> None:
        table = Table(x=Verdict("ci", "builder"))
        with fault(Kind.UNAUTHENTICATED, "account_not_mapped"):
            await make(table, clock, ()).admit(token("x"))
        assert table.asked == []

    async def test_what_the_cluster_refuses_is_refused(self, clock: StoppedClock) -> None:
        with fault(Kind.UNAUTHENTICATED, "token_refused"):
            await make(Table(), clock).admit(token("forged"))

    @pytest.mark.parametrize(
        ("text", "code"),
        [
            (token("x", aud=["kubernetes"]), "token_refused"),
            (token("x", aud="other"), "token_refused"),
            (token("x", aud=None), "token_refused"),
            (token("x", exp=None), "token_refused"),
            (token("x", exp=True), "token_refused"),
            (token("x", exp=1000), "token_expired"),
            ("", "token_refused"),
            ("a.b", "token_refused"),
            ("a.b.c", "token_refused"),
            ("é.é.é", "token_refused"),
            (f".{base64.urlsafe_b64encode(b'[]').decode()}.", "token_refused"),
            ("." + "A" * 9000 + ".", "token_refused"),
        ],
    )
    async def test_what_is_plainly_no_good_is_not_asked_about(self, clock: StoppedClock, text: str, code: str) -> None:
        table = Table(x=Verdict("ci", "builder"))
        with fault(Kind.UNAUTHENTICATED, code):
            await make(table, clock).admit(text)
        assert table.asked == []

    def test_one_audience_may_be_plain_text(self) -> None:
        assert read_claims(token("x", aud="k8e")).audiences == ("k8e",)


class TestMemory:
    async def test_an_answer_is_believed_for_a_moment_and_never_longer_than_the_token_lives(
        self, clock: StoppedClock
    ) -> None:
        table = Table(x=Verdict("ci", "builder"))
        found = make(table, clock)
        for _ in range(3):
            await found.admit(token("x"))
        assert len(table.asked) == 1
        clock.now += accounts.LIFE
        del table.verdicts["x"]  # the account was deleted
        with fault(Kind.UNAUTHENTICATED, "token_refused"):
            await found.admit(token("x"))
        table.verdicts["y"] = Verdict("ci", "builder")
        short = token("y", exp=clock.now + 1)
        await found.admit(short)
        clock.now += 1
        with fault(Kind.UNAUTHENTICATED, "token_expired"):
            await found.admit(short)

    async def test_a_refusal_is_believed_for_less(self, clock: StoppedClock) -> None:
        table = Table()
        found = make(table, clock)
        for _ in range(2):
            with fault(Kind.UNAUTHENTICATED, "token_refused"):
                await found.admit(token("x"))
        assert len(table.asked) == 1
        table.verdicts["x"] = Verdict("ci", "builder")
        clock.now += accounts.REFUSED_LIFE
        await found.admit(token("x"))

    async def test_a_cluster_that_is_away_refuses_and_is_asked_again(self, clock: StoppedClock) -> None:
        table = Table(x=Verdict("ci", "builder"))
        found = make(table, clock)
        table.away = True
        with fault(Kind.UNAVAILABLE, "review_unavailable"):
            await found.admit(token("x"))
        table.away = False
        await found.admit(token("x"))
        table.away = True
        await found.admit(token("x"))  # remembered
        clock.now += accounts.LIFE
        with fault(Kind.UNAVAILABLE, "review_unavailable"):
            await found.admit(token("x"))

    async def test_it_is_bounded_and_refused_tokens_push_out_no_good_one(self, clock: StoppedClock) -> None:
        table = Table(x=Verdict("ci", "builder"))
        found = make(table, clock)
        await found.admit(token("x"))
        for number in range(accounts.REFUSED + 10):
            with fault(Kind.UNAUTHENTICATED, "token_refused"):
                await found.admit(token(f"bad{number}"))
        before = len(table.asked)
        await found.admit(token("x"))
        assert len(table.asked) == before
        assert len(found._refused._verdicts) == accounts.REFUSED

    async def test_callers_with_one_token_ask_once_and_one_that_leaves_takes_no_answer_away(
        self, clock: StoppedClock
    ) -> None:
        table = Table(x=Verdict("ci", "builder"))
        table.open.clear()
        found = make(table, clock)
        calls = [asyncio.create_task(found.admit(token("x"))) for _ in range(5)]
        while not table.asked:
            await asyncio.sleep(0)
        calls[0].cancel()
        table.open.set()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert [each.identity for each in done[1:] if not isinstance(each, BaseException)] == [
            "k8e:account:ci:builder"
        ] * 4
        assert len(table.asked) == 1

    async def test_many_unknown_tokens_of_one_source_leave_room_for_others(self, clock: StoppedClock) -> None:
        table = Table(x=Verdict("ci", "builder"))
        table.open.clear()
        found = make(table, clock)
        flood = [
            asyncio.create_task(found.admit(token(f"f{each}"), "10.0.0.1")) for each in range(accounts.WAITING_EACH + 5)
        ]
        good = asyncio.create_task(found.admit(token("x"), "10.0.0.2"))
        while token("x") not in table.asked:
            await asyncio.sleep(0)
        assert len(table.asked) == accounts.REVIEWS_EACH + 1
        table.open.set()
        assert (await good).identity == "k8e:account:ci:builder"
        codes = [getattr(each, "code", "") for each in await asyncio.gather(*flood, return_exceptions=True)]
        assert (codes.count("too_many_calls"), codes.count("token_refused")) == (5, accounts.WAITING_EACH)
        assert not found._waiting
        assert not found._asking

    async def test_closing_ends_what_is_asked(self, clock: StoppedClock) -> None:
        table = Table()
        table.open.clear()
        found = make(table, clock)
        call = asyncio.create_task(found.admit(token("x")))
        while not table.asked:
            await asyncio.sleep(0)
        await found.close()
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], asyncio.CancelledError)


class TestSettings:
    def test_the_rule_with_the_name_comes_first(self) -> None:
        found = [find_rule(RULES, *pair) for pair in (("ci", "boss"), ("ci", "x"), ("cd", "boss"))]
        assert [rule and rule.name for rule in found] == ["boss", "*", None]

    def test_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "k8e.toml"
        file.write_text('[kubernetes]\n[[kubernetes.accounts]]\naccount = "a/b"\ntenants = ["t"]\n')
        assert read_file(file).kubernetes.accounts == (AccountRule("a", "b", ("t",), "run"),)

    @pytest.mark.parametrize(
        ("rules", "words"),
        [
            ('"a/b"', "is not a list"),
            ('["a/b"]', "is not a table"),
            ('[{account = "a/b"}]', "no list of tenants"),
            ('[{account = "a/b", tenants = []}]', "no list of tenants"),
            ('[{account = "a/b", tenants = ["x/y"]}]', "no list of tenants"),
            ('[{account = "a/b", tenants = ["x", "y"]}]', "too many tenants"),
            ('[{account = "a/b", tenants = ["x", "x"], scope = "operator"}]', "too many tenants"),
            ('[{account = "a/b", tenants = ["x"], scope = "root"}]', "none of the allowed words"),
            ('[{account = "a/b", tenants = ["x"], role = "run"}]', "unknown key role"),
            ('[{account = "b", tenants = ["x"]}]', "no account"),
            ('[{account = "*/*", tenants = ["x"]}]', "no account"),
            ('[{account = "*/b", tenants = ["x"]}]', "no account"),
            ('[{account = "a/b*", tenants = ["x"]}]', "no account"),
            ('[{account = "a/b:c", tenants = ["x"]}]', "no account"),
            ('[{account = "a/b", tenants = ["x"]}, {account = "a/b", tenants = ["y"]}]', "two entries for a/b"),
        ],
    )
    def test_what_is_not_understood_is_an_error(self, tmp_path: Path, rules: str, words: str) -> None:
        file = tmp_path / "k8e.toml"
        file.write_text(f"[kubernetes]\naccounts = {rules}\n")
        with pytest.raises(SettingsError) as caught:
            read_file(file)
        assert (caught.value.code, caught.value.key) == ("settings_invalid", "kubernetes.accounts")
        assert words in caught.value.error

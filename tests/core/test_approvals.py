"""Questions to people: who may answer, once, until when, and what a new daemon knows of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.core.access.lineage import Lineage, Process, read_lineage
from k8e.core.approvals.approvals import MAX_PENDING, check_answerer
from k8e.core.checks import MAX_WORDS, check_words
from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Approval, ApprovalStatus, Caller, Scope, SessionSpec
from k8e.core.store.records import ApprovalRecord
from k8e.settings import ApprovalsSettings, AuditSettings, Settings
from tests.core.rig import ALICE, BOB, ROOT, ManualClock, Rig, fault, open_rig

ACTION = "delete /workspace/production-data"
AGENT_KEY = Caller(REMOTE, "acme", name="agent")
BOSS_KEY = Caller(REMOTE, "acme", scope=Scope.OPERATOR, name="boss")
OTHER_BOSS = Caller(REMOTE, "rival", scope=Scope.OPERATOR, name="other")
ADMIN_KEY = Caller(REMOTE, "default", scope=Scope.ADMIN, name="admin")


async def ask(rig: Rig, caller: Caller = ALICE, seconds: float | None = 30) -> Approval:
    session = await rig.create(caller)
    return await rig.service.approvals.ask(caller, session, ACTION, seconds=seconds)


async def begin_to_wait(rig: Rig, approval: Approval, caller: Caller = ALICE) -> asyncio.Task[Approval]:
    task = asyncio.create_task(rig.service.approvals.wait(caller, approval.approval_id, 3600))
    live = rig.service._registry.get(rig.sandbox_of(approval.session_id))
    assert live is not None
    while not live.use.count:
        await asyncio.sleep(0)
    return task


class TestAnswering:
    async def test_a_caller_that_waits_hears_it(self, rig: Rig) -> None:
        asked = await ask(rig)
        assert (asked.status, asked.approved, asked.action) == (ApprovalStatus.PENDING, False, ACTION)
        waiting = await begin_to_wait(rig, asked)
        answered = await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True, reason="it is a copy")
        assert answered == await waiting == await rig.service.approvals.get(ALICE, asked.approval_id)
        assert (answered.approved, answered.answerer, answered.reason) == (True, "uid:0", "it is a copy")
        assert await rig.service.approvals.list(ALICE) == []
        assert await rig.service.approvals.list(ALICE, all_states=True) == [answered]

    async def test_no_is_an_answer(self, rig: Rig) -> None:
        asked = await ask(rig)
        waiting = await begin_to_wait(rig, asked)
        await rig.service.approvals.answer(ROOT, asked.approval_id, approved=False)
        assert (await waiting).status is ApprovalStatus.REJECTED
        assert not (await waiting).approved

    async def test_only_the_first_counts(self, rig: Rig) -> None:
        asked = await ask(rig)
        await rig.service.approvals.answer(ROOT, asked.approval_id, approved=False)
        with fault(Kind.CONFLICT, "approval_settled"):
            await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)
        assert (await rig.service.approvals.get(ALICE, asked.approval_id)).status is ApprovalStatus.REJECTED

    async def test_of_many_at_once_exactly_one(self, rig: Rig) -> None:
        asked = await ask(rig)
        answers = [
            rig.service.approvals.answer(ROOT, asked.approval_id, approved=number % 2 == 0) for number in range(20)
        ]
        results = await asyncio.gather(*answers, return_exceptions=True)
        (winner,) = [result for result in results if isinstance(result, Approval)]
        losers = [result for result in results if isinstance(result, Fault)]
        assert {fault.code for fault in losers} == {"approval_settled"}
        assert len(losers) == 19
        assert winner == await rig.service.approvals.get(ALICE, asked.approval_id)

    async def test_who_leaves_while_they_answer_has_answered(self, rig: Rig) -> None:
        asked = await ask(rig)
        waiting = await begin_to_wait(rig, asked)
        answering = asyncio.create_task(rig.service.approvals.answer(ROOT, asked.approval_id, approved=True))
        while not rig.service.approvals._answering.locked():
            await asyncio.sleep(0)
        answering.cancel()
        assert (await waiting).approved

    async def test_waiting_again_costs_nothing(self, rig: Rig) -> None:
        asked = await ask(rig)
        await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)
        assert (await rig.service.approvals.wait(ALICE, asked.approval_id, 3600)).approved
        assert rig.service.approvals._watchers == {}


class TestEnds:
    async def test_time(self, rig: Rig, clock: ManualClock) -> None:
        asked = await ask(rig, seconds=30)
        assert asked.expires == asked.asked + 30
        waiting = await begin_to_wait(rig, asked)
        clock.wall_now -= 1e6  # which is no reason
        clock.advance(29)
        await rig.service.look_after()
        assert not waiting.done()
        clock.advance(1)
        await rig.service.look_after()
        assert (await waiting).status is ApprovalStatus.EXPIRED
        with fault(Kind.CONFLICT, "approval_settled"):
            await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)

    async def test_that_needs_no_upkeep(self, rig: Rig, clock: ManualClock) -> None:
        asked = await ask(rig, seconds=30)
        clock.advance(30)
        with fault(Kind.CONFLICT, "approval_settled"):
            await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)
        assert await rig.service.approvals.list(ALICE) == []
        (listed,) = await rig.service.approvals.list(ALICE, all_states=True)
        assert listed.status is ApprovalStatus.EXPIRED

    async def test_really(self, folder: Path) -> None:
        async with open_rig(folder) as rig:
            asked = await ask(rig, seconds=0.05)
            assert (await rig.service.approvals.wait(ALICE, asked.approval_id, 60)).status is ApprovalStatus.EXPIRED

    async def test_the_session(self, rig: Rig, clock: ManualClock) -> None:
        asked = await ask(rig)
        waiting = await begin_to_wait(rig, asked)
        await rig.service.sessions.destroy(ALICE, asked.session_id)
        assert (await waiting).status is ApprovalStatus.WITHDRAWN
        with fault(Kind.CONFLICT, "approval_settled"):
            await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)
        clock.advance(3600)
        assert (await rig.service.approvals.get(ALICE, asked.approval_id)).status is ApprovalStatus.WITHDRAWN
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await rig.service.approvals.ask(ALICE, asked.session_id, ACTION)

    async def test_the_waiter(self, rig: Rig) -> None:
        asked = await ask(rig)
        waiting = await begin_to_wait(rig, asked)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert rig.service.approvals._watchers == {}
        assert (await rig.service.approvals.get(ALICE, asked.approval_id)).status is ApprovalStatus.PENDING

    async def test_a_session_that_waits_for_a_person_is_in_use(self, rig: Rig, clock: ManualClock) -> None:
        session = await rig.create(ALICE, SessionSpec(ttl=10))
        asked = await rig.service.approvals.ask(ALICE, session, ACTION, seconds=3600)
        waiting = await begin_to_wait(rig, asked)
        clock.advance(100)
        assert await rig.service.expire() == []
        await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)
        assert (await waiting).approved
        clock.advance(10)
        assert await rig.service.expire() == [session]


class TestDaemons:
    async def test_the_next_one_goes_on_with_it(self, folder: Path) -> None:
        async with open_rig(folder) as rig:
            asked = await ask(rig, seconds=3600)
            waiting = await begin_to_wait(rig, asked)
            await rig.service.close()
            assert await waiting == asked, "told how it stands"
        async with open_rig(folder) as rig:
            assert await rig.service.approvals.list(ALICE) == [asked]
            waiting = await begin_to_wait(rig, asked)
            await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)
            assert (await waiting).approved
        async with open_rig(folder) as rig:
            assert (await rig.service.approvals.get(ALICE, asked.approval_id)).approved

    async def test_time_goes_on_without_one(self, folder: Path, clock: ManualClock) -> None:
        async with open_rig(folder, clock) as rig:
            asked = await ask(rig, seconds=30)
        clock.advance(30)
        clock.wall_now -= 1e6
        async with open_rig(folder, clock) as rig:
            assert (await rig.service.approvals.get(ALICE, asked.approval_id)).status is ApprovalStatus.EXPIRED

    async def test_nothing_is_answered_after_a_restart_of_the_machine(self, folder: Path, clock: ManualClock) -> None:
        async with open_rig(folder, clock) as rig:
            asked = await ask(rig)
        async with open_rig(folder, ManualClock("the next boot")) as rig:
            with fault(Kind.CONFLICT, "approval_settled"):
                await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)


class TestStrangers:
    @pytest.mark.parametrize("stranger", [BOB, BOSS_KEY, OTHER_BOSS])
    async def test_another_callers_is_not_there(self, rig: Rig, stranger: Caller) -> None:
        asked = await ask(rig)
        for call in (
            rig.service.approvals.get(stranger, asked.approval_id),
            rig.service.approvals.wait(stranger, asked.approval_id, 60),
            rig.service.approvals.answer(stranger, asked.approval_id, approved=True),
            rig.service.approvals.answer(stranger, "appr-0000000000000000", approved=True),
        ):
            with fault(Kind.NOT_FOUND, "approval_not_found"):
                await call
        assert await rig.service.approvals.list(stranger, all_states=True) == []
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await rig.service.approvals.ask(stranger, asked.session_id, ACTION)
        assert (await rig.service.approvals.get(ALICE, asked.approval_id)).status is ApprovalStatus.PENDING

    async def test_keys(self, rig: Rig) -> None:
        asked = await ask(rig, AGENT_KEY)
        with fault(Kind.DENIED, "scope_missing"):
            await rig.service.approvals.answer(AGENT_KEY, asked.approval_id, approved=True)
        with fault(Kind.DENIED, "scope_missing"):
            await rig.service.approvals.answer(replace(AGENT_KEY, name="colleague"), asked.approval_id, approved=True)
        with fault(Kind.DENIED, "self_approval"):
            await rig.service.approvals.answer(replace(BOSS_KEY, name="agent"), asked.approval_id, approved=True)
        with fault(Kind.NOT_FOUND, "approval_not_found"):
            await rig.service.approvals.answer(OTHER_BOSS, asked.approval_id, approved=True)
        for refused in (True, False):
            with fault(Kind.DENIED, "scope_missing"):
                await rig.service.approvals.answer(
                    replace(AGENT_KEY, dialogue=True), asked.approval_id, approved=refused
                )
        assert (await rig.service.approvals.answer(BOSS_KEY, asked.approval_id, approved=True)).answerer == "key:boss"

    @pytest.mark.parametrize("asker", [BOSS_KEY, ADMIN_KEY])
    async def test_an_operator_who_asks_needs_another(self, rig: Rig, asker: Caller) -> None:
        asked = await ask(rig, asker)
        for dialogue in (False, True):
            with fault(Kind.DENIED, "self_approval"):
                await rig.service.approvals.answer(replace(asker, dialogue=dialogue), asked.approval_id, approved=True)
        assert (await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)).approved

    async def test_an_admins_key_may_answer_a_user(self, rig: Rig) -> None:
        asked = await ask(rig)
        assert (await rig.service.approvals.answer(ADMIN_KEY, asked.approval_id, approved=True)).approved


@contextmanager
def process(*, terminal: bool) -> Iterator[int]:
    """A user in a session of their own, as a program that shows terminals starts them."""
    master, slave = os.openpty()
    command = ["setsid", *(["--ctty"] if terminal else []), "sleep", "600"]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave) as started:
        os.close(slave)
        while (lineage := read_lineage(started.pid))[0].session != started.pid or bool(lineage[0].terminal) != terminal:
            time.sleep(0.01)
        try:
            yield started.pid
        finally:
            started.kill()
            os.close(master)


SAME_USER = Settings(approvals=ApprovalsSettings(same_user=True))


class TestOneUser:
    """Alone on a machine that allows it: what asks and what answers have the same uid."""

    @pytest.fixture
    async def rig(self, folder: Path, clock: ManualClock) -> AsyncIterator[Rig]:
        async with open_rig(folder, clock, settings=SAME_USER) as rig:
            yield rig

    async def test_at_another_terminal(self, rig: Rig) -> None:
        with process(terminal=True) as agent, process(terminal=True) as person:
            asked = await ask(rig, replace(ALICE, pid=agent))
            answered = await rig.service.approvals.answer(replace(ALICE, pid=person), asked.approval_id, approved=True)
            assert answered.answerer == "uid:1000"

    async def test_not_at_the_same(self, rig: Rig) -> None:
        with process(terminal=True) as agent:
            asked = await ask(rig, replace(ALICE, pid=agent))
            with fault(Kind.DENIED, "self_approval"):
                await rig.service.approvals.answer(replace(ALICE, pid=agent), asked.approval_id, approved=True)

    async def test_not_without_a_terminal(self, rig: Rig) -> None:
        with process(terminal=True) as agent, process(terminal=False) as other:
            asked = await ask(rig, replace(ALICE, pid=agent))
            with fault(Kind.DENIED, "terminal_needed"):
                await rig.service.approvals.answer(replace(ALICE, pid=other), asked.approval_id, approved=True)

    async def test_not_from_below_what_asked(self, rig: Rig) -> None:
        """As root, too: who can use sudo without a password is not another person for it."""
        with process(terminal=True) as child:
            for asker, answerer in ((ALICE, ALICE), (ALICE, ROOT), (ROOT, ROOT)):
                asked = await ask(rig, replace(asker, pid=os.getpid()))
                with fault(Kind.DENIED, "self_approval"):
                    await rig.service.approvals.answer(replace(answerer, pid=child), asked.approval_id, approved=True)

    async def test_not_where_nothing_is_known(self, rig: Rig) -> None:
        with process(terminal=True) as person:
            asked = await ask(rig, ALICE)
            with fault(Kind.DENIED, "process_unknown"):
                await rig.service.approvals.answer(replace(ALICE, pid=person), asked.approval_id, approved=True)
            asked = await rig.service.approvals.ask(replace(ALICE, pid=person), asked.session_id, ACTION)
            with fault(Kind.DENIED, "process_unknown"):
                await rig.service.approvals.answer(ALICE, asked.approval_id, approved=True)

    async def test_what_a_person_clicked(self, rig: Rig) -> None:
        asked = await ask(rig, ALICE)
        answered = await rig.service.approvals.answer(replace(ALICE, dialogue=True), asked.approval_id, approved=True)
        assert answered.approved

    async def test_not_unless_the_settings_say_so(self, folder: Path) -> None:
        async with open_rig(folder, settings=Settings()) as rig:
            with process(terminal=True) as agent, process(terminal=True) as person:
                asked = await ask(rig, replace(ALICE, pid=agent))
                for answerer in (replace(ALICE, pid=person), replace(ALICE, dialogue=True)):
                    with fault(Kind.DENIED, "same_user"):
                        await rig.service.approvals.answer(answerer, asked.approval_id, approved=True)
                assert (await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)).approved
                asked = await ask(rig, replace(ROOT, pid=agent))
                for answerer in (replace(ROOT, pid=person), replace(ROOT, dialogue=True), ROOT):
                    with fault(Kind.DENIED, "same_user"):
                        await rig.service.approvals.answer(answerer, asked.approval_id, approved=True)
                assert (await rig.service.approvals.answer(ADMIN_KEY, asked.approval_id, approved=True)).approved


class TestWords:
    @pytest.mark.parametrize(
        ("given", "shown"),
        [
            ("delete it", "delete it"),
            ("  delete it\n", "delete it"),
            ("löschen 删除 🗑", "löschen 删除 🗑"),
            ("rm a\nrm b\tc\r", "rm a\\nrm b\\tc"),
            ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
            ("\x9b2J\x7f\x00", "\\x9b2J\\x7f\\x00"),
            ("\u202eevil\u2066\u200b\u2028\ufeff", "\\u202eevil\\u2066\\u200b\\u2028\\ufeff"),
            ("\udcff", "\\udcff"),
            ("\U000e0041", "\\U000e0041"),
        ],
    )
    def test_nothing_that_a_terminal_acts_on_is_left(self, given: str, shown: str) -> None:
        assert check_words("action", given, empty=False) == shown
        assert shown.isprintable()

    async def test_limits(self, rig: Rig) -> None:
        session = await rig.create()
        for action in ("", " \n", "x" * (MAX_WORDS + 1), None):
            with fault(Kind.INVALID, "invalid_argument", "action"):
                await rig.service.approvals.ask(ALICE, session, action)  # type: ignore[arg-type]
        for seconds in (0, -1, float("nan"), 1e9):
            with fault(Kind.INVALID, "invalid_argument", "timeout"):
                await rig.service.approvals.ask(ALICE, session, ACTION, seconds=seconds)
        with fault(Kind.INVALID, "invalid_argument", "approval_id"):
            await rig.service.approvals.answer(ROOT, "../x", approved=True)
        asked = await rig.service.approvals.ask(ALICE, session, "x" * MAX_WORDS)
        with fault(Kind.INVALID, "invalid_argument", "reason"):
            await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True, reason="x" * (MAX_WORDS + 1))
        for seconds in (-1, float("nan"), 1e9):
            with fault(Kind.INVALID, "invalid_argument", "wait"):
                await rig.service.approvals.wait(ALICE, asked.approval_id, seconds)

    async def test_a_session_has_so_many_questions_at_once(self, rig: Rig) -> None:
        session = await rig.create()
        calls = (rig.service.approvals.ask(ALICE, session, f"{number}") for number in range(MAX_PENDING + 10))
        results = await asyncio.gather(*calls, return_exceptions=True)
        asked = [result for result in results if isinstance(result, Approval)]
        assert len(asked) == MAX_PENDING
        with fault(Kind.EXHAUSTED, "too_many_approvals"):
            await rig.service.approvals.ask(ALICE, session, ACTION)
        await rig.service.approvals.answer(ROOT, asked[0].approval_id, approved=False)
        await rig.service.approvals.ask(ALICE, session, ACTION)


class TestAudit:
    async def test_everything_is_in_the_log(self, folder: Path) -> None:
        async with open_rig(folder) as rig:
            asked = await ask(rig, AGENT_KEY)
            with fault(Kind.DENIED, "self_approval"):
                await rig.service.approvals.answer(replace(BOSS_KEY, name="agent"), asked.approval_id, approved=True)
            await rig.service.approvals.answer(BOSS_KEY, asked.approval_id, approved=True, reason="why\x1bnot")
            lapsing = await rig.service.approvals.ask(AGENT_KEY, asked.session_id, ACTION, seconds=0.01)
            await rig.service.approvals.wait(AGENT_KEY, lapsing.approval_id, 60)
        lines = rig.read_audit()
        (refused,) = [line for line in lines if line["event"] == "access_refused"]
        assert (refused["subject"], refused["code"]) == (asked.approval_id, "self_approval")
        told = [line for line in lines if line["event"].startswith("approval_")]
        assert [line["event"] for line in told] == [
            "approval_asked",
            "approval_answering",
            "approval_answered",
            "approval_asked",
            "approval_lapsed",
        ]
        assert {line["action"] for line in told} == {ACTION}
        answered = told[2]
        assert (answered["approval"], answered["session"]) == (asked.approval_id, asked.session_id)
        assert (answered["caller"], answered["asker"], answered["verdict"]) == ("key:boss", "key:agent", "approved")
        assert answered["reason"] == "why\\x1bnot"
        assert told[-1]["verdict"] == "expired"

    async def test_no_answer_without_a_line_where_that_is_required(self, folder: Path) -> None:
        async with open_rig(folder, settings=Settings(audit=AuditSettings(required=True))) as rig:
            asked = await ask(rig)
            file = rig.service.audit._file
            assert file is not None
            file.close()
            file._path = folder / "nowhere" / "audit.log"
            with fault(Kind.UNAVAILABLE, "audit_unavailable"):
                await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)
            with fault(Kind.UNAVAILABLE, "audit_unavailable"):
                await rig.service.approvals.ask(ALICE, asked.session_id, ACTION)
            file._path = folder / "audit.log"
            assert await rig.service.approvals.list(ALICE) == [asked]
            assert (await rig.service.approvals.answer(ROOT, asked.approval_id, approved=True)).approved


RECORD = ApprovalRecord("a", "s", "sid", "default", 1000, ACTION, "uid:1000", (), 0, 0, "boot", 0)
TERMINAL: Lineage = (Process(5, 1, 5, 34816, manager=False), Process(1, 1, 1, 0, manager=True))


def test_a_dialogue_is_worth_something_only_to_the_same_user() -> None:
    check_answerer(RECORD, Caller(1000, dialogue=True), (), same_user=True)
    with fault(Kind.DENIED, "self_approval"):
        check_answerer(replace(RECORD, lineage=TERMINAL), Caller(0, dialogue=True), TERMINAL, same_user=True)

"""Refusals: told to every run that was under way, once each, with what to ask for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from k8e.core.egress.denials import KEPT, SHOWN, Notes, clean, write_hint
from k8e.core.errors import Fault
from k8e.core.model import Denials, ManifestRepo, RunResult, RunSpec, SessionSpec, Status
from k8e.engine import EngineError, Observation, Refusal
from tests.core.rig import ALICE, Rig, open_rig
from tests.sandboxes import needs_root


def refusal(host: str = "evil.test", address: str = "", port: int = 0, reason: str = "name_not_listed") -> Refusal:
    return Refusal(host, address, port, reason, 1.0)


def hosts_of(denials: Denials) -> list[str]:
    return [denial.host for denial in denials.entries]


# Noting: pure


def test_a_mark_divides_before_from_after() -> None:
    notes = Notes()
    notes.add([refusal("before.test"), refusal("again.test")])
    mark = notes.mark()
    assert notes.since(mark, "s") == Denials()
    notes.add([refusal("after.test"), refusal("again.test")])
    assert hosts_of(notes.since(mark, "s")) == ["after.test", "again.test"]
    assert hosts_of(notes.recent("s")) == ["before.test", "after.test", "again.test"]


def test_equal_ones_are_one_and_different_ones_are_not() -> None:
    notes = Notes()
    same = refusal("a.test", "192.0.2.1", 22)
    notes.add([same, same, refusal("a.test", "192.0.2.1", 23), refusal("a.test", "192.0.2.2", 22), same])
    assert len(notes.recent("s").entries) == 3


def test_a_result_has_the_latest_and_says_how_many_more_there_are() -> None:
    notes = Notes()
    early, number = notes.mark(), KEPT + 50
    notes.add(refusal(f"h{index}.test") for index in range(number))
    late = notes.mark()
    notes.add([refusal("last.test")])
    told = notes.since(early, "s")
    assert (len(told.entries), told.more) == (SHOWN, number + 1 - SHOWN)
    assert told.entries[-1].host == "last.test"
    told = notes.since(late, "s")
    assert (hosts_of(told), told.more) == (["last.test"], 0)


def test_names_are_printable_and_short_whatever_a_sandbox_asked_for() -> None:
    got = clean(refusal("\x1b[2Jevil\n\u202e" + "x" * 1000, "\0", reason="a b"))
    assert got.host.startswith("?[2Jevil??xxx")
    assert (len(got.host), got.address, got.reason) == (253, "?", "a?b")


@pytest.mark.parametrize(
    ("refused", "hint"),
    [
        (refusal("evil.test"), "k8e sandbox allow-hosts s1 --add evil.test"),
        (refusal("evil.test", "192.88.100.1", 443, "address_not_listed"), "allow-hosts s1 --add evil.test"),
        (refusal("evil.test", "8.8.8.8", 8443, "port_not_listed"), "allow-hosts s1 --add evil.test:8443"),
        (refusal("", "8.8.8.8", 53, "address_not_listed"), "allow-hosts s1 --add 8.8.8.8:53"),
        (refusal("", "2600::1", 22, "address_not_listed"), "allow-hosts s1 --add [2600::1]:22"),
        (refusal("inside.test", "10.1.2.3", 80, "address_not_public"), "allow-hosts s1 --add 10.1.2.3"),
        (refusal("", "169.254.169.254", 80), "No list opens metadata services"),
        (refusal("", "::ffff:169.254.169.254", 80), "No list opens metadata services"),
        (refusal("metadata.google.internal", reason="metadata"), "No list opens metadata services"),
        (refusal("rebound.test", "127.0.0.1", 80, "address_not_public"), "No list opens the machine itself"),
        (refusal("", "fe80::1", 80), "No list opens link-local addresses"),
        (refusal("", "224.0.0.1", 80), "No list opens addresses of no host"),
        (refusal("not a name"), "Only TCP to hosts"),
        (refusal("not a name", reason="invalid_name"), "no host name"),
        (refusal("inside.test", reason="address_not_public"), "when the list has the address itself"),
        (refusal("", "10.0.0.1", 80, "machine"), "No list opens the machine itself"),
        (refusal("", "10.203.0.6", 80, "other_sandbox"), "No list opens other sandboxes"),
        (refusal("a.test", "8.8.8.8", 443, "protocol_not_allowed"), "Only TCP leaves"),
        (refusal("", reason="more_refusals"), "More was refused"),
    ],
)
def test_the_hint_says_exactly_what_to_ask_for(refused: Refusal, hint: str) -> None:
    assert hint in write_hint(refused, "s1")


def test_without_a_session_it_says_how_to_create_one() -> None:
    assert "--allowed-hosts evil.test" in write_hint(refusal("evil.test"))


# Telling


@needs_root
class TestRuns:
    async def run(self, rig: Rig, session: str, *, code: str = "cat", hosts: tuple[str, ...] = ()) -> RunResult:
        """These hosts are refused while it runs."""
        run = await rig.service.runs.start(ALICE, RunSpec(session, code))
        for host in hosts:
            rig.engine.refuse(rig.sandbox_of(session), refusal(host))
        await run.close_stdin()
        assert [chunk async for chunk in run.output()] == []
        return await run.result()

    async def test_a_run_is_told_what_was_refused_meanwhile(self, rig: Rig) -> None:
        session = await rig.create()
        rig.engine.refuse(rig.sandbox_of(session), refusal("before.test"))
        result = await self.run(rig, session, hosts=("evil.test", "evil.test", "b.test"))
        assert hosts_of(result.denied) == ["evil.test", "b.test"]
        assert f"allow-hosts {session} --add evil.test" in result.denied.entries[0].hint
        assert (await self.run(rig, session)).denied == Denials()
        shown = await rig.service.sessions.get(ALICE, session)
        assert hosts_of(shown.denied) == ["before.test", "evil.test", "b.test"]
        assert rig.service.metrics.refusals.get() == 4

    async def test_another_session_is_told_nothing(self, rig: Rig) -> None:
        session, other = await rig.create(), await rig.create()
        rig.engine.refuse(rig.sandbox_of(session), refusal())
        assert (await self.run(rig, other)).denied == Denials()
        assert (await rig.service.sessions.get(ALICE, other)).denied == Denials()

    async def test_two_at_once_are_both_told(self, rig: Rig) -> None:
        session = await rig.create()
        runs = [await rig.service.runs.start(ALICE, RunSpec(session, "cat")) for _ in range(2)]
        rig.engine.refuse(rig.sandbox_of(session), refusal())
        for run in runs:
            await run.close_stdin()
        results = await asyncio.gather(*(run.result() for run in runs))
        assert [hosts_of(result.denied) for result in results] == [["evil.test"], ["evil.test"]]

    async def test_a_background_run_is_told_from_its_start_to_its_end(self, rig: Rig) -> None:
        session = await rig.create()
        run_id = await rig.start_background(session, "until test -e go; do sleep 0.01; done")
        sandbox = rig.sandbox_of(session)
        rig.engine.refuse(sandbox, refusal("one.test"))
        assert hosts_of((await rig.service.runs.poll(ALICE, run_id)).denied) == ["one.test"]
        rig.engine.refuse(sandbox, refusal("two.test"))
        await rig.run(session, "touch go")
        assert hosts_of((await rig.poll_to_the_end(run_id)).denied) == ["one.test", "two.test"]
        rig.engine.refuse(sandbox, refusal("late.test"))
        again = await rig.service.runs.poll(ALICE, run_id)
        assert (again.status, hosts_of(again.denied)) == (Status.COMPLETED, ["one.test", "two.test"])

    async def test_the_next_daemon_still_knows(self, folder: Path) -> None:
        async with open_rig(folder) as rig:
            session = await rig.create()
            ended = await rig.start_background(session, "true")
            await rig.poll_to_the_end(ended)
            running = await rig.start_background(session, "until test -e go; do sleep 0.01; done")
            rig.engine.refuse(rig.sandbox_of(session), refusal("unheard.test"))
        async with open_rig(folder) as rig:
            assert hosts_of((await rig.service.runs.poll(ALICE, running)).denied) == ["unheard.test"]
            await rig.run(session, "touch go")
            assert hosts_of((await rig.poll_to_the_end(running)).denied) == ["unheard.test"]
            assert (await rig.service.runs.poll(ALICE, ended)).denied == Denials()

    async def test_an_engine_that_cannot_tell_is_in_no_commands_way(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail(sandbox: str) -> Observation:
            raise EngineError("network", "netlink is full")

        session = await rig.create()
        monkeypatch.setattr(rig.engine, "observe", fail)
        assert (await rig.run(session, "echo hi")).stdout == b"hi\n"

    async def test_what_no_caller_waits_for_is_in_the_audit_log(self, rig: Rig) -> None:
        sessions = [await rig.create() for _ in range(3)]
        for session in sessions:
            rig.engine.refuse(rig.sandbox_of(session), refusal(f"{session}.test"))
        await rig.service.look_after()
        rig.engine.refuse(rig.sandbox_of(sessions[0]), refusal("last.test"))
        await rig.service.sessions.destroy(ALICE, sessions[0])
        await rig.service.close()
        noted = [line["host"] for line in rig.read_audit() if line["event"] == "refused"]
        assert sorted(noted) == sorted([*(f"{session}.test" for session in sessions), "last.test"])


@needs_root
async def test_a_repository_that_cannot_be_reached_says_why(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clone really runs, and fails for want of a network; that it was the list is what the engine notes."""
    attach = rig.engine.attach

    async def refuse_meanwhile(sandbox: str) -> object:
        found = await attach(sandbox)
        rig.engine.refuse(sandbox, refusal("code.evil.test"))
        return found

    monkeypatch.setattr(rig.engine, "attach", refuse_meanwhile)
    spec = SessionSpec(manifest=[ManifestRepo("app", "https://code.evil.test/app.git")])
    observe = rig.engine.observe
    calls = 0

    async def count(sandbox: str) -> Observation:
        nonlocal calls
        calls += 1
        return Observation(alive=True, oom_kills=0) if calls == 1 else await observe(sandbox)

    monkeypatch.setattr(rig.engine, "observe", count)
    with pytest.raises(Fault) as caught:
        await rig.create(spec=spec)
    got = caught.value
    assert (got.code, got.field, hosts_of(got.denied)) == ("manifest_failed", "manifest[0]", ["code.evil.test"])
    assert "code.evil.test (name_not_listed)" in got.detail
    assert "--allowed-hosts code.evil.test" in got.hint
    await rig.assert_no_trace()

"""Approvals over the gateway: who may ask, who may answer, and what callers that wait are told."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from k8e.doors.grpc import sandbox_pb2 as pb
from tests.cli.machine import Machine, wait_until
from tests.gateway.house import Guest, House

ACTION = "delete /workspace/production-data"


@pytest.fixture(scope="module")
def agent(house: House) -> Guest:
    return house.guest(house.make_key("agent", tenant_ids=["acme"]))


@pytest.fixture(scope="module")
def boss(house: House) -> Guest:
    return house.guest(house.make_key("boss", scope="operator", tenant_ids=["acme"]))


@pytest.fixture(scope="module")
def session(agent: Guest) -> str:
    return agent.create()


def ask(guest: Guest, session: str, expires_in: float = 0) -> str:
    answer = guest.call(
        "ConfirmAction", pb.ConfirmActionRequest(session_id=session, action=ACTION, expires_in=expires_in)
    )
    assert (answer.approved, answer.approval.status, answer.approval.action) == (False, "pending", ACTION)
    return str(answer.approval_id)


def look(guest: Guest, approval: str, seconds: float = 0) -> pb.Approval:
    request = pb.ConfirmActionRequest(approval_id=approval, timeout=seconds)
    found: pb.Approval = guest.call("ConfirmAction", request, seconds=90).approval
    return found


def refused(guest: Guest, approval: str) -> tuple[grpc.StatusCode, str]:
    code, detail = guest.refused("ApproveAction", pb.ApproveActionRequest(approval_id=approval, approved=True))
    return code, detail.code if detail else ""


def test_an_operator_answers_whoever_waits(agent: Guest, boss: Guest, session: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        request = pb.ConfirmActionRequest(session_id=session, action=ACTION, timeout=60)
        waiting = pool.submit(agent.call, "ConfirmAction", request, seconds=90)

        def pending() -> list[pb.Approval]:
            return list(boss.call("ListApprovals", pb.ListApprovalsRequest()).approvals)

        wait_until(lambda: len(pending()) == 1)
        (asked,) = pending()
        assert (asked.asked_by, asked.tenant_id, asked.session_id) == ("key:agent", "acme", session)
        assert round(asked.expires_at - asked.asked_at) == 60
        answer = pb.ApproveActionRequest(approval_id=asked.approval_id, approved=True, reason="go on")
        answered = boss.call("ApproveAction", answer).approval
        told = waiting.result()
    assert (told.approved, told.reason, told.approval_id) == (True, "go on", asked.approval_id)
    assert told.approval == answered == look(agent, asked.approval_id)
    assert answered.answered_by == "key:boss"
    code, word = refused(boss, asked.approval_id)
    assert (code, word) == (grpc.StatusCode.FAILED_PRECONDITION, "approval_settled")


def test_who_says_nothing_has_not_approved(agent: Guest, boss: Guest, session: str) -> None:
    approval = ask(agent, session)
    boss.call("ApproveAction", pb.ApproveActionRequest(approval_id=approval))
    assert look(agent, approval).status == "rejected"


def test_who_may_not_answer(house: House, agent: Guest, boss: Guest, session: str) -> None:
    approval = ask(agent, session)
    denied, missing = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.NOT_FOUND
    colleague = house.guest(house.make_key("colleague", tenant_ids=["acme"]))
    rival = house.guest(house.make_key("rival-boss", scope="operator", tenant_ids=["rival"]))
    assert refused(agent, approval) == (denied, "scope_missing")
    assert refused(colleague, approval) == (denied, "scope_missing")
    assert refused(rival, approval) == (missing, "approval_not_found")
    code, detail = rival.refused("ConfirmAction", pb.ConfirmActionRequest(approval_id=approval))
    other, missing_detail = rival.refused("ConfirmAction", pb.ConfirmActionRequest(approval_id="appr-0"))
    assert code is other is missing
    assert str(detail).replace(approval, "ID") == str(missing_detail).replace("appr-0", "ID")
    assert not rival.call("ListApprovals", pb.ListApprovalsRequest(status="all")).approvals
    own = ask(boss, session)
    assert refused(boss, own) == (denied, "self_approval")
    assert {look(agent, one).status for one in (approval, own)} == {"pending"}
    # Root of the gateway's machine is another caller, and needs no key.
    house.root().call("ApproveAction", pb.ApproveActionRequest(approval_id=approval, approved=True))
    assert look(agent, approval).answered_by == "uid:0"


def test_a_user_of_the_machine_does_not_answer_itself_here_either(house: House) -> None:
    root = house.root()
    approval = ask(root, root.create())
    assert refused(root, approval) == (grpc.StatusCode.PERMISSION_DENIED, "same_user")
    admin = house.guest(house.make_key("chief", scope="admin"))
    admin.call("ApproveAction", pb.ApproveActionRequest(approval_id=approval, approved=True))
    assert look(root, approval).status == "approved"


def test_two_at_once(house: House, agent: Guest, boss: Guest, session: str) -> None:
    other = house.guest(house.make_key("boss-2", scope="operator", tenant_ids=["acme"]))
    for _ in range(5):
        approval = ask(agent, session)

        def answer(guest: Guest, approved: bool, approval: str = approval) -> str:
            request = pb.ApproveActionRequest(approval_id=approval, approved=approved)
            try:
                return str(guest.call("ApproveAction", request).approval.status)
            except grpc.RpcError as error:
                return str(error.code().name)

        with ThreadPoolExecutor(2) as pool:
            results = set(pool.map(answer, (boss, other), (True, False)))
        assert results == {look(agent, approval).status, "FAILED_PRECONDITION"}


def test_a_revoked_key_waits_for_nothing(house: House, session: str) -> None:
    brief = house.guest(house.make_key("brief", tenant_ids=["acme"]))
    approval = ask(brief, session)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(brief.refused, "ConfirmAction", pb.ConfirmActionRequest(approval_id=approval, timeout=60))
        house.delete_key("brief")
        code, detail = waiting.result()
    assert (code, detail and detail.code) == (grpc.StatusCode.UNAUTHENTICATED, "key_revoked")


def test_ends(agent: Guest, session: str) -> None:
    approval = ask(agent, session, expires_in=0.2)
    assert look(agent, approval, seconds=60).status == "expired"
    other = agent.create()
    approval = ask(agent, other)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(look, agent, approval, 60)
        agent.call("DestroySession", pb.DestroySessionRequest(session_id=other))
        assert waiting.result().status == "withdrawn"


def test_the_command_line_elsewhere(house: House, session: str, agent: Guest) -> None:
    """The same commands and the same answers, with keys instead of terminals."""

    def elsewhere(name: str, **spec: object) -> Machine:
        home = house.machine.folder / f"home-{name}"
        home.mkdir()
        key = house.make_key(name, tenant_ids=["acme"], **spec)
        env = {"K8E_SANDBOX_ENDPOINT": house.endpoint, "K8E_SANDBOX_APIKEY": key, "K8E_RUN_DIR": str(home / "none")}
        return Machine(house.machine.folder, home, env)

    asker, operator = elsewhere("far-agent"), elsewhere("far-boss", scope="operator")
    with asker.start("sandbox", "confirm", session, ACTION, "--timeout", "60") as waiting:
        wait_until(lambda: len(operator.k8e("sandbox", "approvals").json["approvals"]) > 0)
        assert waiting.stderr is not None
        lines = [waiting.stderr.readline().decode().strip() for _ in range(7)]
        (command,) = (line for line in lines if " sandbox approve " in line)
        assert command.startswith(f"k8e --endpoint {house.endpoint} sandbox approve appr-")
        self_made = asker.shell(command)
        assert (self_made.code, self_made.json["code"]) == (1, "scope_missing")
        done = operator.shell(f"{command} --reason fine")
        assert (done.code, done.json["ok"], done.json["answered_by"]) == (0, True, "key:far-boss")
        stdout, _ = waiting.communicate(timeout=60)
    said = json.loads(stdout)
    assert (waiting.returncode, said["approved"], said["reason"]) == (0, True, "fine")
    assert operator.k8e("sandbox", "approvals", said["approval_id"]).json == said
    assert set(said) == set(done.json) - {"ok"}
    late = operator.shell(f"k8e sandbox approve {said['approval_id']} --reject")
    assert (late.code, late.json["code"]) == (1, "approval_settled")

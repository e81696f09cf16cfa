"""The command line at an address whose gateway changes: what was never sent is sent again, and nothing runs twice."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.cli.process import Failure, ServiceError
from k8e.cli.remote import retry
from tests.cli.machine import Machine
from tests.gateway.house import House, open_house
from tests.sdk.relay import Relay

REFUSALS = 3


class ReluctantRelay(Relay):
    """Ends the next connections before a byte was read, as an address does behind which no gateway listens yet."""

    refusals = 0
    seen = 0

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while self.refusals:
                client, _ = listener.accept()
                client.close()
                self.refusals -= 1
                self.seen += 1
        super()._accept(listener)

    def replace(self, refusals: int) -> None:
        self.refuse()
        self.refusals, self.seen = refusals, 0
        self.open()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with open_house() as house:
        yield house


@pytest.fixture
def relay(house: House) -> Iterator[ReluctantRelay]:
    relay = ReluctantRelay(house.endpoint)
    relay.open()
    yield relay
    relay.close()


@pytest.fixture
def far(house: House, relay: Relay, tmp_path: Path) -> Machine:
    """Another machine, whose user has a key and has not called yet."""
    key = house.make_key(f"gone-{secrets.token_hex(4)}", tenant_ids=["gone"])
    there = {"K8E_SANDBOX_ENDPOINT": relay.endpoint, "K8E_SANDBOX_APIKEY": key, "K8E_RUN_DIR": str(tmp_path / "no")}
    return Machine(house.machine.folder, tmp_path, there)


@pytest.fixture
def session(far: Machine) -> Iterator[str]:
    """Whose gateway has answered this user."""
    session = str(far.run("true").json["session_id"])
    yield session
    far.k8e("sandbox", "destroy", session)


@pytest.mark.parametrize("words", [[], ["--raw"]], ids=["whole", "stream"])
def test_a_command_that_was_never_sent_is_sent_to_the_next_gateway(
    far: Machine, relay: ReluctantRelay, session: str, words: list[str]
) -> None:
    relay.replace(REFUSALS)
    done = far.run("--session-id", session, *words, "echo x >> once; cat once")
    assert (done.code, relay.seen) == (0, REFUSALS), done
    assert (done.stdout.decode() if words else done.json["stdout"]) == "x\n"


def test_so_is_one_with_input_which_was_not_read_before(far: Machine, relay: ReluctantRelay, session: str) -> None:
    relay.replace(REFUSALS)
    done = far.run("--session-id", session, "-i", "cat > kept; cat kept", stdin=b"a line\n")
    assert (done.code, done.stdout, relay.seen) == (0, b"a line\n", REFUSALS)


def test_so_are_calls_that_change_something_and_downloads(
    far: Machine, relay: ReluctantRelay, session: str, tmp_path: Path
) -> None:
    assert far.run("--session-id", session, "echo content > file").code == 0
    relay.replace(REFUSALS)
    made = far.k8e("sandbox", "create")
    assert (made.code, relay.seen) == (0, REFUSALS), made
    relay.replace(REFUSALS)
    assert far.k8e("sandbox", "destroy", made.json["session_id"]).code == 0
    relay.replace(REFUSALS)
    copied = far.k8e("sandbox", "cp", f"{session}:/workspace/file", str(tmp_path / "copy"))
    assert (copied.code, relay.seen) == (0, REFUSALS), copied
    assert (tmp_path / "copy").read_text() == "content\n"


def test_an_address_that_never_answered_is_an_error_at_once(far: Machine, relay: ReluctantRelay) -> None:
    relay.replace(1000)
    done = far.run("true")
    assert (done.code, done.json["code"], relay.seen) == (2, "unreachable", 1)


def test_only_what_was_never_sent_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def count(failure: Failure, *, known: bool = True, takes: float = 0.0) -> int:
        attempts = 0

        def attempt() -> None:
            nonlocal attempts
            attempts += 1
            now[0] += takes
            raise failure

        with pytest.raises(Failure) as raised:
            retry.repeat(attempt, known=known)
        assert raised.value is failure
        return attempts

    gone = Failure("unreachable", "it is gone", hint="-")
    began = now[0]
    assert count(gone) > 10
    assert now[0] - began <= retry.PATIENCE
    assert count(gone, known=False) == 1
    assert count(gone, takes=retry.PATIENCE) == 1, "one that hangs"
    assert count(Failure("connection_lost", "it may have run", hint="-")) == 1
    assert count(ServiceError("unreachable", "said by a gateway", hint="-")) == 1

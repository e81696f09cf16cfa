"""A gateway is gone and another one takes its place: what was never sent is sent there, and nothing runs twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sandbox_client import AsyncSandboxClient, RunLost, SandboxClient, Unavailable
from sandbox_client._retry import PATIENCE, Retry
from tests.gateway.house import House, open_house
from tests.sdk.conftest import TYPESCRIPT
from tests.sdk.relay import Relay

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with open_house() as house:
        yield house


@pytest.fixture(scope="module")
def key(house: House) -> str:
    return house.make_key("gone", tenant_ids=["gone"])


@pytest.fixture
def relay(house: House) -> Iterator[Relay]:
    relay = Relay(house.endpoint)
    relay.open()
    yield relay
    relay.close()


@pytest.fixture
def refused(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a call was refused and waits for its next attempt. Then the address leads to a gateway again."""
    seen = threading.Event()
    choose = Retry.choose_pause

    def watch(self: Retry, *, local: bool, known: bool) -> float | None:
        pause = choose(self, local=local, known=known)
        if not seen.is_set():
            relay.open()
            seen.set()
        return pause

    monkeypatch.setattr(Retry, "choose_pause", watch)
    return seen


def test_a_call_that_was_refused_is_sent_to_the_next_gateway(relay: Relay, key: str, refused: threading.Event) -> None:
    with SandboxClient(relay.endpoint, api_key=key) as client:
        session = client.create_session("")
        client.exec(session, "true")
        relay.refuse()
        wait_until_noticed(client)
        assert client.exec(session, "echo x >> once; cat once").stdout == "x\n"
        assert refused.is_set()
        client.destroy_session(session)


def wait_until_noticed(client: SandboxClient) -> None:
    """A call that is sent before gRPC has noticed is lost, and not for us to repeat: it may have run."""
    assert client._channel is not None
    noticed = threading.Event()

    def note(state: Any) -> None:
        if state.name != "READY":
            noticed.set()

    client._channel.subscribe(note)
    assert noticed.wait(60)
    client._channel.unsubscribe(note)


def test_so_is_one_that_streams(relay: Relay, key: str, refused: threading.Event) -> None:
    with SandboxClient(relay.endpoint, api_key=key) as client:
        session = client.create_session("")
        client.exec(session, "true")
        relay.refuse()
        wait_until_noticed(client)
        assert "".join(client.exec_stream(session, "echo x >> once; cat once")) == "x\n"
        assert refused.is_set()
        client.destroy_session(session)


async def test_what_only_asks_is_asked_again(relay: Relay, key: str, refused: threading.Event) -> None:
    async with AsyncSandboxClient(relay.endpoint, api_key=key) as client:
        assert (await client.status()).tenant_id == "gone"
        relay.refuse()
        assert (await client.status()).tenant_id == "gone"  # whether or not gRPC has noticed
        assert refused.is_set()


def test_a_command_that_may_have_run_is_not_repeated(relay: Relay, key: str, tmp_path: Path) -> None:
    with SandboxClient(relay.endpoint, api_key=key) as client, ThreadPoolExecutor(1) as pool:
        session = client.create_session("")
        begun = client.start(session, "true")  # so that the session is there
        begun.wait()
        lost = pool.submit(client.exec, session, "echo x >> twice; sleep 1000", 600)
        deadline = time.monotonic() + 60
        while not client.exec(session, "cat twice 2>/dev/null; true").stdout:
            assert time.monotonic() < deadline
        relay.refuse()
        relay.open()
        with pytest.raises(RunLost):
            lost.result(60)
        assert client.exec(session, "cat twice").stdout == "x\n"
        client.destroy_session(session)


def test_an_address_that_never_answered_is_an_error_at_once(relay: Relay, house: House, key: str) -> None:
    found = house.log_in(key)
    relay.refuse()
    retry = Retry()
    assert retry.choose_pause(local=False, known=False) is None
    with pytest.raises(Unavailable) as caught, SandboxClient(relay.endpoint, api_key=key) as client:
        client.status()
    assert (caught.value.code, bool(found)) == ("unreachable", True)


def test_there_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("sandbox_client._retry.time.monotonic", lambda: now)
    retry, pauses = Retry(), []
    while (pause := retry.choose_pause(local=False, known=True)) is not None:
        pauses.append(pause)
        now += pause
    assert PATIENCE - 1 <= sum(pauses) <= PATIENCE
    assert pauses[:3] == [0.05, 0.1, 0.2]
    assert max(pauses) == 1.0
    once = Retry()
    assert [once.choose_pause(local=True, known=True) for _ in range(2)] == [0.0, None]


PROGRAM = """
import { createInterface } from "node:readline";
import { SandboxClient } from "k8e-sandbox-client";

const client = new SandboxClient({ endpoint: process.argv[1], apiKey: process.argv[2] });
const session = await client.createSession({ runtimeClass: "" });
console.log("ready");
for await (const line of createInterface({ input: process.stdin })) {
  const answer = await client.exec(session, line).catch((error) => ({ stdout: `${error.name} ${error.code}` }));
  console.log(answer.stdout.trim());
}
await client.destroySession(session);
await client.close();
process.exit(0);
"""


@needs_npm
@pytest.mark.usefixtures("built")
def test_the_typescript_client(relay: Relay, key: str, tmp_path: Path) -> None:
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "k8e-sandbox-client").symlink_to(TYPESCRIPT)
    command = ["node", "--input-type=module", "-e", PROGRAM, relay.endpoint, key]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = {**os.environ, "GRPC_VERBOSITY": "DEBUG", "GRPC_TRACE": "connectivity_state"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, text=True, bufsize=1, **pipes) as program:
        assert program.stdout is not None
        assert program.stdin is not None

        def wait_for(words: str) -> None:
            assert program.stderr is not None
            assert any(words in line for line in program.stderr), words

        assert program.stdout.readline() == "ready\n"
        relay.refuse()
        wait_for("READY -> IDLE")  # gRPC has noticed: a call from now on is not lost, but refused
        print("echo x >> once; cat once", file=program.stdin, flush=True)
        wait_for("-> TRANSIENT_FAILURE")
        relay.open()
        assert program.stdout.readline() == "x\n"
        program.stdin.close()
        program.stderr.read()  # type: ignore[union-attr]
        assert program.wait(60) == 0

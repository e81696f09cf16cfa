"""A client of this machine's daemon outlives it: its next call starts the daemon again, as a new client's does."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from sandbox_client import AsyncSandboxClient, SandboxClient
from tests.cli.machine import Machine
from tests.sdk.conftest import TYPESCRIPT

LARGE = os.urandom(5 << 20)  # more than one message


def end_daemon(machine: Machine, number: int) -> None:
    """Returns when its last thread has ended."""
    handle = os.pidfd_open(machine.daemon_pid)
    try:
        signal.pidfd_send_signal(handle, number)
        select.select([handle], [], [])
    finally:
        os.close(handle)


def test_every_kind_of_call_brings_the_daemon_back(machine: Machine, client: SandboxClient, session: str) -> None:
    client.exec(session, "touch begun")
    before = machine.daemon_pid
    end_daemon(machine, signal.SIGKILL)
    assert client.exec(session, "echo $((6 * 7)) >> count; cat count").stdout == "42\n"  # and was run once
    assert machine.daemon_pid != before
    end_daemon(machine, signal.SIGTERM)
    assert "".join(client.exec_stream(session, "echo x >> lines; cat lines")) == "x\n"
    end_daemon(machine, signal.SIGKILL)
    assert client.write_file(session, "large", LARGE) == len(LARGE)
    end_daemon(machine, signal.SIGKILL)
    assert client.read_bytes(session, "large") == LARGE
    end_daemon(machine, signal.SIGKILL)
    assert session in [each.session_id for each in client.list_sessions()]


def test_it_stays_with_its_daemon_whatever_is_configured_later(
    machine: Machine, client: SandboxClient, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", "127.0.0.1:1")
    end_daemon(machine, signal.SIGTERM)
    assert client.exec(session, "echo here").stdout == "here\n"


async def test_the_async_client(machine: Machine, session: str) -> None:
    async with AsyncSandboxClient() as mine:
        await mine.status()
        end_daemon(machine, signal.SIGKILL)
        assert (await mine.exec(session, "echo back")).stdout == "back\n"
        end_daemon(machine, signal.SIGKILL)
        assert [chunk async for chunk in mine.exec_stream(session, "echo live")] == ["live\n"]


PROGRAM = """
import { createInterface } from "node:readline";
import { SandboxClient } from "k8e-sandbox-client";

const client = new SandboxClient();
const session = process.argv[1];
const large = new Uint8Array(5 << 20).fill(120);
const calls = {
  status: async () => (await client.status()).name,
  exec: async () => (await client.exec(session, "echo y >> more; cat more")).stdout.trim(),
  stream: async () => {
    let output = "";
    for await (const chunk of client.execStream(session, "echo live")) output += chunk;
    return output.trim();
  },
  upload: async () => client.writeFile(session, "x", large),
};
for await (const line of createInterface({ input: process.stdin })) {
  console.log(await calls[line]().catch((error) => `${error.name} ${error.code} ${error.message}`));
}
await client.close();
"""


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")
@pytest.mark.usefixtures("built")
def test_the_typescript_client(machine: Machine, session: str, tmp_path: Path) -> None:
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "k8e-sandbox-client").symlink_to(TYPESCRIPT)
    command = ["node", "--input-type=module", "-e", PROGRAM, session]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, bufsize=1, **pipes) as program:  # type: ignore[call-overload]

        def call(name: str) -> str:
            print(name, file=program.stdin, flush=True)
            return str(program.stdout.readline()).strip()

        assert call("status") == "uid:0"
        for number, name, answer in (
            (signal.SIGKILL, "exec", "y"),
            (signal.SIGTERM, "stream", "live"),
            (signal.SIGKILL, "upload", str(5 << 20)),
            (signal.SIGTERM, "status", "uid:0"),
        ):
            end_daemon(machine, number)
            assert call(name) == answer
        program.stdin.close()
        assert program.wait(60) == 0

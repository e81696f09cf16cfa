"""Background runs through the handle that `start` returns: live output, the end, and an end before that.
TypeScript's are in sdk/typescript/test/background.test.ts."""

from __future__ import annotations

import pytest

from sandbox_client import AsyncSandboxClient, DeadlineExceeded, NotFound, SandboxClient
from tests.cli.machine import Machine

MIB = 1 << 20


def test_output_comes_while_the_run_goes_on(client: SandboxClient, session: str) -> None:
    code = "echo one; until [ -e go ]; do sleep 0.02; done; echo two >&2; printf '\\342\\202'; exit 7"
    run = client.start(session, code)
    assert (run.status, run.exit_code, run.session_id) == ("running", None, session)
    seen = []
    for chunk in run:
        seen.append((chunk.stream, str(chunk)))
        if len(seen) == 1:
            assert run.status == "running"
            client.write_file(session, "go", "")
    assert sorted(seen) == [("stderr", "two\n"), ("stdout", ""), ("stdout", "one\n"), ("stdout", "\ufffd")]
    assert (run.status, run.exit_code, run.lost) == ("completed", 7, 0)
    result = run.wait()
    assert (result.raw_stdout, result.stderr, result.exit_code) == (b"one\n\xe2\x82", "two\n", 7)


def test_a_run_is_waited_for_found_again_and_killed(client: SandboxClient, session: str) -> None:
    run = client.start(session, "echo begun; exec sleep 1006")
    with pytest.raises(DeadlineExceeded, match="it goes on"):
        run.wait(timeout=0)
    with SandboxClient() as other:
        again = other.attach(run.run_id)
        assert next(iter(again)) == "begun\n"
        ended = again.kill()
        assert (ended.status, ended.stdout, again.status) == ("killed", "begun\n", "killed")
        assert again.kill().status == "killed"
    assert run.wait().status == "killed"
    with pytest.raises(NotFound):
        client.attach("no-such-run")


def test_what_a_slow_reader_misses_is_counted(client: SandboxClient, session: str) -> None:
    run = client.start(session, f"head -c {3 * MIB} /dev/zero | tr '\\0' x")
    result = run.wait()
    assert (result.truncated, result.stdout_bytes) == (True, 3 * MIB)
    pieces = [chunk.data for chunk in run]
    assert sum(map(len, pieces)) + run.lost == 3 * MIB
    assert set(b"".join(pieces)) == {ord("x")}


async def test_the_awaited_client_has_the_same(machine: Machine, session: str) -> None:
    async with AsyncSandboxClient() as mine:
        run = await mine.start(session, "echo out; echo err >&2; exit 3")
        assert sorted([(chunk.stream, str(chunk)) async for chunk in run]) == [("stderr", "err\n"), ("stdout", "out\n")]
        assert (await run.wait(timeout=60)).exit_code == 3
        again = await mine.attach(run.run_id)
        assert (await again.kill()).status == "completed"

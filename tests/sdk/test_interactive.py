"""Runs with open input, commands of another user, and long programs, with both clients of the Python SDK."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox_client import (
    AsyncSandboxClient,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SandboxClient,
)
from tests.cli.machine import DEADLINE, Machine
from tests.sdk.conftest import RUNTIME, serving, stop

ECHO = "while read line; do echo got $line; done; exit 5"


@pytest.fixture(scope="module")
def client(machine: Machine) -> Iterator[SandboxClient]:
    with SandboxClient() as client:
        yield client


@pytest.fixture(scope="module")
def session(client: SandboxClient) -> Iterator[str]:
    session = client.create_session(RUNTIME)
    yield session
    client.destroy_session(session)


@pytest.fixture
async def async_client(machine: Machine) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient() as client:
        yield client


def test_input_is_written_in_pieces(client: SandboxClient, session: str) -> None:
    with client.exec_interactive(session, ECHO) as run:
        assert run.run_id
        output = iter(run)
        for word in ("one", "two"):
            run.write(f"{word}\n")
            assert str(next(output)) == f"got {word}\n"
        run.close_stdin()
        run.close_stdin()
        assert list(output) == []
        with pytest.raises(InvalidArgument):
            run.write(b"more")
    assert run.result.exit_code == 5


async def test_input_is_written_in_pieces_awaited(async_client: AsyncSandboxClient, session: str) -> None:
    async with async_client.exec_interactive(session, ECHO) as run:
        output = aiter(run)
        for word in ("one", "two"):
            await run.write(f"{word}\n")
            assert str(await anext(output)) == f"got {word}\n"
        await run.close_stdin()
        assert [chunk async for chunk in output] == []
    assert run.result.exit_code == 5


def test_input_of_any_size_arrives(client: SandboxClient, session: str) -> None:
    content = bytes(range(256)) * (20 << 12)

    def feed() -> None:
        run.write(content)
        run.close_stdin()

    with client.exec_interactive(session, ["cat"]) as run, ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(feed)
        assert b"".join(chunk.data for chunk in run) == content
        feeding.result()


def test_a_command_that_ends_does_not_keep_its_writer(client: SandboxClient, session: str) -> None:
    with client.exec_interactive(session, "exec 0<&-; exit 3") as run, ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(run.write, bytes(32 << 20))
        assert list(run) == []
        feeding.result()
    assert run.result.exit_code == 3


def test_leaving_ends_the_command(client: SandboxClient, session: str) -> None:
    with client.exec_interactive(session, "echo $$; exec sleep 1000") as run:
        assert str(next(iter(run))).strip().isdigit()
    while client.exec(session, "pgrep -x sleep").exit_code == 0:
        pass  # each look is a command
    with pytest.raises(NotFound), client.exec_interactive("none", "cat"):
        pass


def test_a_command_may_have_another_user(client: SandboxClient, session: str) -> None:
    assert client.exec(session, "id -un", user="root").stdout == "root\n"
    assert client.start(session, "id -un", user="nobody").wait().stdout == "nobody\n"
    assert [str(chunk) for chunk in client.exec_stream(session, ["id", "-u"], user="4711")] == ["4711\n"]
    with pytest.raises(InvalidArgument) as caught:
        client.exec(session, "true", user="no_such_user")
    assert (caught.value.code, caught.value.field) == ("user_not_found", "user")


def test_a_program_may_be_long(client: SandboxClient, session: str) -> None:
    padding = "x" * (2 << 20)
    assert client.exec(session, f"print(__name__) # {padding}", language="python").stdout == "__main__\n"
    assert client.exec(session, ["bash", "-lc", f"echo $0 # {padding}", "name"]).stdout == "name\n"


def test_a_file_is_written_as_its_user_would(client: SandboxClient, session: str) -> None:
    client.exec(session, "echo old > file; ln file other; stat -c %i file > inode")
    client.write_file(session, "file", "new\n")
    client.write_file(session, "file", "more\n", mode="a")
    done = client.exec(session, "cat other; stat -c %i file | cmp - inode; chmod 400 file")
    assert (done.stdout, done.stderr) == ("new\nmore\n", "")
    for mode in ("w", "a"):
        with pytest.raises(PermissionDenied):
            client.write_file(session, "file", "x", mode=mode)


async def test_a_lost_connection_does_not_keep_a_writer_without_a_reader() -> None:
    """It waits behind pieces that the command does not read, and no task or thread reads the output."""
    content = bytes(64 << 20)
    with serving() as machine:
        pid = machine.daemon_pid
        with SandboxClient() as client, ThreadPoolExecutor(1) as pool:
            async with AsyncSandboxClient() as other:
                session = client.create_session(RUNTIME)
                command = ["sleep", "1000"]
                with client.exec_interactive(session, command) as run:
                    async with other.exec_interactive(session, command) as awaited:
                        feeding = pool.submit(run.write, content)
                        writing = asyncio.create_task(awaited.write(content))
                        await asyncio.to_thread(stop, pid, signal.SIGKILL)
                        try:
                            async with asyncio.timeout(DEADLINE):
                                await writing
                                await asyncio.wrap_future(feeding)
                        finally:
                            writing.cancel()
                            machine.k8e("sandbox", "status")  # the next daemon cleans up
                        run.close_stdin()
                        await awaited.close_stdin()

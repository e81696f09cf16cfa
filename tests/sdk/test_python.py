"""What the list cannot say: the client's own session, leaving early, the background, hosts, and the package itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import sandbox_client
from sandbox_client import AsyncSandboxClient, NotFound, NotText, SandboxClient
from tests.cli.machine import Machine, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent


def test_runs_share_the_clients_own_session_which_closing_destroys(machine: Machine) -> None:
    with SandboxClient() as mine:
        first = mine.run("echo a > file")
        assert mine.run("cat file").stdout == "a\n"
        assert mine.run("true").session_id == first.session_id
    with SandboxClient() as other, pytest.raises(NotFound):
        other.get_session(first.session_id)


def test_threads_that_begin_at_once_make_one_session(machine: Machine) -> None:
    seen: list[str] = []
    with SandboxClient() as mine:
        threads = [threading.Thread(target=lambda: seen.append(mine.run("true").session_id)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 6
    assert len(set(seen)) == 1


async def test_tasks_that_begin_at_once_make_one_session(machine: Machine) -> None:
    async with AsyncSandboxClient() as mine:
        results = await asyncio.gather(*(mine.run(f"echo {number}") for number in range(6)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(6)]
    assert len({result.session_id for result in results}) == 1


def test_a_session_that_is_gone_is_replaced_and_the_code_is_run_once(machine: Machine) -> None:
    with SandboxClient() as mine:
        first = mine.run("true")
        mine.destroy_session(first.session_id)
        second = mine.run("echo x >> count; cat count")
        assert second.stdout == "x\n"
        assert second.session_id != first.session_id


def test_leaving_a_live_run_ends_its_command(machine: Machine, client: SandboxClient, session: str) -> None:
    for chunk in client.exec_stream(session, "echo begun; exec sleep 1000"):
        assert chunk == "begun\n"
        break
    wait_until(lambda: client.exec(session, "pgrep -x sleep").exit_code == 1)


async def test_a_task_that_is_cancelled_ends_its_command(machine: Machine, client: SandboxClient, session: str) -> None:
    async with AsyncSandboxClient() as mine:
        task = asyncio.create_task(mine.exec(session, "exec sleep 1001"))
        while client.exec(session, "pgrep -f 'sleep 1001'").exit_code != 0:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while client.exec(session, "pgrep -fx 'sleep 1001'").exit_code == 0:
            await asyncio.sleep(0.02)


def test_a_run_in_the_background_is_polled_and_killed(client: SandboxClient, session: str) -> None:
    started = client.start(session, "echo out; exec sleep 1000")
    assert (started.status, started.exit_code) == ("running", None)
    wait_until(lambda: client.poll(started.run_id).stdout_bytes == 4)
    assert client.kill(started.run_id)
    assert not client.kill(started.run_id), "it had ended"
    ended = client.poll(started.run_id)
    assert (ended.status, ended.stdout) == ("killed", "out\n")


def test_hosts_are_changed_and_what_is_refused_is_explained(client: SandboxClient, runtime: str) -> None:
    sid = client.create_session(runtime, allowed_hosts=[])
    try:
        assert client.get_session(sid).allowed_hosts == ()
        denied = client.exec(sid, "getent hosts refused.example").denied
        assert [refusal.host for refusal in denied] == ["refused.example"]
        assert denied[0].hint == f'Allow it: update_allowed_hosts("{sid}", add=["refused.example"]).'
        assert client.update_allowed_hosts(sid, add=["EXAMPLE.com."]) == ("example.com",)
        assert client.update_allowed_hosts(sid, []) == ()
    finally:
        client.destroy_session(sid)


def test_an_empty_list_is_no_command(client: SandboxClient, session: str) -> None:
    """It once ran an empty shell, which succeeded."""
    for call in (client.exec, client.start):
        with pytest.raises(sandbox_client.InvalidArgument, match="empty list") as caught:
            call(session, [])
        assert caught.value.field == "command"
    with pytest.raises(sandbox_client.InvalidArgument, match="empty list"):
        client.exec_stream(session, [])


def test_a_closed_client_makes_no_session(machine: Machine, client: SandboxClient) -> None:
    mine = SandboxClient()
    first = mine.run("true")
    mine.close()
    mine.close()
    for call in (lambda: mine.run("true"), mine.status):
        with pytest.raises(sandbox_client.Conflict, match="the client is closed") as caught:
            call()
        assert caught.value.code == "client_closed"
    assert first.session_id not in {session.session_id for session in client.list_sessions()}


async def test_a_client_that_is_closed_while_it_makes_its_session_leaves_none(
    machine: Machine, client: SandboxClient
) -> None:
    before = {session.session_id for session in client.list_sessions()}
    mine = AsyncSandboxClient()
    running = asyncio.create_task(mine.run("true"))
    while not mine._creating.locked() and not running.done():
        await asyncio.sleep(0)
    await mine.close()
    with contextlib.suppress(sandbox_client.SandboxError):
        await running
    assert {session.session_id for session in client.list_sessions()} == before


def test_commands_and_runs_are_listed_and_limits_hold(client: SandboxClient, runtime: str) -> None:
    sid = client.create_session(runtime, pids=61, open_files=200, inodes=5000)
    try:
        started = client.start(sid, ["/usr/bin/sleep", "1000"])
        assert [process.command for process in client.ps(sid)] == ["/usr/bin/sleep"]
        client.kill(started.run_id)
        assert client.ps(sid) == []
        result = client.exec(sid, "ulimit -n; df --output=itotal /workspace | tail -1")
        descriptors, inodes = map(int, result.stdout.split())
        assert (descriptors, 5000 <= inodes < 6000) == (200, True)  # ext4 has whole groups
        runs = [(run.run_id, run.status) for run in client.log(sid)]
        assert runs == [(started.run_id, "killed"), (result.run_id, "completed")]
    finally:
        client.destroy_session(sid)


def test_a_text_is_no_limit(client: SandboxClient, session: str) -> None:
    """The command line takes 300m."""
    with pytest.raises(sandbox_client.InvalidArgument, match="300 << 20 are 300 MiB") as caught:
        client.create_session(memory="300m")  # type: ignore[arg-type]
    assert caught.value.field == "memory"
    with pytest.raises(sandbox_client.InvalidArgument, match="cpus is a text"):
        client.run_subagent(session, cpus="1")  # type: ignore[arg-type]


def test_a_text_is_no_list_of_hosts(client: SandboxClient, session: str) -> None:
    for change in ({"allowed_hosts": "x.example"}, {"add": "x.example"}, {"remove": "x.example"}):
        with pytest.raises(sandbox_client.InvalidArgument, match="give a list"):
            client.update_allowed_hosts(session, **change)


def test_a_text_is_no_list_of_packages(client: SandboxClient, session: str) -> None:
    """It would be one package per letter."""
    with pytest.raises(sandbox_client.InvalidArgument, match=r"give a list: \['six'\]"):
        client.pip_install(session, "six")


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 1e12, -100])
def test_a_timeout_that_nobody_can_mean_is_a_mistake(client: SandboxClient, session: str, timeout: float) -> None:
    with pytest.raises(sandbox_client.InvalidArgument, match="timeout"):
        client.exec(session, "true", timeout=timeout)


def test_what_is_no_text_is_said(client: SandboxClient, session: str) -> None:
    client.write_file(session, "bytes", b"\xff")
    with pytest.raises(NotText, match="read_bytes"):
        client.read_file(session, "bytes")


def test_a_name_that_is_no_text_is_found_again(client: SandboxClient, session: str) -> None:
    path = b"/workspace/\xff\xfe"
    client.write_file(session, path, "x")
    assert path in [info.raw_path for info in client.list_files(session)]
    assert client.read_file(session, path) == "x"


def test_a_deadline_that_passes_ends_the_command(
    machine: Machine, client: SandboxClient, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox_client._requests.MARGIN", -29.0)
    with pytest.raises(sandbox_client.DeadlineExceeded):
        client.exec(session, "exec sleep 1002", timeout=30)
    monkeypatch.undo()
    wait_until(lambda: client.exec(session, "pgrep -fx 'sleep 1002'").exit_code == 1)


def test_the_package_installs_on_its_own_and_needs_nothing_of_ours(machine: Machine, tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    build = ("build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(tmp_path))
    subprocess.run([uv, *build, ROOT / "sdk" / "python"], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    names = {path.name for path in (tmp_path / "installed" / "sandbox_client").iterdir()}
    assert {"py.typed", "sandbox_pb2.py", "_sync.py"} <= names
    code = (
        "import sys\n"
        "from sandbox_client import SandboxClient\n"
        "with SandboxClient() as client: print(client.run('echo hi').stdout, end='')\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('k8e', 'mcp', 'pydantic', 'yaml')])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    # -I -P would hide the folder; the editable k8e stays importable, and unused.
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hi\n[]\n", "")


def test_sources_that_are_not_installed_say_how_to_install_them(tmp_path: Path) -> None:
    """Also behind the steps of older documents, which generate the messages by hand to another place."""
    sources = tmp_path / "python"
    ignored = shutil.ignore_patterns("sandbox_pb2*", "__pycache__", "build")
    shutil.copytree(ROOT / "sdk" / "python", sources, ignore=ignored)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    outputs = (f"--python_out={sources}", f"--grpc_python_out={sources}")
    subprocess.run([*command, *outputs, "sandbox/v1/sandbox.proto"], check=True)
    for folder in (sources / "sandbox", sources / "sandbox" / "v1"):
        (folder / "__init__.py").touch()
    code = "from sandbox_client import SandboxClient"
    env = {**os.environ, "PYTHONPATH": str(sources)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: sandbox_client is not installed" in done.stderr
    assert "`pip install ./sdk/python`" in done.stderr.splitlines()[-1]
    assert "ImportError" in (ROOT / "sdk" / "python" / "README.md").read_text()

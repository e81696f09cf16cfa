"""The daemon: started by the first command that finds none, once, and gone without a trace but the sandboxes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k8e.engine.local.layout import Layout
from k8e.engine.local.runtime.cgroup import Cgroups
from tests.cli.machine import K8E, ROOT, Done, Machine, run_launcher, wait_until
from tests.runtimes import do_without


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def fresh(lone_machine: Machine) -> Iterator[Machine]:
    """Whatever daemon the test leaves is stopped, with its sandboxes."""
    try:
        yield lone_machine
    finally:
        lock = lone_machine.folder / "r" / "k8e.lock"
        if lock.exists() and is_alive(lone_machine.daemon_pid):
            for session in lone_machine.live_sessions():
                lone_machine.k8e("sandbox", "destroy", session)
            with contextlib.suppress(ProcessLookupError):  # one that could not start was about to end
                stop_daemon(lone_machine)
        Cgroups(Layout(lone_machine.folder / "s", lone_machine.folder / "r").cgroup).remove_all()


def stop_daemon(machine: Machine, number: int = signal.SIGTERM) -> None:
    pid = machine.daemon_pid
    os.kill(pid, number)
    wait_until(lambda: not is_alive(pid))


class TestOnDemand:
    def test_the_first_command_starts_it(self, fresh: Machine) -> None:
        assert fresh.k8e("sandbox", "sessions").json == {"sessions": []}
        pid = fresh.daemon_pid
        assert is_alive(pid)
        assert os.getsid(pid) == pid, "no terminal of ours can hang it up"
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        fresh.k8e("sandbox", "sessions")
        assert fresh.daemon_pid == pid
        stop_daemon(fresh)
        assert not (fresh.folder / "r" / "k8e.sock").exists()

    def test_ten_commands_at_once_start_one(self, fresh: Machine) -> None:
        with ThreadPoolExecutor(10) as pool:
            results = list(pool.map(lambda _: fresh.k8e("sandbox", "sessions"), range(10)))
        assert [done.json for done in results] == [{"sessions": []}] * 10
        assert (fresh.folder / "s" / "daemon.log").read_text().count(" ready ") == 1

    def test_another_follows_one_that_was_killed(self, fresh: Machine) -> None:
        fresh.k8e("sandbox", "sessions")
        first = fresh.daemon_pid
        stop_daemon(fresh, signal.SIGKILL)
        assert (fresh.folder / "r" / "k8e.sock").exists(), "a dead socket"
        assert fresh.k8e("sandbox", "sessions").code == 0
        assert fresh.daemon_pid != first

    @pytest.mark.parametrize("reads", [False, True])
    def test_a_command_that_a_dying_one_has_not_read_is_done_by_the_next(self, fresh: Machine, reads: bool) -> None:
        """A killed daemon's socket takes connections until its last thread has ended."""
        fresh.k8e("sandbox", "sessions")
        stop_daemon(fresh, signal.SIGKILL)
        path = fresh.folder / "r" / "k8e.sock"
        path.unlink()
        with socket.socket(socket.AF_UNIX) as dying:
            dying.bind(str(path))
            dying.listen()
            with fresh.start("sandbox", "create", "--runtime", "native") as client:
                with dying.accept()[0] as connection:
                    dying.close()
                    assert connection.recv(1 << 20, 0 if reads else socket.MSG_PEEK)
                assert client.stdout
                assert (b"connection_lost" in client.stdout.read()) == reads
                assert client.wait() == int(reads)
        assert len(fresh.live_sessions()) == (0 if reads else 1)

    def test_is_private(self, fresh: Machine) -> None:
        fresh.shell("umask 000; k8e sandbox sessions")
        run, state = fresh.folder / "r", fresh.folder / "s"
        assert mode_of(run) == mode_of(state) == 0o711, "to walk through, not to look around"
        assert mode_of(run / "k8e.sock") in (0o600, 0o660)
        assert {mode_of(path) for path in state.iterdir() if path.is_file()} == {0o600}

    def test_gets_nothing_of_ours(self, fresh: Machine) -> None:
        ours, theirs = os.pipe()
        fresh.overrides["SECRET"] = "hidden"
        with fresh.start("sandbox", "sessions", pass_fds=(theirs,)) as process:
            process.communicate()
        os.close(theirs)
        with os.fdopen(ours, "rb") as reader:
            assert reader.read() == b"", "it holds no descriptor of ours open"
        assert b"hidden" not in Path(f"/proc/{fresh.daemon_pid}/environ").read_bytes()

    def test_imports_nothing_from_where_we_stand(self, fresh: Machine) -> None:
        for name in ("k8e", "asyncio"):
            (fresh.home / name).mkdir()
            (fresh.home / name / "__init__.py").write_text(f"open({str(fresh.home / 'trap')!r}, 'w')\n")
        assert fresh.k8e("sandbox", "sessions").code == 0
        assert not (fresh.home / "trap").exists()

    def test_a_place_that_others_can_change_is_refused(self, fresh: Machine) -> None:
        (fresh.folder / "r").mkdir()
        (fresh.folder / "r").chmod(0o777)
        done = fresh.k8e("sandbox", "sessions")
        assert (done.code, done.json["code"]) == (2, "directory_untrusted")

    def test_a_start_that_fails_says_why(self, fresh: Machine) -> None:
        (fresh.folder / "s").mkdir(mode=0o700, exist_ok=True)
        with contextlib.closing(sqlite3.connect(fresh.folder / "s" / "k8e.db")) as database:
            database.execute("PRAGMA user_version = 9999")  # of a newer version, and not to be thrown away
        done = fresh.k8e("sandbox", "sessions")
        assert done.code == 2
        assert done.json["code"] in ("state_unavailable", "daemon_not_started")
        assert done.json["hint"]
        status = fresh.k8e("sandbox", "status")
        assert (status.code, status.json["available"], status.json["session_id"]) == (2, False, None)

    def test_a_socket_that_nobody_serves_any_more_is_replaced(self, fresh: Machine) -> None:
        (fresh.folder / "r").mkdir(mode=0o711)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(fresh.folder / "r" / "k8e.sock"))
        assert fresh.k8e("sandbox", "sessions").code == 0


class TestForeground:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_serves_until_it_is_told_to_stop(self, fresh: Machine, number: signal.Signals) -> None:
        with fresh.start("server") as server:
            wait_until((fresh.folder / "r" / "k8e.sock").exists)
            assert fresh.daemon_pid == server.pid
            assert fresh.k8e("sandbox", "sessions").json == {"sessions": []}
            server.send_signal(number)
            assert server.wait() == 0
            assert server.stdout
            assert server.stdout.read() == b""

    def test_a_second_one_refuses(self, fresh: Machine) -> None:
        fresh.k8e("sandbox", "sessions")
        done = fresh.k8e("server")
        assert (done.code, done.json["code"]) == (1, "already_running")
        assert str(fresh.daemon_pid) in done.json["detail"]
        assert fresh.k8e("sandbox", "sessions").code == 0, "the first one goes on"

    def test_tells_systemd_that_it_is_ready(self, fresh: Machine) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.bind(str(fresh.folder / "notify"))
            fresh.overrides["NOTIFY_SOCKET"] = str(fresh.folder / "notify")
            with fresh.start("server") as server:
                assert notified.recv(100) == b"READY=1"
                server.send_signal(signal.SIGTERM)
                assert server.wait() == 0


class TestStopping:
    def test_lets_a_command_finish_that_somebody_waits_for(self, fresh: Machine) -> None:
        with (
            run_launcher(fresh) as daemon,
            fresh.start("sandbox", "run", "--raw", "--stdin", "echo ready; read x; echo got $x") as client,
        ):
            assert client.stdin
            assert client.stdout
            assert client.stdout.readline() == b"ready\n"
            daemon.send_signal(signal.SIGTERM)
            wait_until(lambda: not (fresh.folder / "r" / "k8e.sock").exists())
            client.stdin.write(b"it\n")
            client.stdin.close()
            assert client.stdout.read() == b"got it\n"
            assert client.wait() == 0
            assert daemon.wait() == 0
        destroy_sessions(fresh)

    def test_one_that_was_killed_loses_the_connection_and_says_so(self, fresh: Machine) -> None:
        with (
            run_killed_launcher(fresh) as daemon,
            fresh.start("sandbox", "run", "--raw", "echo ready; sleep 1000") as client,
        ):
            assert client.stdout
            assert client.stderr
            assert client.stdout.readline() == b"ready\n"
            daemon.kill()
            assert client.wait() == 1, "it ran"
            assert b'"connection_lost"' in client.stderr.read()
            assert client.stdout.read() == b"", "nothing but the command's own"

    def test_sessions_live_on(self, fresh: Machine) -> None:
        with run_launcher(fresh):
            session = fresh.run("echo kept > file").json["session_id"]
        with run_launcher(fresh):
            done = fresh.run("cat file")
            assert (done.json["session_id"], done.json["stdout"]) == (session, "kept\n")
            fresh.k8e("sandbox", "destroy", session)


@contextlib.contextmanager
def run_killed_launcher(machine: Machine) -> Iterator[subprocess.Popen[bytes]]:
    """The test kills it; another one then clears up."""
    try:
        with run_launcher(machine) as daemon:
            yield daemon
            assert daemon.wait() == -signal.SIGKILL
            daemon.returncode = 0
    finally:
        destroy_sessions(machine)


def destroy_sessions(machine: Machine) -> None:
    """With a daemon of its own: the one they came from has ended, and they live on."""
    with run_launcher(machine):
        for session in machine.live_sessions():
            machine.k8e("sandbox", "destroy", session)


class TestOtherUsers:
    """Not root: they use the daemon that runs, if they may."""

    def ask(self, machine: Machine, *words: str) -> Done:
        """As a user who has nothing but a Python and our source."""
        python = "/usr/bin/python3"
        if not os.access(python, os.X_OK):
            pytest.skip("no Python that others can run")
        copy = machine.folder / "lib"
        if not copy.exists():
            for part in ("cli", "profiles"):
                shutil.copytree(ROOT / "src" / "k8e" / part, copy / "k8e" / part)
            shutil.copy(ROOT / "src" / "k8e" / "errors.py", copy / "k8e")
            (copy / "k8e" / "__init__.py").touch()
        home = machine.folder / "other"
        home.mkdir(exist_ok=True)
        os.chown(home, 65534, 65534)
        done = subprocess.run(
            [python, "-c", "import sys; from k8e.cli import main; sys.exit(main())", *words],
            env={**machine.env, "HOME": str(home), "PYTHONPATH": str(copy)},
            cwd="/",
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def test_are_told_what_to_do_without_one(self, fresh: Machine) -> None:
        done = self.ask(fresh, "sandbox", "run", "true")
        assert (done.code, done.json["code"]) == (2, "daemon_not_running")
        assert "sudo" in done.json["hint"]

    def test_are_told_what_to_do_without_permission(self, fresh: Machine) -> None:
        fresh.k8e("sandbox", "sessions")
        (fresh.folder / "r" / "k8e.sock").chmod(0o600)
        done = self.ask(fresh, "sandbox", "run", "true")
        assert (done.code, done.json["code"]) == (2, "daemon_not_allowed")
        assert "group k8e" in done.json["hint"]

    def test_have_sessions_of_their_own(self, fresh: Machine) -> None:
        with run_launcher(fresh):
            (fresh.folder / "r" / "k8e.sock").chmod(0o666)  # as a group would allow
            mine = fresh.run("true").json["session_id"]
            done = self.ask(fresh, "sandbox", "run", "id -u")
            assert done.code == 0, done
            theirs = done.json["session_id"]
            assert theirs != mine
            refused = self.ask(fresh, "sandbox", "get", mine)
            assert (refused.code, refused.json["code"]) == (1, "session_not_found")
            listed = self.ask(fresh, "sandbox", "sessions").json["sessions"]
            assert [session["session_id"] for session in listed] == [theirs]
            for session in (mine, theirs):
                fresh.k8e("sandbox", "destroy", session)

    def test_cannot_run_a_server(self, fresh: Machine) -> None:
        copy = fresh.folder / "lib" / "k8e"
        self.ask(fresh, "--version")
        shutil.copy(ROOT / "src" / "k8e" / "damage.py", copy / "damage.py")
        for part in ("daemon", "engine", "link"):
            shutil.copytree(ROOT / "src" / "k8e" / part, copy / part)
        done = self.ask(fresh, "server")
        assert (done.code, done.json["code"]) == (1, "needs_root")


class TestTheRealThing:
    def test_a_run_on_a_machine_where_nothing_runs(self, fresh: Machine) -> None:
        """Daemon, runtime, image, session, command: from one line, and whatever the umask."""
        status = fresh.k8e("sandbox", "status").json
        if not status["available"]:
            do_without("native", status)
        stop_daemon(fresh)
        done = fresh.shell("umask 077; k8e sandbox run 'print(6 * 7)' --lang python")
        assert done.json["stdout"] == "42\n"
        stop_daemon(fresh)
        assert fresh.run("id -un").json["session_id"] == done.json["session_id"], "it outlived its daemon"


def test_the_unit_for_systemd_is_sound(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd here")
    unit = (ROOT / "src" / "k8e" / "cli" / "install" / "k8e.service").read_text().replace("@K8E@", str(K8E))
    (tmp_path / "k8e.service").write_text(unit)
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / "k8e.service"], capture_output=True, text=True)
    assert "k8e.service" not in done.stderr, done.stderr


class TestSettings:
    def test_it_does_not_start_with_a_broken_file_and_says_where(self, fresh: Machine) -> None:
        file = fresh.folder / "k8e.toml"
        file.write_text("[limits]\nmemory = 5\n")
        fresh.overrides["K8E_CONFIG"] = str(file)
        for words in (["sandbox", "sessions"], ["server"], ["doctor"]):
            done = fresh.k8e(*words)
            assert done.code in (1, 2)
            assert done.json["code"] == "settings_invalid"
            assert f"{file}: limits.memory" in done.json["error"]
            assert "16m" in done.json["hint"]
        assert not (fresh.folder / "r" / "k8e.sock").exists()

"""Which session a run is in: the one of this home, of a tenant, or the one that is named."""

from __future__ import annotations

import json
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.machine import K8E, Machine


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestAuto:
    def test_two_runs_share_a_session_and_its_files(self, machine: Machine) -> None:
        first = machine.run("echo kept > file").json
        second = machine.run("cat file").json
        assert (second["session_id"], second["stdout"]) == (first["session_id"], "kept\n")

    def test_ten_runs_at_once_make_one_session(self, machine: Machine) -> None:
        before = set(machine.live_sessions())
        with ThreadPoolExecutor(10) as pool:
            results = list(pool.map(lambda number: machine.run(f"echo {number}"), range(10)))
        assert [done.json["stdout"] for done in results] == [f"{number}\n" for number in range(10)]
        (session,) = {done.json["session_id"] for done in results}
        assert set(machine.live_sessions()) - before == {session}

    def test_ten_runs_at_once_replace_a_dead_session_once(self, machine: Machine) -> None:
        machine.run("true")
        dead = machine.session()
        assert machine.k8e("sandbox", "destroy", dead).json == {"ok": True}
        before = set(machine.live_sessions())
        with ThreadPoolExecutor(10) as pool:
            results = list(pool.map(lambda _: machine.run("echo x >> runs; wc -l < runs"), range(10)))
        (session,) = {done.json["session_id"] for done in results}
        assert session != dead
        assert set(machine.live_sessions()) - before == {session}
        assert machine.run("wc -l < runs").json["stdout"] == "10\n", "each ran once"

    def test_the_state_is_private_and_complete(self, machine: Machine) -> None:
        machine.shell("umask 000; k8e sandbox run true")
        state = machine.state()
        assert mode_of(state) == 0o600
        assert {mode_of(parent) for parent in (state.parent, state.parent.parent, state.parent.parent.parent)} == {
            0o700
        }
        assert set(json.loads(state.read_text())) == {"session_id"}
        assert [path.name for path in state.parent.iterdir()] == ["state.json"], "no drafts"

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"[]", b"null", b'{"session_id": 7}', b'{"session_id": "../../x"}', b"\xff\0", b"x" * 100_000],
    )
    def test_a_broken_state_is_replaced(self, machine: Machine, content: bytes) -> None:
        machine.state().parent.mkdir(parents=True)
        machine.state().write_bytes(content)
        assert machine.run("echo fine").json["stdout"] == "fine\n"
        assert machine.session()

    def test_a_state_in_other_spelling_is_read(self, machine: Machine) -> None:
        session = machine.run("true").json["session_id"]
        machine.state().write_text(json.dumps({"more": 1, "session_id": session}, indent=4))
        assert machine.run("true").json["session_id"] == session

    def test_a_pipe_in_its_place_hangs_nobody(self, machine: Machine) -> None:
        import os

        machine.state().parent.mkdir(parents=True)
        os.mkfifo(machine.state())
        assert machine.run("echo fine").json["stdout"] == "fine\n"

    def test_a_home_that_cannot_be_used_is_an_error_of_ours(self, machine: Machine) -> None:
        (machine.home / ".k8e").write_text("in the way")
        done = machine.run("true")
        assert (done.code, done.json["code"]) == (1, "state_unusable")

    def test_with_another_homes_state_the_session_is_shared(self, machine: Machine) -> None:
        first = machine.run("true").json["session_id"]
        assert machine.run("true", "--tenant", "default").json["session_id"] == first


class TestTenants:
    def test_each_has_a_session(self, machine: Machine) -> None:
        sessions = {machine.run("true", *words).json["session_id"] for words in ([], ["--tenant", "a"], ["--tenant=b"])}
        assert len(sessions) == 3
        assert machine.run("true", "--tenant", "a").json["session_id"] == machine.session("a")
        assert machine.k8e("sandbox", "get", machine.session("a")).json["tenant_id"] == "a"

    @pytest.mark.parametrize("name", ["../x", "a/b", ".", "..", "a b", "ä", "x" * 64, "-x", "a\nb"])
    def test_a_name_that_is_none_never_becomes_a_path(self, machine: Machine, name: str) -> None:
        done = machine.run("true", f"--tenant={name}")
        assert (done.code, done.json["code"], done.json["field"]) == (1, "invalid_argument", "tenant")
        assert not (machine.home / ".k8e").exists()


class TestManual:
    def test_a_named_session_touches_no_state(self, machine: Machine) -> None:
        created = machine.k8e("sandbox", "create").json
        done = machine.run("echo hi", "--session-id", created["session_id"])
        assert (done.json["stdout"], done.json["session_id"]) == ("hi\n", created["session_id"])
        assert machine.k8e("sandbox", "destroy", created["session_id"]).json == {"ok": True}
        assert not (machine.home / ".k8e").exists()

    def test_a_named_session_that_is_gone_is_not_replaced(self, machine: Machine) -> None:
        session = machine.k8e("sandbox", "create").json["session_id"]
        machine.k8e("sandbox", "destroy", session)
        done = machine.run("true", "--session-id", session)
        assert (done.code, done.json["code"]) == (1, "session_not_found")
        assert set(done.json) == {"error", "detail", "code", "hint"}

    def test_the_third_scenario(self, machine: Machine) -> None:
        """As the skill's document has it."""
        script = r"""
            set -e
            json() { python3 -c "import json, sys; print(json.load(sys.stdin)['$1'])"; }
            SID=$(k8e sandbox create | json session_id)
            k8e sandbox write $SID /workspace/analyze.py <<'PYEOF'
import csv, json
rows = list(csv.DictReader(open('/workspace/data.csv')))
json.dump({"sum": sum(int(row["value"]) for row in rows)}, open('/workspace/result.json', 'w'))
PYEOF
            printf 'name,value\na,1\nb,2\n' | k8e sandbox write $SID /workspace/data.csv
            k8e sandbox run "python3 /workspace/analyze.py" --session-id $SID
            k8e sandbox read $SID /workspace/result.json --raw | json sum
            k8e-sandbox sandbox destroy $SID
        """
        done = machine.shell(script)
        assert (done.code, done.stderr) == (0, b"")
        written, data, ran, total, destroyed = done.stdout.splitlines()
        assert json.loads(written)["path"] == "/workspace/analyze.py"
        assert json.loads(data) == {"ok": True, "path": "/workspace/data.csv", "bytes": 19}
        assert json.loads(ran)["exit_code"] == 0
        assert (total, json.loads(destroyed)) == (b"3", {"ok": True})


class TestBeginnings:
    MANIFEST = "- dir: {path: data}\n- file: {path: data/a.txt, content: hello}\n"

    def test_a_manifest_fills_a_new_session(self, machine: Machine) -> None:
        (machine.home / "m.yaml").write_text(self.MANIFEST)
        session = machine.k8e("sandbox", "create", "--manifest", "m.yaml").json["session_id"]
        assert machine.run("cat data/a.txt", "--session-id", session).json["stdout"] == "hello"

    def test_so_it_does_with_run(self, machine: Machine) -> None:
        (machine.home / "m.yaml").write_text(self.MANIFEST)
        assert machine.run("cat data/a.txt", "--manifest", "m.yaml").json["stdout"] == "hello"

    def test_but_not_one_that_is_there(self, machine: Machine) -> None:
        machine.run("true")
        (machine.home / "m.yaml").write_text(self.MANIFEST)
        done = machine.run("cat data/a.txt", "--manifest", "m.yaml")
        assert (done.code, done.json["code"]) == (1, "session_exists")
        machine.k8e("sandbox", "destroy", machine.session())
        assert machine.run("cat data/a.txt", "--manifest", "m.yaml").json["stdout"] == "hello"

    def test_a_manifest_that_is_wrong_or_missing(self, machine: Machine) -> None:
        (machine.home / "m.yaml").write_text("- fil: {}\n")
        done = machine.run("true", "--manifest", "m.yaml")
        assert (done.code, done.json["code"]) == (1, "invalid_argument")
        assert not machine.state().exists()
        done = machine.run("true", "--manifest", "nope.yaml")
        assert (done.code, done.json["code"]) == (1, "manifest_unreadable")


def test_a_shell_that_is_killed_while_creating_hinders_nobody(machine: Machine) -> None:
    """The lock goes with the process that held it."""
    process = subprocess.Popen([K8E, "sandbox", "run", "true"], env=machine.env, stdout=subprocess.DEVNULL)
    process.kill()
    process.wait()
    assert machine.run("echo fine").json["stdout"] == "fine\n"

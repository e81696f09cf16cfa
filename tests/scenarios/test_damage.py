"""Every file of the state directory, damaged in every way, before the start of a real daemon: it costs what it
describes, is set aside, said and audited. A sandbox that is not meant goes on, and a new one can be made."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k8e.engine.local.layout import Layout
from tests.cli.machine import Machine, make_folder, wait_until
from tests.engine.answers import plant_answers
from tests.scenarios.user import clear_machine, start_without_gvisor, stop_daemon
from tests.ways import WAYS


class House(Machine):
    @property
    def state_dir(self) -> Path:
        return self.folder / "s"

    def audit(self) -> list[dict[str, Any]]:
        events = []
        for path in sorted(self.state_dir.glob("audit.log*")):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # what a test put there
                    events.append(json.loads(line))
        return events

    def told(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.audit() if each.get("event") == event]

    def damaged(self, *paths: Path) -> dict[str, str]:
        """What the audit log says of damaged files, these among them: where each lay, and where it is."""

        def find() -> dict[str, str]:
            return {event["path"]: event["aside"] for event in self.told("state_damaged")}

        wait_until(lambda: all(str(path) in find() for path in paths))  # its lines are written a moment later
        return find()

    def create(self, *words: str) -> str:
        return str(self.k8e("sandbox", "create", *words).json["session_id"])

    def sandbox_of(self, session: str) -> Path:
        def find() -> list[str]:
            return [event["sandbox"] for event in self.told("session_created") if event["session"] == session]

        wait_until(lambda: bool(find()))
        return self.state_dir / "sandboxes" / find()[0]

    @contextlib.contextmanager
    def between_daemons(self) -> Iterator[None]:
        stop_daemon(self)
        yield
        start_without_gvisor(self)

    def assert_serves(self) -> None:
        made = self.k8e("sandbox", "create")
        assert made.code == 0, made
        session = made.json["session_id"]
        assert self.run("echo works", "--session-id", session).json["stdout"] == "works\n"
        self.k8e("sandbox", "destroy", session)


@pytest.fixture
def house() -> Iterator[House]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with make_folder() as folder:
        plant_answers(folder / "s", folder)
        house = House(folder, folder)
        try:
            start_without_gvisor(house)
            yield house
        finally:
            with contextlib.suppress(AssertionError):
                start_without_gvisor(house) if not (folder / "r" / "k8e.sock").exists() else None
            clear_machine(house)
            for kept in (folder / "s" / "kept").glob("*"):
                shutil.rmtree(kept)


def test_damaged_records_of_sandboxes_cost_these_sandboxes(house: House) -> None:
    sessions = {way: house.create("--allowed-hosts", "a.test") for way in WAYS}
    well = house.create("--env", "A=1")
    paths = {way: house.sandbox_of(session) / "sandbox.json" for way, session in sessions.items()}
    with house.between_daemons():
        for way, path in paths.items():
            WAYS[way](path)
    assert house.run("echo $A", "--session-id", well).json["stdout"] == "1\n"
    for session in sessions.values():
        refused = house.run("true", "--session-id", session)
        assert refused.code == 1
        told = json.loads(refused.stdout)
        assert told["code"] == "session_not_found", told
        assert "could not take its sandbox over" in told["detail"], told
    damaged = house.damaged(*paths.values())
    for path in paths.values():
        assert Path(damaged[str(path)]).exists() or Path(damaged[str(path)]).is_symlink()
        assert not path.parent.exists()
    house.assert_serves()


def test_damaged_lists_of_hosts_cost_what_was_open_and_not_the_session(house: House) -> None:
    sessions = {way: house.create("--allowed-hosts", f"{way.replace('_', '-')}.test") for way in WAYS}
    paths = {way: house.sandbox_of(session) / "egress.json" for way, session in sessions.items()}
    with house.between_daemons():
        for way, path in paths.items():
            WAYS[way](path)
    house.damaged(*paths.values())
    for way, session in sessions.items():
        assert house.run("echo still", "--session-id", session).json["stdout"] == "still\n"
        shown = house.k8e("sandbox", "get", session).json
        assert shown["policy"]["allowed_hosts"] == [f"{way.replace('_', '-')}.test"]
        assert json.loads(paths[way].read_text())["hosts"] == [f"{way.replace('_', '-')}.test"]
    house.assert_serves()


# Each of the other ways: tests/core/test_damage.py.
@pytest.mark.parametrize("way", ["empty", "garbage", "directory"])
def test_a_damaged_database_costs_the_sessions_and_keeps_their_disks(house: House, way: str) -> None:
    session = house.create("--persistent")
    house.run("echo precious > file; sync", "--session-id", session)
    sandbox = house.sandbox_of(session)
    with house.between_daemons():
        WAYS[way](house.state_dir / "k8e.db")
    assert json.loads(house.run("true", "--session-id", session).stdout)["code"] == "session_not_found"
    assert house.damaged(house.state_dir / "k8e.db")[str(house.state_dir / "k8e.db")]
    wait_until(lambda: bool(house.told("sandbox_set_aside")))  # its lines are written a moment later
    (kept,) = (event["path"] for event in house.told("sandbox_set_aside"))
    assert kept == str(house.state_dir / "kept" / sandbox.name)
    assert (Path(kept) / "disk.img").stat().st_size
    assert not sandbox.exists()
    house.assert_serves()


def test_a_disk_that_cannot_be_kept_now_is_kept_by_a_later_daemon(house: House) -> None:
    session = house.create("--persistent")
    sandbox, kept = house.sandbox_of(session), house.state_dir / "kept"
    kept.write_text("in the way")
    with house.between_daemons():
        WAYS["garbage"](house.state_dir / "k8e.db")
    assert json.loads(house.run("true", "--session-id", session).stdout)["code"] == "session_not_found"
    house.assert_serves()
    assert (sandbox / "disk.img").stat().st_size
    with house.between_daemons():
        kept.unlink()
    house.assert_serves()
    assert (kept / sandbox.name / "disk.img").stat().st_size
    assert not (house.state_dir / "k8e.db.unknown").exists()


def singletons(house: House) -> list[Path]:
    """Files of which there is one, or one for many sandboxes."""
    state, run = house.state_dir, house.folder / "r"
    images = state / "images"
    found = [
        state / "audit.log",
        state / "daemon.log",
        state / "clients.json",
        *(state / "agents").iterdir(),
        *images.glob("*.img"),
        *images.glob("*.sha256"),
        *(state / "identity").iterdir(),
        *(state / "environments").iterdir(),
        Path("/run/k8e-engines") / Layout(state, run).tag,
        run / "k8e.lock",
    ]
    assert len(found) > 12, found
    return found


def is_told(path: Path, way: str) -> bool:
    if path.parent.name == "identity" or path.name == "clients.json":
        return False  # the folder is told of as one; answers are asked for again
    read = path.parent.name in ("agents", "images", "environments")
    return read or way not in ("empty", "cut", "garbage", "other_json")  # of logs and locks nothing is read


@pytest.mark.parametrize("way", WAYS)
def test_any_other_damaged_file_costs_what_it_describes(house: House, way: str) -> None:
    lasting = house.create("--persistent", "--env", "COLOUR=blue")
    assert house.k8e("sandbox-apikey", "create", "web").code == 0
    house.k8e("sandbox", "stop", lasting)
    well = house.create()
    stop_daemon(house, signal.SIGKILL)
    paths = singletons(house)
    for path in paths:
        WAYS[way](path)
    start_without_gvisor(house)
    house.assert_serves()
    assert house.run("echo well", "--session-id", well).json["stdout"] == "well\n"
    refused = json.loads(house.k8e("sandbox", "start", lasting).stdout)
    assert (refused["code"], refused["field"]) == ("variables_missing", "env"), refused
    again = house.k8e("sandbox", "start", lasting, "--env", "COLOUR=red").json
    assert house.run("echo $COLOUR", "--session-id", again["session_id"]).json["stdout"] == "red\n"
    identity = json.loads(house.k8e("sandbox-apikey", "list").stdout)
    assert identity["code"] == "identity_unavailable", identity
    told = house.damaged(house.state_dir / "identity", *(path for path in paths if is_told(path, way)))
    assert all(os.path.lexists(aside) for path, aside in told.items() if path != str(house.state_dir / "identity"))
    assert "Traceback" not in (house.folder / "log").read_text()

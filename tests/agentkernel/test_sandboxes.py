"""Sandboxes that last, as they are typed: made, used, stopped, started, removed. And the daemon behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agentkernel.house import House
from tests.cli.machine import Machine, make_folder, wait_until
from tests.engine.answers import plant_answers
from tests.sandboxes import needs_root
from tests.scenarios.user import clear_machine, stop_daemon

pytestmark = needs_root
HOST = ("--image", "host", "--no-network")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with make_folder() as folder:
        (folder / "k8e.toml").write_text('[pool]\nmax = 2\n[gateway]\nlisten = ""\n')
        plant_answers(folder / "s", folder)
        machine = Machine(folder, folder)
        try:
            machine.k8e("sandbox", "sessions")  # there is a daemon now
            yield machine
        finally:
            settings = folder / "k8e.toml"
            settings.write_text("[pool]\nenabled = false\n")  # what was made ahead goes with the next daemon
            stop_daemon(machine)
            clear_machine(machine)


@pytest.fixture
def house(machine: Machine, tmp_path: Path) -> House:
    return House(machine.folder, tmp_path)


def inside(house: House, name: str, script: str) -> str:
    done = house.run("--session-id", name, "--raw", script)
    assert done.code == 0, done
    return done.stdout.decode()


def test_files_and_configuration_outlive_a_stop_and_the_daemon(house: House) -> None:
    house.write("agentkernel.toml", '[sandbox]\nname = "lasting"\n[security]\nnetwork = false\n')
    words = ("--image", "host", "--config", "agentkernel.toml", "--env", "WORD=kept", "--memory", "256m")
    assert house.ok("sandbox", "create", *words) == "lasting\n"
    try:
        assert house.ok("sandbox", "start", "lasting") == ""  # it runs already
        inside(house, "lasting", "echo here > note")
        house.ok("sandbox", "stop", "lasting")
        house.ok("sandbox", "stop", "lasting")
        (listed,) = house.object("sandbox", "list")["sandboxes"]
        assert (listed["name"], listed["state"], listed["profile"]) == ("lasting", "stopped", "moderate")
        assert "lasting  stopped  host   moderate  native" in house.ok("sandbox", "list")
        pid = house.object("daemon", "status")["pid"]
        assert house.object("daemon", "stop") == {"ok": True, "pid": pid}
        done = house.ak("daemon", "status", "--json")
        assert (done.code, json.loads(done.stdout)) == (2, {"running": False})
        assert house.ak("daemon", "stop").code == 2
        assert house.object("daemon", "start")["pid"] != pid
        house.ok("sandbox", "start", "lasting")
        assert inside(house, "lasting", "echo $WORD; cat note") == "kept\nhere\n"
        (listed,) = house.object("sandbox", "list")["sandboxes"]
        assert listed["state"] == "running"
        assert (listed["policy"]["allowed_hosts"], listed["policy"]["limits"]["memory"]) == ([], 256 << 20)
    finally:
        house.ok("sandbox", "remove", "lasting")
    assert house.object("sandbox", "list") == {"sandboxes": []}


def test_files_of_the_project_come_along(house: House) -> None:
    house.write("config/settings.json", '{"a": 1}')
    house.write("tool.sh", "#!/bin/sh\necho ran\n")
    house.write(
        "agentkernel.toml",
        '[[files]]\nsource = "config/settings.json"\ndest = "/workspace/etc/settings.json"\n'
        '[[files]]\nsource = "tool.sh"\ndest = "/workspace/tool"\nmode = "0755"\n',
    )
    house.ok("sandbox", "create", "furnished", *HOST)
    try:
        assert inside(house, "furnished", "cat etc/settings.json; ./tool") == '{"a": 1}ran\n'
    finally:
        house.ok("sandbox", "remove", "furnished")


def test_files_that_cannot_be_put_there_leave_no_sandbox(house: House) -> None:
    house.write("x", "x")
    house.write("agentkernel.toml", '[[files]]\nsource = "x"\ndest = "/proc/nowhere/x"\n')
    house.refusal("sandbox", "create", "half", *HOST)
    assert house.object("sandbox", "list") == {"sandboxes": []}


def test_a_name_is_somebody_s_once(house: House) -> None:
    house.ok("sandbox", "create", "once", *HOST)
    try:
        said = house.refusal("sandbox", "create", "once", *HOST)
        assert "[session_exists]" in said
        assert "`agentkernel sandbox remove once`" in said
        assert house.ok("exec", "once", "--", "echo", "--", "x") == "-- x\n"
    finally:
        house.ok("sandbox", "remove", "once")
    for word in ("start", "stop", "remove"):
        assert "[sandbox_not_found]" in house.refusal("sandbox", word, "once")


@pytest.mark.parametrize("word", ["create", "start", "stop", "remove"])
def test_names_that_lead_elsewhere_are_refused(house: House, word: str) -> None:
    for name in ("../../x", "a b"):
        assert "[invalid_name]" in house.refusal("sandbox", word, name)


def test_sessions_of_the_other_door_are_not_touched(house: House) -> None:
    session = house.k8e("sandbox", "create", "--allowed-hosts", "").json["session_id"]
    try:
        assert house.object("sandbox", "list") == {"sandboxes": []}
        assert "[sandbox_not_found]" in house.refusal("sandbox", "remove", session)
    finally:
        house.k8e("sandbox", "destroy", session)


@pytest.mark.parametrize("image", ["-v/:/host", "a b", "../x", "x" * 300])
def test_images_that_are_none_are_refused(house: House, image: str) -> None:
    said = house.refusal("sandbox", "create", "x", f"--image={image}", "--no-network")
    assert "[invalid_argument]" in said


def test_an_image_that_was_asked_for_is_not_replaced(house: House) -> None:
    said = house.refusal("sandbox", "create", "x", "--image", "k8e/base", "--no-network")
    assert "k8e image build-base" in said
    assert "own tools" not in said
    assert house.object("sandbox", "list") == {"sandboxes": []}


def test_a_detected_one_is_and_one_line_says_so(house: House) -> None:
    """The note that the registry is out of reach keeps the test off the network."""
    state = house.home / ".local" / "state" / "agentkernel"
    state.mkdir(parents=True)
    (state / "unreachable-docker.io").write_text("no way there")
    done = house.ak("sandbox", "create", "fallen", "--no-network")
    try:
        assert done.code == 0, done
        lines = done.stderr.decode().splitlines()
        assert lines[0] == "agentkernel: alpine:3.20 cannot be had (no way there): using this machine's own tools"
        assert len(lines) == 2
        (listed,) = house.object("sandbox", "list")["sandboxes"]
        assert listed["image"] == "host"
    finally:
        house.ak("sandbox", "remove", "fallen")


def test_so_it_is_for_a_single_command(house: House) -> None:
    state = house.home / ".local" / "state" / "agentkernel"
    state.mkdir(parents=True)
    (state / "unreachable-docker.io").write_text("no way there")
    done = house.ak("run", "--no-network", "python3", "-c", "print('ran'); raise SystemExit(6)")
    assert (done.code, done.stdout) == (6, b"ran\n")
    (line,) = done.stderr.decode().splitlines()
    assert line == "agentkernel: python:3.12-alpine cannot be had (no way there): using this machine's own tools"


class TestDaemon:
    def test_pools_are_sized_filled_and_shown(self, house: House) -> None:
        state = house.home / ".local" / "state" / "agentkernel"
        state.mkdir(parents=True)
        (state / "unreachable-docker.io").write_text("no way there")
        folder = house.home / ".config" / "agentkernel"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(
            '[daemon]\nmin_warm = 0\nmax_warm = 1\n[daemon.agents.claude]\nmin_warm = 2\nruntime = "python"\n'
        )
        done = house.ak("daemon", "prewarm", "--mode", "claude")
        assert done.code == 0, done
        assert "claude: 1 of 1 ready (host)" in done.stderr.decode()
        assert "claude  host" in done.stdout.decode()
        told = house.object("daemon", "status")
        (pool,) = told["pool"]["reservations"]
        assert (pool["name"], pool["wanted"], pool["ready"]) == ("claude", 1, 1)
        house.ok("daemon", "prewarm", "--mode", "claude", "--count", "0")
        (folder / "config.toml").unlink()
        house.write("agentkernel.toml", '[agent]\npreferred = "codex"\n')
        assert "codex: 1 of 1 ready (host)" in house.ak("daemon", "prewarm", "--count", "1").stderr.decode()
        house.ok("daemon", "prewarm", "--count", "0")
        assert house.object("daemon", "status")["pool"]["reservations"] == []

    def test_a_file_that_nobody_trusts_sizes_nothing(self, house: House) -> None:
        house.write("agentkernel.toml", "[daemon]\nmin_warm = 100\n")
        for words in (("daemon", "start"), ("daemon", "prewarm")):
            said = house.refusal(*words)
            assert "[widening_refused]" in said
            assert "agentkernel.toml:1: [daemon]" in said

    def test_the_audit_log_has_what_was_done(self, house: House) -> None:
        house.ok("sandbox", "create", "noted", *HOST)
        house.ok("sandbox", "remove", "noted")

        def events() -> set[str]:
            lines = house.ok("audit", "--sandbox", "noted", "--json").splitlines()
            return {json.loads(line)["event"] for line in lines}

        wait_until(lambda: events() >= {"session_created", "session_ended"})
        assert "noted" in house.ok("audit", "--event", "session_created")

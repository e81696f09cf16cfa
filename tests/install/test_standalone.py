"""The standalone program: one file, as `make release` makes it, run by a bare Python in an empty environment against a
real gateway; and once more without what macOS or Windows do not have."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from k8e.cli.process import Failure
from k8e.cli.standalone.signatures import make_request, sign_ed25519
from k8e.cli.transfer.path_destination import check_names
from k8e.identity import anonymous
from k8e.identity.api_key import ApiKey, verify_login
from k8e.identity.authority import read_request
from tests.cli.machine import Done, run_launcher
from tests.gateway.house import House, make_machine, open_house
from tests.gateway.test_silence import clear_up
from tests.gateway.test_stopping import STOPPED
from tests.install.release import make_release

PYTHON = "/usr/bin/python3"
pytestmark = pytest.mark.timeout(600)  # the release is built first
# What Windows lacks is taken away before the program starts.
ELSEWHERE = """
import asyncio, os, runpy, select, socket, subprocess, sys, _socket  # Python's own modules fit the system they are on
for name in ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "tty", "pty"):
    sys.modules[name] = None
for name in ("O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "geteuid", "getuid", "fchmod", "fork"):
    delattr(os, name)
del select.poll, _socket.AF_UNIX, _socket.SO_PEERCRED, _socket.SO_RCVTIMEO
os.supports_dir_fd.clear()
os.supports_fd.clear()
class Locks:
    LK_LOCK = 1
    locking = staticmethod(lambda *_: None)
sys.modules["msvcrt"] = Locks
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Program:
    """A user of another machine."""

    def __init__(self, file: Path, home: Path, cache: Path, *, elsewhere: bool) -> None:
        self._start = [PYTHON, "-I", *(["-c", ELSEWHERE] if elsewhere else []), str(file)]
        self.home, self._cache = home, cache

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        env = {"HOME": str(self.home), "XDG_CACHE_HOME": str(self._cache)}
        pipe = subprocess.PIPE
        return subprocess.Popen([*self._start, *words], stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=self.home)

    def __call__(self, *words: str, stdin: bytes = b"", **env: str) -> Done:
        done = subprocess.run(
            [*self._start, *words],
            input=stdin,
            capture_output=True,
            env={"HOME": str(self.home), "XDG_CACHE_HOME": str(self._cache), **env},
            cwd=self.home,
            timeout=120,
        )
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with open_house() as house:
        yield house


@pytest.fixture(scope="module")
def file() -> Path:
    return make_release() / "k8e-sandbox.pyz"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(params=[False, True], ids=["here", "elsewhere"])
def program(request: pytest.FixtureRequest, file: Path, tmp_path: Path, cache: Path) -> Program:
    return Program(file, tmp_path, cache, elsewhere=request.param)


@pytest.fixture
def key(house: House, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"user-{abs(hash(request.node.name))}"
    yield house.make_key(name, tenant_ids=[name])
    house.delete_key(name)


def test_it_is_pure_python_and_one_file(file: Path) -> None:
    names = zipfile.ZipFile(file).namelist()
    assert [name for name in names if not name.endswith((".py", "/METADATA"))] == []
    assert file.read_bytes().startswith(b"#!/usr/bin/env python3\n")


def test_the_commands_through_a_gateway(program: Program, house: House, key: str) -> None:
    assert program("--version").stdout.startswith(b"k8e ")
    nothing = program("sandbox", "run", "true")
    assert (nothing.code, nothing.json["code"]) == (2, "no_gateway")
    assert program("connect", house.endpoint, stdin=key.encode()).json["profile"] == "default"

    session = program("sandbox", "create").json["session_id"]
    ran = program("sandbox", "run", "echo out; echo err >&2; exit 7", "--session-id", session)
    assert (ran.code, ran.json["stdout"], ran.json["stderr"]) == (7, "out\n", "err\n")
    raw = program(
        "sandbox", "run", "tr a b; exit 4", "--raw", "--stdin", "--session-id", session, stdin=b"a\0a" * 99_999
    )
    assert (raw.code, raw.stdout) == (4, b"b\0b" * 99_999)
    mine = program("sandbox", "run", "echo $((6*7))").json
    assert mine["stdout"] == "42\n"
    assert program("sandbox", "run", "true").json["session_id"] == mine["session_id"], "it remembers the session"

    content = os.urandom(5_000_000)
    assert program("sandbox", "write", session, "d/a.bin", stdin=content).json["bytes"] == len(content)
    assert program("sandbox", "read", session, "d/a.bin", "--raw").stdout == content
    folder = program.home / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_bytes(content)
    assert program("sandbox", "cp", "folder", f"{session}:").json["files"] == 1
    assert program("sandbox", "cp", f"{session}:folder", "back").json["bytes"] == len(content)
    assert (program.home / "back" / "below" / "file").read_bytes() == content

    run = program("sandbox", "run", "echo a; sleep 0.3; echo b; exit 5", "--background", "--session-id", session).json
    logs = program("sandbox", "logs", run["run_id"], "--follow")
    assert (logs.code, logs.stdout) == (5, b"a\nb\n")
    assert program("login").code == 0
    assert program("image", "list").json == {"images": []}
    assert program("sandbox", "destroy", session).json == {"ok": True}
    assert program("sandbox", "destroy", "--all", "--yes").json["destroyed"] == [mine["session_id"]]


def test_errors_are_explained(program: Program, house: House, key: str) -> None:
    refused = program("connect", house.endpoint, stdin=b"nonsense")
    assert (refused.code, refused.json["code"]) == (1, "bad_apikey")
    away = program("--endpoint", "127.0.0.1:9", "--apikey", key, "sandbox", "sessions")
    assert (away.code, away.json["code"]) == (2, "unreachable")
    missing = program("--endpoint", house.endpoint, "--apikey", key, "sandbox", "get", "none")
    assert (missing.code, missing.json["code"]) == (1, "session_not_found")
    # A profile whose gateway is gone: refused before anything was sent.
    program("connect", house.endpoint, stdin=key.encode())
    stored = program.home / ".k8e" / "sandbox" / "profiles.yaml"
    stored.write_text(stored.read_text().replace(house.endpoint, "127.0.0.1:9"))
    gone = program("sandbox", "run", "true", "--session-id", "x")
    assert (gone.code, gone.json["code"]) == (2, "unreachable")
    absent = program("doctor")
    assert (absent.code, absent.json["code"]) == (1, "usage")


def test_an_impostor_is_not_spoken_to(program: Program, house: House, key: str) -> None:
    """The certificate of a profile's gateway must be of its authority."""
    program("connect", house.endpoint, stdin=key.encode())
    stored = program.home / ".k8e" / "sandbox" / "profiles.yaml"
    content = yaml.safe_load(stored.read_text())
    content["profiles"]["default"]["ca_certificate"] = anonymous.CERTIFICATE
    stored.write_text(yaml.safe_dump(content))
    refused = program("sandbox", "sessions")
    assert (refused.code, refused.json["code"]) == (2, "unreachable")
    assert "certificate" in refused.json["detail"]


def test_a_gateway_that_stops_finishes_what_it_has_begun(file: Path, tmp_path: Path, cache: Path) -> None:
    program = Program(file, tmp_path, cache, elsewhere=False)
    with make_machine() as machine:
        try:
            with run_launcher(machine):
                house = House(machine)
                session = machine.run("true").json["session_id"]
                key = house.make_key("far", scope="admin")
                gateway = ("--endpoint", house.endpoint, "--apikey", key)
                words = (*gateway, "sandbox", "run", "--session-id", session, "--raw")
                running = program.start(*words, "echo begun; sleep 1000", "--timeout", "1000")
                assert running.stdout
                assert running.stdout.readline() == b"begun\n"
            out, err = running.communicate(timeout=60)
            assert (running.returncode, out, err) == (143, b"", f"k8e: {STOPPED}\n".encode()), "its last answer arrives"
        finally:
            clear_up(machine)


def test_the_second_start_is_from_the_cache_and_none_is_needed(file: Path, tmp_path: Path) -> None:
    program = Program(file, tmp_path, tmp_path / "caches", elsewhere=False)
    assert program("--version").code == 0
    (cache,) = (tmp_path / "caches" / "k8e-sandbox").iterdir()
    assert (cache / "k8e" / "cli" / "standalone" / "main.py").exists()
    assert program("--version", XDG_CACHE_HOME="/proc/none").stdout == program("--version").stdout
    # One that other users can write is not used.
    (cache / "k8e" / "__init__.py").write_text("raise SystemExit(9)")
    assert program("--version").code == 9
    cache.chmod(0o777)
    assert program("--version").code == 0


def test_signatures_are_those_of_the_libraries() -> None:
    key = ApiKey.generate(bytes(32))
    assert verify_login(key.public, sign_ed25519(key.secret, b"statement"), b"statement")
    private, request = make_request()
    assert read_request(request).is_signature_valid
    assert load_pem_private_key(private, None).public_key() == read_request(request).public_key()


@pytest.mark.parametrize("name", ["a:b", "a\\b", "nul", "COM1.txt", "x.", "x ", 'q"', "a\nb"])
def test_names_that_mean_something_else_on_windows_are_refused(name: str) -> None:
    with pytest.raises(Failure) as raised:
        check_names(["fine", name])
    assert raised.value.code == "name_refused"
    check_names(["fine", "console", ".hidden", "name with space.txt", json.dumps("ä").strip('"')[1:]])

"""`k8e image` as a user types it, against a daemon and a registry that wants to know who asks."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pty
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k8e.cli.images.credentials import find_credentials
from k8e.cli.process import Failure
from tests.cli.machine import K8E, Machine, make_folder, run_launcher
from tests.engine.answers import plant_answers
from tests.images.builder import build, entry, make_tar, write_layout
from tests.images.registry import PASSWORD, USER, RealRegistry, run_registry

AUTH = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with run_registry(tmp_path_factory.mktemp("registry"), htpasswd=True) as running:
        yield running


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with make_folder() as folder:
        (folder / "home").mkdir()
        machine = Machine(folder, folder / "home")
        plant_answers(folder / "s", machine.home)
        with run_launcher(machine):
            yield machine


def log_in(machine: Machine, config: dict[str, Any]) -> None:
    (machine.home / ".docker").mkdir(exist_ok=True)
    (machine.home / ".docker/config.json").write_text(json.dumps(config))


def test_a_private_image_from_its_registry_to_a_session_and_away(machine: Machine, registry: RealRegistry) -> None:
    name = registry.push("team/tool", build(make_tar(entry("f", os.urandom(200_000)))), "1")
    log_in(machine, {})
    refused = machine.k8e("image", "pull", name)
    assert (refused.code, json.loads(refused.stdout)["code"]) == (1, "image_unauthorized")
    log_in(machine, {"auths": {registry.host: {"auth": AUTH}}})
    pulled = machine.k8e("image", "pull", name)
    assert pulled.code == 0, pulled
    image = json.loads(pulled.stdout)
    assert (image["image"], image["size"]) == (name, 200_000)
    lines = pulled.stderr.decode().splitlines()
    assert lines[0] == f"{name}: resolving"
    assert lines[1].startswith(f"{name}: downloading ")
    assert machine.k8e("image", "list").json["images"] == [image]
    session = machine.k8e("sandbox", "create", "--image", name, "--session-id", "with-image").json
    assert session["policy"]["image"] == name
    kept = machine.k8e("image", "remove", name)
    assert (kept.code, kept.json["code"], kept.json["detail"]) == (1, "image_in_use", "with-image")
    assert machine.k8e("image", "prune").json == {"ok": True, "removed": [], "freed": 0}
    assert machine.k8e("sandbox", "destroy", "with-image").code == 0
    assert machine.k8e("image", "prune", "--unused-for", "1h").json["removed"] == []
    assert machine.k8e("image", "remove", name).json == {"ok": True, "image": name, "freed": 200_000}
    assert machine.k8e("image", "list").json == {"images": []}
    missing = machine.k8e("sandbox", "create", "--image", name)
    assert (missing.code, missing.json["code"], missing.json["hint"]) == (
        1,
        "image_not_found",
        f"k8e image pull {name}",
    )


def test_a_bar_where_somebody_looks(machine: Machine, registry: RealRegistry) -> None:
    name = registry.push("team/bar", build(make_tar(entry("f", os.urandom(100_000)))))
    log_in(machine, {"auths": {registry.host: {"auth": AUTH}}})
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [K8E, "image", "pull", name], env=machine.env, stdout=subprocess.PIPE, stderr=theirs, timeout=60
        )
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # EIO: all is read, and no program has the other side
            while piece := os.read(ours, 65536):
                seen += piece
    finally:
        os.close(ours)
    assert done.returncode == 0
    assert json.loads(done.stdout)["image"] == name
    assert b"downloading [" in seen
    assert b"KiB of " in seen
    assert seen.endswith(b"\r\x1b[K"), "nothing of it stays"


def test_importing_a_file_a_stream_and_a_directory(machine: Machine, tmp_path: Path) -> None:
    archive = write_layout(tmp_path / "a.tar", build(make_tar(entry("f", b"x" * 1000))), "demo/saved:3")
    first = machine.k8e("image", "import", str(archive))
    assert json.loads(first.stdout)["image"] == "demo/saved:3"
    second = machine.k8e("image", "import", "-", "--name", "demo/piped", stdin=archive.read_bytes())
    assert json.loads(second.stdout)["image"] == "demo/piped:latest"
    layout = tmp_path / "layout"
    with tarfile.open(archive) as packed:
        packed.extractall(layout, filter="data")
    third = machine.k8e("image", "import", str(layout), "--name", "demo/folder")
    assert json.loads(third.stdout)["digest"] == json.loads(first.stdout)["digest"]
    assert len(machine.k8e("image", "list").json["images"]) >= 3
    pruned = machine.k8e("image", "prune").json
    assert {"demo/saved:3", "demo/piped:latest", "demo/folder:latest"} <= set(pruned["removed"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["pull", "--", "-v/:/host"], "invalid_argument"),
        (["pull", "../../x"], "invalid_argument"),
        (["pull", "k8e/base"], "invalid_argument"),
        (["pull", "localhost:1/x"], "registry_unreachable"),
        (["remove", "never/was"], "image_not_found"),
        (["import", "/nowhere.tar"], "archive_unreadable"),
        (["import", "/etc/os-release", "--name", "x"], "image_refused"),
        (["import", "/etc/os-release", "--name", "../x"], "invalid_argument"),
        (["pull"], "usage"),
    ],
)
def test_what_is_wrong_is_said_in_json(machine: Machine, words: list[str], code: str) -> None:
    done = machine.k8e("image", *words)
    assert (done.code, json.loads(done.stdout)["code"]) == (1, code)


class TestCredentials:
    """The files of `docker login` and `podman login`, in all their places."""

    @pytest.fixture
    def environ(self, tmp_path: Path) -> dict[str, str]:
        helper = tmp_path / "bin/docker-credential-test"
        helper.parent.mkdir()
        helper.write_text(
            '#!/bin/sh\nread -r server\necho "$server" >> "$HOME/asked"\ncase "$1 $server" in\n'
            '"get helped.test") echo \'{"Username": "helper", "Secret": "its"}\';;\n'
            '"get token.test") echo \'{"Username": "<token>", "Secret": "identity"}\';;\n'
            '"get broken.test") echo nonsense;;\n'
            '*) echo "credentials not found in native keychain"; exit 1;;\nesac\n'
        )
        helper.chmod(0o755)
        return {"HOME": str(tmp_path), "PATH": f"{helper.parent}:/usr/bin:/bin"}

    def write(self, path: Path, config: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config))

    def test_nobody_is_anybody(self, environ: dict[str, str]) -> None:
        assert find_credentials("a.test", "x", environ) is None

    def test_dockers_file(self, environ: dict[str, str], tmp_path: Path) -> None:
        hub = {"https://index.docker.io/v1/": {"auth": base64.b64encode(b"hub:p:w").decode()}}
        auths = {
            **hub,
            "a.test:5000": {"username": "u", "password": "p"},
            "b.test": {"identitytoken": "t"},
            "c.test": {},
        }
        self.write(tmp_path / ".docker/config.json", {"auths": auths})
        assert find_credentials("docker.io", "library/x", environ) == {"username": "hub", "password": "p:w"}
        assert find_credentials("a.test:5000", "x", environ) == {"username": "u", "password": "p"}
        assert find_credentials("b.test", "x", environ) == {"identity_token": "t"}
        assert [find_credentials(host, "x", environ) for host in ("c.test", "a.test", "est", "5000")] == [None] * 4
        other = tmp_path / "elsewhere"
        self.write(other / "config.json", {"auths": {"b.test": {"username": "v", "password": "q"}}})
        assert find_credentials("b.test", "x", {**environ, "DOCKER_CONFIG": str(other)}) == {
            "username": "v",
            "password": "q",
        }

    def test_podmans_file_has_parts_of_registries(self, environ: dict[str, str], tmp_path: Path) -> None:
        auths = {
            "a.test/team": {"auth": base64.b64encode(b"team:1").decode()},
            "a.test": {"auth": base64.b64encode(b"all:2").decode()},
        }
        self.write(tmp_path / ".config/containers/auth.json", {"auths": auths})
        assert find_credentials("a.test", "team/x/y", environ) == {"username": "team", "password": "1"}
        assert find_credentials("a.test", "teams/x", environ) == {"username": "all", "password": "2"}

    def test_helpers_are_asked_for_what_they_are_for(self, environ: dict[str, str], tmp_path: Path) -> None:
        auths = {"plain.test": {"username": "u", "password": "p"}}
        helpers = {"helped.test": "test", "token.test": "test", "broken.test": "test", "evil.test": "../../bin/sh"}
        self.write(tmp_path / ".docker/config.json", {"auths": auths, "credHelpers": helpers})
        assert find_credentials("helped.test", "x", environ) == {"username": "helper", "password": "its"}
        assert find_credentials("token.test", "x", environ) == {"identity_token": "identity"}
        assert find_credentials("plain.test", "x", environ) == {"username": "u", "password": "p"}
        assert (tmp_path / "asked").read_text().split() == ["helped.test", "token.test"]
        for host, code in (("broken.test", "credential_helper_failed"), ("evil.test", "credential_helper_missing")):
            with pytest.raises(Failure, match=code):
                find_credentials(host, "x", environ)
        self.write(tmp_path / ".docker/config.json", {"auths": auths, "credsStore": "test"})
        assert find_credentials("helped.test", "x", environ) == {"username": "helper", "password": "its"}
        assert find_credentials("plain.test", "x", environ) == {"username": "u", "password": "p"}

    def test_a_file_that_is_broken_is_said_and_not_ignored(self, environ: dict[str, str], tmp_path: Path) -> None:
        (tmp_path / ".docker").mkdir()
        (tmp_path / ".docker/config.json").write_text("{")
        with pytest.raises(Failure, match="credentials_unreadable"):
            find_credentials("a.test", "x", environ)

"""The table of how a client finds the gateway and its credential (sdk/discovery.json): the command line, Python and
TypeScript do the same, at a real gateway."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import sandbox_client
from k8e.cli.process import Failure
from k8e.cli.remote.connection import read_endpoint
from k8e.cli.remote.profiles import Credentials
from sandbox_client import SandboxClient
from sandbox_client._discovery import read_address
from tests.gateway.house import House, open_house
from tests.sdk.conftest import TYPESCRIPT

TABLE = json.loads((TYPESCRIPT.parent / "discovery.json").read_text())
CASES: list[dict[str, Any]] = TABLE["cases"]
OPTIONS = {"endpoint": "--endpoint", "api_key": "--apikey", "profile": "--profile"}
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")


@dataclass(frozen=True)
class World:
    """A gateway with two keys, and the files that name the first of them."""

    house: House
    words: Mapping[str, str]  # what stands for each $WORD of the table
    runner: Credentials
    nowhere: Path  # a run directory without a daemon

    def fill(self, texts: Mapping[str, str]) -> dict[str, str]:
        for word, value in self.words.items():
            texts = {name: text.replace(word, value) for name, text in texts.items()}
        return dict(texts)

    def prepare(self, case: dict[str, Any], home: Path) -> dict[str, str]:
        """Writes the files of the case; returns its environment."""
        if (profiles := case.get("profiles")) is not None:
            path = home / ".k8e" / "sandbox" / "profiles.yaml"
            path.parent.mkdir(parents=True, mode=0o700)
            path.write_text(profiles.get("text") or self.write_profiles(profiles))
            path.chmod(int(profiles.get("mode", "600"), 8))
        here = case["where"] == "here"
        folder = self.house.machine.folder
        return {
            **self.house.machine.env,
            "HOME": str(home),
            "K8E_RUN_DIR": str(folder / "r" if here else self.nowhere),
            "K8E_STATE_DIR": str(folder / "s" if here else self.nowhere),
            **{f"K8E_SANDBOX_{name}": value for name, value in self.fill(case.get("env", {})).items()},
        }

    def write_profiles(self, profiles: dict[str, Any]) -> str:
        now = time.time()
        times = {"issued_at": now - 100, "expires_at": now + 40} if profiles.get("worn") else {}
        runner = self.runner
        fields = {
            "endpoint": runner.endpoint,
            "ca_certificate": runner.ca_certificate,
            "certificate": runner.certificate,
            "key": runner.key,
            "issued_at": runner.issued_at,
            "expires_at": runner.expires_at,
            **times,
        }
        return yaml.safe_dump({"current": profiles["current"], "profiles": {"far": fields, "other": fields}})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    folder = tmp_path_factory.mktemp("files")
    with open_house() as house:
        runner, second = (house.make_key(name, tenant_ids=[name]) for name in ("runner", "second"))
        found = house.log_in(runner)
        (folder / "c.pem").write_text(found.certificate + found.ca_certificate)
        (folder / "k.pem").write_text(found.key)
        (folder / "ca.pem").write_text(found.ca_certificate)
        (folder / "token").write_text("e30.eyJhdWQiOlsiazhlIl0sImV4cCI6OTk5OTk5OTk5OX0.c2lnbmF0dXJl\n")
        body = os.urandom(72)
        foreign = base64.urlsafe_b64encode(body + hashlib.sha256(body).digest()[:4]).rstrip(b"=").decode()
        words = {
            "$ENDPOINT": house.endpoint,
            "$RUNNER": runner,
            "$SECOND": second,
            "$FOREIGN": f"k8e_{foreign}",
            "$CERT": str(folder / "c.pem"),
            "$PEM": str(folder / "k.pem"),
            "$CA": str(folder / "ca.pem"),
            "$TOKEN": str(folder / "token"),
        }
        (folder / "nowhere").mkdir()
        yield World(house, words, found, folder / "nowhere")


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def check(case: dict[str, Any], home: Path, seen: Mapping[str, Any], runner: Credentials) -> None:
    wanted = {name: case[name] for name in ("caller", "code") if name in case}
    assert {name: seen.get(name) for name in ("caller", "code") if seen.get(name)} == wanted, seen
    if "code" in case:
        assert seen["hint"]
    if case.get("renewed"):
        kept = yaml.safe_load((home / ".k8e" / "sandbox" / "profiles.yaml").read_text())["profiles"]["far"]
        assert kept["certificate"] == runner.certificate
        digest = hashlib.sha256(runner.certificate.encode()).hexdigest()[:16]
        (path,) = (home / ".k8e" / "sandbox" / "certificates").iterdir()
        assert path.name == f"{digest}@{runner.endpoint.replace(':', '_')}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        renewed = json.loads(path.read_text())
        assert renewed["certificate"] != runner.certificate
        assert renewed["expires_at"] > time.time() + 86_400


cases = pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])


@cases
@pytest.mark.usefixtures("environment")
def test_the_python_client(world: World, case: dict[str, Any], tmp_path: Path) -> None:
    os.environ.clear()
    os.environ.update(world.prepare(case, tmp_path))
    for _ in range(2):  # the second finds what the first has written
        with SandboxClient(**world.fill(case.get("arguments", {}))) as client:  # type: ignore[arg-type]
            try:
                seen = {"caller": client.status().name}
            except sandbox_client.SandboxError as error:
                seen = {"code": error.code, "hint": error.hint}
        check(case, tmp_path, seen, world.runner)


def check_all(world: World, homes: list[Path], cases: list[dict[str, Any]], done: str) -> None:
    for home, case, seen in zip(homes, cases, json.loads(done), strict=True):
        try:
            check(case, home, seen, world.runner)
        except AssertionError as error:
            raise AssertionError(case["name"]) from error


def make_homes(folder: Path) -> list[Path]:
    homes = [folder / f"home-{number}" for number in range(len(CASES))]
    for home in homes:
        home.mkdir()
    return homes


# The command line, again and again in one process: a hundred processes would take a minute.
COMMANDS = """
import json, os, sys, tempfile
from k8e.cli import choose
from k8e.cli.process import run_to_end

given = json.load(sys.stdin)
stdout = os.dup(1)
seen = []
for case in given:
    for _ in range(2):  # the second finds what the first has written
        os.environ.clear()
        os.environ.update(case["env"])
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 1)
            run_to_end(choose, case["words"])
            file.seek(0)
            answer = json.loads(file.read())
    caller = answer.get("caller", {}).get("name")
    seen.append({"caller": caller, "code": answer.get("code"), "hint": answer.get("hint")})
os.dup2(stdout, 1)
print(json.dumps(seen), flush=True)
os._exit(0)
"""


# The standalone program does the same, with its own gRPC and signatures; it is never on the daemon's machine.
STANDALONE = COMMANDS.replace("k8e.cli import", "k8e.cli.standalone.main import").replace(
    "given = json", "from k8e.cli import client; client.has_daemon = False; given = json"
)
ELSEWHERE = [case for case in CASES if case["where"] == "elsewhere"]


@pytest.mark.parametrize(("program", "chosen"), [(COMMANDS, CASES), (STANDALONE, ELSEWHERE)], ids=["k8e", "standalone"])
def test_the_command_line(world: World, tmp_path: Path, program: str, chosen: list[dict[str, Any]]) -> None:
    homes = make_homes(tmp_path)[: len(chosen)]
    given = []
    for home, case in zip(homes, chosen, strict=True):
        options = world.fill(case.get("arguments", {})).items()
        words = [word for name, value in options for word in (OPTIONS[name], value)]
        given.append({"env": world.prepare(case, home), "words": [*words, "sandbox", "status"]})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [{**case, "code": "usage"} if case.get("usage") else case for case in chosen]
    check_all(world, homes, expected, done.stdout)


PROGRAM = """
import { readFileSync } from "node:fs";
import { SandboxClient } from "k8e-sandbox-client";

const seen = [];
for (const { env, options } of JSON.parse(readFileSync(0, "utf8"))) {
  for (const name of Object.keys(process.env)) {
    delete process.env[name];
  }
  Object.assign(process.env, env);
  const client = new SandboxClient(options);
  try {
    seen.push({ caller: (await client.status()).name });
  } catch ({ code, hint }) {
    seen.push({ code, hint });
  }
  await client.close();
}
console.log(JSON.stringify(seen));
"""


@needs_npm
@pytest.mark.usefixtures("built")
def test_the_typescript_client(world: World, tmp_path: Path) -> None:
    """All cases in one process, each with its own environment and home."""
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "k8e-sandbox-client").symlink_to(TYPESCRIPT)
    homes = make_homes(tmp_path)
    given = []
    for home, case in zip(homes, CASES, strict=True):
        options = world.fill(case.get("arguments", {}))
        options = {name.replace("api_key", "apiKey"): value for name, value in options.items()}
        given.append({"env": world.prepare(case, home), "options": options})
    command = ["node", "--input-type=module", "-e", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, input=json.dumps(given), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    check_all(world, homes, CASES, done.stdout)


@pytest.mark.parametrize("vector", TABLE["addresses"], ids=lambda vector: vector["text"])
def test_an_address(vector: dict[str, str]) -> None:
    """TypeScript's is in sdk/typescript/test/discovery.test.ts."""
    if "address" in vector:
        assert read_address(vector["text"]) == read_endpoint(vector["text"]) == vector["address"]
        return
    with pytest.raises(sandbox_client.InvalidArgument) as refused:
        read_address(vector["text"])
    with pytest.raises(Failure) as failed:
        read_endpoint(vector["text"])
    assert refused.value.code == failed.value.code == vector["code"]

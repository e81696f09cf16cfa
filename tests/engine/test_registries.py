"""Sandboxes use the registries that the machine's pip and npm are configured for, and learn no secret of them.

With the real pip and npm, and configuration files made up here. Nothing asks a network."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from k8e.engine.local.system.tool import find_tool
from k8e.engine.local.toolchain.package_clients import (
    SYSTEM_PYTHON,
    certificates,
    read_npm_settings,
    read_pip_settings,
    strip_credentials,
)
from k8e.engine.local.toolchain.registries import (
    CA_BUNDLE,
    CODE_HOSTS,
    EXTRA_CA,
    NPMRC,
    PIP_CONF,
    Registries,
    find_registries,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not SYSTEM_PYTHON.exists() or not find_tool("npm"), reason="needs the machine's pip and npm"),
]

PIP_FILE = """[global]
index-url = https://someone:pip-secret@pip.corp.example:8443/simple?token=query-secret
extra-index-url =
    http://extra.corp.example/simple
    https://token-secret@10.20.30.40/simple
    https://[2001:db8::7]:9443/simple
find-links = /srv/wheels https://links.corp.example/wheels
trusted-host = extra.corp.example
timeout = 7
client-cert = /srv/client-secret.pem
proxy = http://someone:proxy-secret@proxy.corp.example:3128
[install]
retries = 2
[list]
index-url = https://unrelated.corp.example/simple
"""
NPM_FILE = """registry=https://someone:npm-secret@npm.corp.example/team/
@corp:registry=https://scoped.corp.example:4873/
//npm.corp.example/team/:_authToken=token-secret
//scoped.corp.example:4873/:_password=password-secret
_auth=auth-secret
email=someone@corp.example
strict-ssl=false
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def environ(home: Path) -> dict[str, str]:
    """The files of this machine do not count, only those of the home directory."""
    empty = home / "global-npmrc"
    empty.touch()
    return {"HOME": str(home), "PIP_CONFIG_FILE": f"{home}/pip.conf", "npm_config_globalconfig": str(empty)}


def file_of(registries: Registries, path: str) -> str:
    return dict(registries.files)[path].decode()


def ask_directly(environ: dict[str, str]) -> set[str]:
    code = "from pip._internal.models.index import PyPI; print(PyPI.netloc, PyPI.file_storage_domain)"
    commands = [[str(SYSTEM_PYTHON), "-c", code], [find_tool("npm") or "npm", "config", "get", "registry"]]
    words = ""
    for command in commands:
        env = {**os.environ, **environ}
        words += subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=env).stdout
    return {word.removeprefix("https://").rstrip("/") for word in words.split()}


async def test_without_configuration_the_clients_own_indexes_count(home: Path, environ: dict[str, str]) -> None:
    registries = await find_registries(environ={**environ, "PIP_CONFIG_FILE": os.devnull})
    expected = ask_directly(environ)
    assert registries.mirrors == expected
    assert set(registries.hosts.texts) == expected | set(CODE_HOSTS)
    assert registries.notes == ()


async def test_a_company_mirror_is_used_and_its_secrets_are_not_told(
    tmp_path: Path, home: Path, environ: dict[str, str]
) -> None:
    (home / "pip.conf").write_text(PIP_FILE)
    (home / ".npmrc").write_text(NPM_FILE)
    memory = tmp_path / "memory"
    registries = await find_registries(memory, environ=environ)
    assert set(registries.hosts.texts) == {
        "pip.corp.example:8443",
        "extra.corp.example",
        "10.20.30.40",
        "[2001:db8::7]:9443",
        "links.corp.example",
        "npm.corp.example",
        "scoped.corp.example:4873",
        *CODE_HOSTS,
    }
    assert registries.mirrors == {
        "pip.corp.example", "extra.corp.example", "links.corp.example", "npm.corp.example", "scoped.corp.example"
    }  # fmt: skip
    pip = dict(line.split(" = ") for line in file_of(registries, PIP_CONF).splitlines()[1:])
    assert pip == {
        "index-url": "https://pip.corp.example:8443/simple",
        "extra-index-url": "http://extra.corp.example/simple https://10.20.30.40/simple https://[2001:db8::7]:9443/simple",
        "find-links": "https://links.corp.example/wheels",
        "trusted-host": "extra.corp.example",
        "timeout": "7",
        "retries": "2",
        "cert": CA_BUNDLE,
    }
    npm = dict(line.split("=", 1) for line in file_of(registries, NPMRC).splitlines())
    assert npm["registry"] == "https://npm.corp.example/team/"
    assert npm["@corp:registry"] == "https://scoped.corp.example:4873/"
    assert npm["strict-ssl"] == "false"
    everything = repr(registries) + memory.read_text()
    assert "secret" not in everything
    assert "someone" not in everything
    assert "proxy.corp.example" not in everything
    assert memory.stat().st_mode & 0o077 == 0


async def test_pip_and_npm_accept_what_sandboxes_get(tmp_path: Path, home: Path, environ: dict[str, str]) -> None:
    (home / "pip.conf").write_text(PIP_FILE)
    (home / ".npmrc").write_text(NPM_FILE)
    registries = await find_registries(environ=environ)
    inside = tmp_path / "inside"
    inside.mkdir()
    for path, content in registries.files:
        (inside / os.path.basename(path)).write_bytes(content)
    again = await find_registries(
        environ={
            "HOME": "/nowhere",
            "PIP_CONFIG_FILE": f"{inside}/pip.conf",
            "npm_config_globalconfig": f"{inside}/npmrc",
        }
    )
    assert again.hosts == registries.hosts
    assert [file_of(again, path) for path in (PIP_CONF, NPMRC)] == [file_of(registries, p) for p in (PIP_CONF, NPMRC)]


async def test_a_variable_beats_a_file(home: Path, environ: dict[str, str]) -> None:
    (home / "pip.conf").write_text(PIP_FILE)
    variables = {
        "PIP_INDEX_URL": "https://env.corp.example/simple",
        "npm_config_registry": "http://env2.corp.example:81",
    }
    registries = await find_registries(environ=environ | variables)
    assert {"env.corp.example", "env2.corp.example:81"} <= set(registries.hosts.texts)
    assert "pip.corp.example:8443" not in registries.hosts.texts


async def test_a_registry_on_loopback_or_in_a_folder_is_left_out(home: Path, environ: dict[str, str]) -> None:
    (home / "pip.conf").write_text(
        "[global]\nindex-url = http://localhost:3141/simple\nextra-index-url = file:///srv\n"
    )
    (home / ".npmrc").write_text("registry=http://127.0.0.1:4873/\n")
    registries = await find_registries(environ=environ)
    assert set(registries.hosts.texts) == set(CODE_HOSTS)
    assert registries.mirrors == frozenset()
    assert len(registries.notes) == 2


async def test_no_index_means_none(home: Path, environ: dict[str, str]) -> None:
    (home / "pip.conf").write_text("[global]\nno-index = true\n")
    (home / ".npmrc").write_text("registry=https://npm.corp.example/\n")
    registries = await find_registries(environ=environ)
    assert registries.mirrors == {"npm.corp.example"}
    assert "no-index = true" in file_of(registries, PIP_CONF)


async def test_answers_are_kept_until_something_changes(tmp_path: Path, home: Path, environ: dict[str, str]) -> None:
    memory = tmp_path / "state" / "memory"
    (home / "pip.conf").write_text("[global]\nindex-url = https://one.corp.example/\n")
    assert "one.corp.example" in (await find_registries(memory, environ=environ)).mirrors
    record = json.loads(memory.read_text())
    record["answers"]["pip"]["index-url"] = "https://kept.corp.example/"  # shows that no client was asked
    memory.write_text(json.dumps(record))
    assert "kept.corp.example" in (await find_registries(memory, environ=environ)).mirrors

    changed = {**environ, "PIP_EXTRA_INDEX_URL": "https://more.corp.example/"}
    assert {"one.corp.example", "more.corp.example"} <= (await find_registries(memory, environ=changed)).mirrors
    (home / "pip.conf").write_text("[global]\nindex-url = https://two.corp.example/\n")
    assert "two.corp.example" in (await find_registries(memory, environ=environ)).mirrors
    (home / ".npmrc").write_text("registry=https://npm.corp.example/\n")  # one that did not exist before
    assert "npm.corp.example" in (await find_registries(memory, environ=environ)).mirrors
    (home / "global-npmrc").write_text("@x:registry=https://scope.corp.example/\n")  # which only npm knows of
    assert "scope.corp.example" in (await find_registries(memory, environ=environ)).mirrors


@pytest.mark.parametrize("garbage", ["", '{"fingerprint": 1, "answers": {"x": 1}}', '{"answers": 3}'])
async def test_a_broken_memory_is_made_anew(tmp_path: Path, home: Path, environ: dict[str, str], garbage: str) -> None:
    memory = tmp_path / "memory"
    memory.write_text(garbage)
    (home / "pip.conf").write_text("[global]\nindex-url = https://one.corp.example/\n")
    assert "one.corp.example" in (await find_registries(memory, environ=environ)).mirrors
    assert json.loads(memory.read_text())["answers"]["pip"]["index-url"] == "https://one.corp.example/"


PEM = "-----BEGIN CERTIFICATE-----\nTWFkZSB1cA==\n-----END CERTIFICATE-----\n"
OTHER = "-----BEGIN CERTIFICATE-----\nQW5vdGhlcg==\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"


async def test_certificates_of_the_clients_join_those_of_the_machine(home: Path, environ: dict[str, str]) -> None:
    (home / "pip.pem").write_text(f"# a comment\r\n{KEY}{PEM}".replace("\n", "\r\n"))
    (home / "npm.pem").write_text(OTHER + PEM)
    (home / "pip.conf").write_text(f"[global]\ncert = {home}/pip.pem\n")
    (home / ".npmrc").write_text(f"cafile={home}/npm.pem\n")
    registries = await find_registries(environ=environ)
    bundle, extra = file_of(registries, CA_BUNDLE), file_of(registries, EXTRA_CA)
    machine = certificates(file_of(await find_registries(environ={**environ, "HOME": "/nowhere"}), CA_BUNDLE))
    assert set(certificates(bundle)) == {*machine, *certificates(PEM + OTHER)}
    assert bundle.count(PEM) == extra.count(PEM) == bundle.count(OTHER) == extra.count(OTHER) == 1
    assert "PRIVATE" not in bundle
    assert "PRIVATE" not in extra
    assert f"cert = {CA_BUNDLE}" in file_of(registries, PIP_CONF)
    assert f"cafile={CA_BUNDLE}" in file_of(registries, NPMRC)
    assert dict(registries.env)["NODE_EXTRA_CA_CERTS"] == EXTRA_CA
    assert len(extra) < len(bundle)  # Node is not given again what it has


async def test_a_certificate_written_in_npms_settings(home: Path, environ: dict[str, str]) -> None:
    (home / ".npmrc").write_text('ca="' + PEM.strip().replace("\n", "\\n") + '"\n')
    assert PEM in file_of(await find_registries(environ=environ), CA_BUNDLE)


def test_urls_lose_everything_secret() -> None:
    assert strip_credentials("https://u:p@h.example:8/a?t=1#f") == "https://h.example:8/a"
    assert strip_credentials("https://u:p@x@h.example/") == "https://h.example/"
    for nothing in ("", "file:///x", "h.example", "https://", "https://[", "ssh://u@h", "https://h/\x07"):
        assert strip_credentials(nothing) == ""


def test_settings_that_are_none_are_left_out() -> None:
    assert read_pip_settings(["", "nonsense", "global.index-url=", "global.cert='x'", "freeze.timeout='9'"]) == {
        "cert": "x"
    }
    assert read_npm_settings(
        {"registry": None, "cafile": 3, "strict-ssl": False, "x": "y", "@s:registry": "no url"}
    ) == {"strict-ssl": "false"}

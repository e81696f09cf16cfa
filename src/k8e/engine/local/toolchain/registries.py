"""The package registries of this machine, for sandboxes: which hosts those are, and the configuration with which pip
and npm inside find them, behind a company mirror too.

Nothing secret goes in. A mirror that wants a password refuses the sandbox, and says so itself.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from k8e.engine.local.toolchain.package_clients import Answers, ask_clients, certificates
from k8e.policy import HostList, InvalidEntry

CODE_HOSTS = ("github.com", "raw.githubusercontent.com")

# Where things are inside a sandbox.
PIP_CONF = "/etc/pip.conf"
NPMRC = "/etc/npmrc"
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
EXTRA_CA = "/etc/ssl/extra-ca.crt"

_SYSTEM_BUNDLES = (CA_BUNDLE, "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem")
_SECRET = re.compile(r"_auth|_password|://[^/\s]*@", re.ASCII | re.IGNORECASE)
_TOOLS = Path("/var/lib/k8e/tools")


@dataclass(frozen=True, slots=True)
class Registries:
    hosts: HostList  # what a session reaches that said nothing
    mirrors: frozenset[str]  # names of registries: the machine's own configuration vouches for them
    files: tuple[tuple[str, bytes], ...]  # to be written into a sandbox, by path
    env: tuple[tuple[str, str], ...]  # what its commands start with, so that those files count
    hidden: tuple[str, ...] = ()  # files below /usr with credentials: sandboxes see /usr, and must not see these
    notes: tuple[str, ...] = ()  # what is missing, for the doctor


async def find_registries(
    memory: Path | None = None, tools: Path = _TOOLS, environ: Mapping[str, str] = os.environ
) -> Registries:
    """Asks pip and npm, unless `memory` knows what they said and nothing has changed since. Never the network."""
    answers = await ask_clients(tools, memory, environ)
    bundle = await asyncio.to_thread(_read_bundles, answers)
    hidden = await asyncio.to_thread(_find_secrets, answers)
    return replace(describe_registries(answers, bundle), hidden=hidden)


def describe_registries(answers: Answers, bundle: Mapping[str, str]) -> Registries:
    """`bundle`: the certificates that the machine trusts, by digest."""
    urls = _urls(answers)
    registries, notes = _parse_hosts(urls)
    if answers.pip_index and _host(answers.pip_index) in {_host(url) for url in urls}:
        registries = registries.plus(HostList.parse([answers.pip_files]))
    files = [
        (PIP_CONF, _write_pip_conf(answers.pip, bool(bundle)).encode()),
        (NPMRC, _write_npmrc(answers.npm, bool(bundle)).encode()),
    ]
    env = {"npm_config_globalconfig": NPMRC}
    if bundle:
        files.append((CA_BUNDLE, "".join(bundle.values()).encode()))
        env |= {"REQUESTS_CA_BUNDLE": CA_BUNDLE, "SSL_CERT_FILE": CA_BUNDLE}
    # Node reads these at every start: a whole bundle makes it three times as long, so only what it does not have.
    extra = [text for digest, text in bundle.items() if digest not in answers.node_roots]
    if extra:
        files.append((EXTRA_CA, "".join(extra).encode()))
        env["NODE_EXTRA_CA_CERTS"] = EXTRA_CA
    return Registries(
        hosts=registries.plus(HostList.parse(CODE_HOSTS)),
        mirrors=frozenset(entry.name for entry in registries.entries if entry.name),
        files=tuple(files),
        env=tuple(sorted(env.items())),
        notes=(*answers.complaints, *notes),
    )


def _urls(answers: Answers) -> list[str]:
    urls = []
    if "no-index" not in answers.pip:
        urls += answers.pip.get("index-url", answers.pip_index).split()
        urls += answers.pip.get("extra-index-url", "").split()
    urls += answers.pip.get("find-links", "").split()
    urls += [value for key, value in answers.npm.items() if key == "registry" or key.endswith(":registry")]
    return urls


def _host(url: str) -> str:
    return (urlsplit(url).hostname or "").lower()


def _parse_hosts(urls: Iterable[str]) -> tuple[HostList, list[str]]:
    hosts, notes = HostList(), []
    for url in urls:
        try:
            host, port = urlsplit(url).hostname or "", urlsplit(url).port
            written = f"[{host}]" if ":" in host else host
            hosts = hosts.plus(HostList.parse([written if port in (None, 80, 443) else f"{written}:{port}"]))
        except InvalidEntry as error:
            notes.append(f"sandboxes do not reach the registry {url}: {error.cause}")
        except ValueError as error:  # its port
            notes.append(f"sandboxes do not reach the registry {url}: {error}")
    return hosts, notes


def _write_pip_conf(settings: Mapping[str, str], trusted: bool) -> str:
    chosen = {**settings}
    chosen.pop("cert", None)
    if trusted:
        chosen["cert"] = CA_BUNDLE
    lines = [f"{key} = {' '.join(value.split())}" for key, value in sorted(chosen.items()) if value.strip()]
    return "\n".join(["[global]", *lines]) + "\n"


def _write_npmrc(settings: Mapping[str, str], trusted: bool) -> str:
    chosen = {key: value for key, value in settings.items() if key not in ("ca", "cafile")}
    if trusted:
        chosen["cafile"] = CA_BUNDLE
    return "".join(f"{key}={value}\n" for key, value in sorted(chosen.items()))


def _read_bundles(answers: Answers) -> dict[str, str]:
    """The system's, and what pip and npm are told to trust. Only certificates: a key beside them stays outside."""
    found: dict[str, str] = {}
    system = next((path for path in _SYSTEM_BUNDLES if os.path.exists(path)), "")
    for path in (system, answers.pip.get("cert", ""), answers.npm.get("cafile", "")):
        if path:
            found |= _read_certificates(path)
    return found | certificates(answers.npm.get("ca", ""))


def _read_certificates(path: str) -> dict[str, str]:
    try:
        return certificates(Path(path).read_text(errors="replace"))
    except OSError:
        return {}  # the client would complain; here the others do


def _find_secrets(answers: Answers) -> tuple[str, ...]:
    found = []
    for path in sorted({*answers.made_from, "/usr/pip.conf", "/usr/etc/npmrc", "/usr/local/etc/npmrc"}):
        if path.startswith("/usr/") and path.endswith(("npmrc", "pip.conf")):
            try:
                text = Path(path).read_text(errors="replace")
            except OSError:
                continue
            if _SECRET.search(text):
                found.append(path)
    return tuple(found)

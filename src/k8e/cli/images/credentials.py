"""The user's credentials at a registry, as `docker login` and `podman login` stored them, read as the user.

Credential helpers are run here too, never by the daemon: they are the user's programs, and run with the user's rights.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from k8e.cli.process import Failure

HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
HUB_KEY = "https://index.docker.io/v1/"
PATIENCE = 30.0
LONGEST = 1 << 20
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def find_credentials(host: str, repository: str, environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """As the daemon takes them; None: the daemon asks the registry without credentials."""
    names = [f"{host}/{repository}", *(f"{host}/{one}" for one in parents(repository)), host]
    if host in HUB:
        names += [HUB_KEY, *HUB]
    for path in files(environ):
        config = read_config(path)
        if found := look_into(config, names, host, environ):
            return found
    return None


def parents(repository: str) -> Iterator[str]:
    """Yields a/b of a/b/c, then a: podman stores passwords for parts of a registry."""
    while "/" in repository:
        repository = repository.rpartition("/")[0]
        yield repository


def files(environ: Mapping[str, str]) -> list[Path]:
    home = Path(environ.get("HOME") or "~").expanduser()
    docker = environ.get("DOCKER_CONFIG")
    places = [environ.get("REGISTRY_AUTH_FILE"), f"{docker}/config.json" if docker else None]
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        places.append(f"{runtime}/containers/auth.json")
    config = environ.get("XDG_CONFIG_HOME") or home / ".config"
    places += [str(config) + "/containers/auth.json", str(home / ".docker/config.json")]
    return [Path(place) for place in places if place]


def read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(LONGEST))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        hint = "repair it, or log in anew"
        raise Failure("credentials_unreadable", f"{path} cannot be read", detail=str(error), hint=hint) from error
    return value if isinstance(value, dict) else {}


def look_into(
    config: Mapping[str, Any], names: list[str], host: str, environ: Mapping[str, str]
) -> dict[str, str] | None:
    """In docker's order: the helper for this registry, the helper for all, then the file's own entries."""
    helpers, auths = config.get("credHelpers"), config.get("auths")
    for name in names:
        if isinstance(helpers, dict) and isinstance(helpers.get(name), str):
            return ask_helper(helpers[name], name, environ)
    entries = auths if isinstance(auths, dict) else {}
    if isinstance(config.get("credsStore"), str):
        server = HUB_KEY if host in HUB else host
        if found := ask_helper(config["credsStore"], server, environ):
            return found
    for name in names:
        for spelling in (name, f"https://{name}", f"https://{name}/"):
            if isinstance(entries.get(spelling), dict) and (found := read_entry(entries[spelling])):
                return found
    return None


def read_entry(entry: Mapping[str, Any]) -> dict[str, str] | None:
    if isinstance(entry.get("identitytoken"), str) and entry["identitytoken"]:
        return {"identity_token": entry["identitytoken"]}
    user, password = entry.get("username"), entry.get("password")
    if isinstance(entry.get("auth"), str) and entry["auth"]:
        try:
            text = base64.b64decode(entry["auth"], validate=True).decode()
        except (binascii.Error, ValueError):
            return None
        user, _, password = text.rstrip("\0").partition(":")
    if isinstance(user, str) and isinstance(password, str) and user:
        return {"username": user, "password": password}
    return None


def ask_helper(name: str, server: str, environ: Mapping[str, str]) -> dict[str, str] | None:
    program = shutil.which(f"docker-credential-{name}", path=environ.get("PATH")) if _HELPER.fullmatch(name) else None
    if program is None:
        hint = f"install docker-credential-{name[:64]}, or take it out of docker's config.json"
        raise Failure("credential_helper_missing", f"the credential helper {name[:64]!r} is not there", hint=hint)
    try:
        done = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=PATIENCE, env=dict(environ)
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise Failure(
            "credential_helper_failed",
            f"the credential helper {name} failed",
            detail=type(error).__name__,
            hint=f"try `echo {server} | docker-credential-{name} get`, or log in again",
        ) from error  # its text may be a secret
    if not isinstance(answer, dict) or not isinstance(answer.get("Secret"), str):
        return None  # it has no credentials for this registry
    user = answer.get("Username")
    if user == "<token>":
        return {"identity_token": answer["Secret"]}
    return {"username": str(user or ""), "password": answer["Secret"]}

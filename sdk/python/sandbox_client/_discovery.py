"""Chooses the gateway and the credential; asks nothing of either yet. The command line and the TypeScript client choose
alike: sdk/discovery.json has the cases that all three are tested with, docs/gateway.md the order.

A credential that is given is used or refused. It is never replaced by another one, least of all by the rights that the
user of this process has on this machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from sandbox_client._errors import InvalidArgument
from sandbox_client._hints import find_hint
from sandbox_client._profiles import Profiles, find_folder

PORT: Final = 50051
LOCAL: Final = "local"  # as an endpoint: the daemon of this machine, through its socket
LOOPBACK: Final = ("127.0.0.1", "[::1]", "localhost")
_ENDPOINT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(?::([0-9]{1,5}))?")
_BARE_IPV6: Final = re.compile(r"[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*")


@dataclass(frozen=True, slots=True)
class Choice:
    """A gateway and the credential for it. Without an endpoint: the daemon of this machine, through its socket."""

    endpoint: str = ""
    api_key: str | None = field(default=None, repr=False)
    certificate_file: str = ""  # with key_file the client's certificate, else CAs to trust
    key_file: str = ""
    profile: str = ""
    token_file: str = ""  # of a service account; certificate_file has the CAs to trust


def choose(endpoint: str | None, api_key: str | None, profile: str | None) -> Choice:
    """An argument comes before its variable; a key that is one comes before the files that variables name."""
    given = _read("endpoint", endpoint)
    key = api_key if api_key is not None else os.environ.get("K8E_SANDBOX_APIKEY") or None
    name = _read("profile", profile)
    certificate_file = key_file = token_file = ""
    if api_key is None:
        names = ("CERT", "KEY", "TOKEN_FILE")
        certificate_file, key_file, token_file = (os.environ.get(f"K8E_SANDBOX_{part}", "") for part in names)
    if key_file and not certificate_file:
        code = "credential_incomplete"
        error = "K8E_SANDBOX_KEY is set, and K8E_SANDBOX_CERT is not"
        raise InvalidArgument(error, code=code, hint=find_hint(code))
    if token_file:
        return _choose_token(given, key, name, Choice("", None, certificate_file, key_file, token_file=token_file))
    if key_file and (key is not None or name is not None):
        other = "an API key" if key is not None else f"the profile {name}"
        raise _ambiguous(f"K8E_SANDBOX_CERT and K8E_SANDBOX_KEY are set, and {other} is given")
    if given == LOCAL:
        if key is not None or name is not None or certificate_file:
            raise _ambiguous("the socket of this machine's daemon takes no credential, and one is given")
        return Choice()
    if name is not None:
        address = read_address(Profiles().find(name).endpoint)
        if given is not None and read_address(given) != address:
            raise _ambiguous(f"the profile {name} is for {address}, and the endpoint says {given}")
        return Choice(address, key, profile="" if key is not None else name)
    if given is not None:
        address = read_address(given)
    elif key is not None or certificate_file:
        address = find_own_gateway()
    else:
        return _choose_without_credential()
    if key is not None or certificate_file:
        return Choice(address, key, certificate_file, key_file)
    return Choice(address, profile=Profiles().for_endpoint(address))


def _choose_token(given: str | None, key: str | None, name: str | None, files: Choice) -> Choice:
    """It is sent as it is, so it goes to a gateway of the given CA only."""
    if key is not None or name is not None or files.key_file or given == LOCAL:
        raise _ambiguous("K8E_SANDBOX_TOKEN_FILE is set, and another credential or `local` is given")
    if not files.certificate_file:
        code, error = "credential_incomplete", "K8E_SANDBOX_TOKEN_FILE is set, and K8E_SANDBOX_CERT is not"
        raise InvalidArgument(error, code=code, hint=find_hint(code))
    return replace(files, endpoint=find_own_gateway() if given is None else read_address(given))


def _choose_without_credential() -> Choice:
    """The daemon of this machine; the gateway that `k8e connect` was last used for, where there is no daemon."""
    if os.path.exists(f"{find_run_dir()}/k8e.sock") or not (find_folder() / "profiles.yaml").exists():
        return Choice()
    profiles = Profiles()
    name = profiles.current
    return Choice(read_address(profiles.find(name).endpoint), profile=name) if name else Choice()


def _read(name: str, argument: str | None) -> str | None:
    """The argument, else its variable. An empty argument says something, and is refused by those who read it."""
    return argument if argument is not None else os.environ.get(f"K8E_SANDBOX_{name.upper()}") or None


def _ambiguous(error: str) -> InvalidArgument:
    return InvalidArgument(error, code="target_ambiguous", hint=find_hint("target_ambiguous"))


def find_run_dir() -> str:
    return os.environ.get("K8E_RUN_DIR") or "/run/k8e"


def find_own_gateway() -> str:
    """Where the gateway of this machine listens: its daemon writes that into its run directory."""
    try:
        return read_address(Path(find_run_dir(), "gateway").read_text())
    except OSError:
        return f"127.0.0.1:{PORT}"


def read_address(text: str) -> str:
    """host:port, as gRPC takes it. People also write `https://` in front, or no port."""
    bare = text.strip().removeprefix("https://").removeprefix("grpcs://").rstrip("/")
    if _BARE_IPV6.fullmatch(bare):
        return f"[{bare}]:{PORT}"
    match = _ENDPOINT.fullmatch(bare)
    if match is None or not 0 < int(match[2] or PORT) < 65_536:
        code = "bad_endpoint"
        raise InvalidArgument(f"{text!r} is no endpoint", code=code, field="endpoint", hint=find_hint(code))
    return f"{match[1]}:{match[2] or PORT}"

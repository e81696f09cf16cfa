"""`k8e connect` and `k8e login`: gateways that have a name."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import grpc

from k8e.cli.process import Failure, read_all
from k8e.cli.remote import connection, discovery
from k8e.cli.remote.profiles import Credentials, Profiles
from k8e.cli.state import is_name
from k8e.cli.view import show_value
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS

_MAX_KEY = 4096


def connect(options: argparse.Namespace) -> int:
    """Exchanges an API key for a certificate and remembers the gateway."""
    endpoint = connection.read_endpoint(options.address or os.environ.get("K8E_SANDBOX_ENDPOINT") or _no_address())
    name = options.name or os.environ.get("K8E_SANDBOX_PROFILE") or "default"
    if not is_name(name):
        error = "a profile's name is 1 to 63 of A-Z a-z 0-9 _ - and does not begin with -"
        raise Failure("usage", error, hint="--name work")
    credentials = connection.log_in(endpoint, connection.read_key(_read_secret()))
    Profiles.save(name, credentials, make_current=True)
    show_value({"profile": name, **_describe(credentials)})
    return 0


def login(options: argparse.Namespace) -> int:
    """A new certificate for a profile: by an API key if one is given, else by the certificate, or the socket."""
    profiles = Profiles()
    name = options.name or os.environ.get("K8E_SANDBOX_PROFILE") or profiles.current
    if not name:
        raise Failure("no_such_profile", "there is no profile yet", hint="k8e connect HOST:PORT")
    known = profiles.find(name)
    apikey = os.environ.get("K8E_SANDBOX_APIKEY")
    if apikey:
        credentials = connection.log_in(known.endpoint, connection.read_key(apikey))
    else:
        credentials = discovery.renew(discovery.find_newest(known))
    Profiles.save(name, credentials, make_current=False)
    show_value({"profile": name, **_describe(credentials)})
    return 0


def _no_address() -> str:
    raise Failure("usage", "which gateway?", hint="k8e connect HOST:PORT")


def _read_secret() -> str:
    """Better not from the command line, where others on the machine can see it."""
    if given := os.environ.get("K8E_SANDBOX_APIKEY"):
        return given
    if sys.stdin is not None and sys.stdin.isatty():
        import getpass

        return getpass.getpass("API key: ")
    return read_all(0, _MAX_KEY).decode("ascii", "replace")


def _describe(credentials: Credentials) -> dict[str, Any]:
    """Who the gateway says we are: which shows that the certificate works."""
    roots, key = credentials.ca_certificate.encode(), credentials.key.encode()
    method = METHODS["Status"]
    with connection.open_channel(credentials.endpoint, roots, key, credentials.certificate.encode()) as channel:
        call = channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)
        try:
            status: Any = call(pb.StatusRequest(), timeout=connection.PATIENCE * 6)
        except grpc.RpcError as error:
            raise connection.explain(credentials.endpoint, error) from error
    return {
        "endpoint": credentials.endpoint,
        "name": status.name,
        "tenant_id": status.tenant_id,
        "scope": status.scope,
        "expires_at": credentials.expires_at,
    }

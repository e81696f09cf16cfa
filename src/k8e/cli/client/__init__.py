"""Clients of the service: a command calls methods of one client, and prints what they return.

service.py    the methods that every client has
local.py      HTTP to the daemon of this machine, on its unix socket (http.py, response.py, failures.py, launch.py)
../remote/    gRPC to a gateway; imported only when a gateway is meant
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.cli.client.service import Service

# Any of them means a gateway and not the daemon of this machine. Options become variables (commands.py).
GATEWAY_VARIABLES = ("K8E_SANDBOX_ENDPOINT", "K8E_SANDBOX_PROFILE", "K8E_SANDBOX_APIKEY", "K8E_SANDBOX_CERT")


class SessionName:
    """A session as the caller names it: by its id, and by tenant and owner where several sessions have that id."""

    def __init__(self, session_id: str, tenant_id: str = "", owner: str = "") -> None:
        self.session_id = session_id
        self.tenant_id = tenant_id
        self.owner = owner


class Answer:
    """One JSON object from the service: commands print its text, and parse it only when they need a member.
    `exit_code` is the command's, if the object is the result of a run; None is unknown, which is never success."""

    def __init__(self, text: bytes, exit_code: int | None = None) -> None:
        self.text = text
        self.exit_code = exit_code

    def parse(self) -> dict[str, Any]:
        from k8e.cli.client.failures import parse_object

        return parse_object(self.text)


def run_dir() -> str:
    return os.environ.get("K8E_RUN_DIR") or "/run/k8e"


def open_client() -> Service:
    """A client of the gateway that was named, else of this machine's daemon, else of the gateway that `k8e connect`
    stored last, else of the daemon, which is then started."""
    profile = find_gateway()
    if profile is None:
        from k8e.cli.client.local import LocalClient

        return LocalClient()
    from k8e.cli.remote.client import RemoteClient
    from k8e.cli.remote.discovery import find_target

    return RemoteClient(find_target(profile))


def find_gateway() -> str | None:
    """The connection profile of the gateway that is meant; empty: variables name it. None: this machine's daemon."""
    for name in GATEWAY_VARIABLES:
        if os.environ.get(name):
            return ""
    if os.path.exists(run_dir() + "/k8e.sock") or not os.path.exists(
        os.path.expanduser("~/.k8e/sandbox/profiles.yaml")
    ):
        return None
    from k8e.cli.remote.profiles import Profiles

    return Profiles().current or None

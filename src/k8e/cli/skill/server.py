"""The MCP server as it stands in an AI agent's file: the command that starts it, or its address. Pure but for the
command, which is looked for on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any, Final

from k8e.cli.process import Failure
from k8e.cli.skill.agents import Agent

Entry = dict[str, Any]

# Where every program looks, also one that no shell has started.
SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
# The variables that say which daemon or gateway is meant. AI agents start servers with few of their own variables, so
# the entry has them. An API key is a secret and never written.
VARIABLES: Final = (
    "K8E_RUN_DIR",
    "K8E_STATE_DIR",
    "K8E_CONFIG",
    "K8E_SANDBOX_ENDPOINT",
    "K8E_SANDBOX_PROFILE",
    "K8E_SANDBOX_CERT",
    "K8E_SANDBOX_KEY",
    "K8E_SANDBOX_TOKEN_FILE",
)


def describe_command(command: str, *arguments: str, variables: Mapping[str, str] | None = None) -> Entry:
    entry: Entry = {"command": command, "args": list(arguments)}
    return {**entry, "env": dict(variables)} if variables else entry


def describe_address(agent: Agent, address: str) -> Entry:
    if "://" in address:
        url = address
    else:
        host, _, port = address.rpartition(":")
        near = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        plain = host in ("", "localhost", "[::1]") or host.startswith("127.")  # elsewhere there is always TLS
        url = f"{'http' if plain else 'https'}://{near}:{port}/mcp"
    return {"type": "http", "url": url} if agent.typed else {agent.url_key: url}


def list_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def list_notes(entry: Entry, name: str, *, shared: bool) -> list[str]:
    """Tells what the user should know about an entry for the command `name`."""
    notes = []
    if shared and os.path.isabs(entry.get("command", "")):
        notes.append(f"{name} is not on the PATH: the entry has its path on this machine, which others may not have")
    if os.environ.get("K8E_SANDBOX_APIKEY") and "command" in entry:
        notes.append(
            "K8E_SANDBOX_APIKEY is a secret and not in the entry: k8e connect stores a profile that K8E_SANDBOX_PROFILE"
            " can name"
        )
    return notes


def find_command(name: str, *, shared: bool) -> str:
    """The bare name where the AI agent finds this installation by it, else the absolute path. A `shared` file belongs
    to a project, also on other machines: there the user's PATH counts. In a user's own file it does not, because a
    program of the desktop has another one than the shell."""
    own = find_own_command(name)
    found = shutil.which(name, path=None if shared else SYSTEM_PATH)
    return name if found is not None and os.path.realpath(found) == os.path.realpath(own) else own


def find_own_command(name: str) -> str:
    """Beside the program that runs, or its interpreter."""
    for program in (sys.argv[0], sys.executable):
        path = os.path.join(os.path.dirname(os.path.abspath(program)), name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    if (found := shutil.which(name)) is not None:
        return os.path.abspath(found)
    raise Failure("command_missing", f"this installation has no command {name}", hint="install k8e again")

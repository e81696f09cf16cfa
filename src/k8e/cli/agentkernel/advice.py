"""Hints in the words of `agentkernel run`, which knows what was given: a hint neither repeats nor contradicts it."""

from __future__ import annotations

import os
import shlex

from k8e.cli.agentkernel.plan import read_user_config
from k8e.profiles.mounts import PROJECT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from k8e.cli.agentkernel.options import CommandOptions
    from k8e.cli.agentkernel.plan import Plan
    from k8e.cli.process import ServiceError


def advise_on_denial(denial: Mapping[str, Any], plan: Plan, options: CommandOptions) -> str:
    """How the next run gets the access; the sandbox of this one is gone."""
    from k8e.policy import find_opening

    entry = find_opening(denial["reason"], denial["host"], denial["address"], denial["port"])
    if not entry:
        return str(denial["hint"])
    hosts = plan.policy.hosts
    asked = f"--allowed-hosts {shlex.quote(','.join((*hosts.names, entry)))}"
    if options.no_network:
        return f"--no-network closes everything: leave it out, or give {asked} instead of it"
    if not hosts.names and (place := find_closing(plan)):
        return f"{place} closes everything: take it out"
    if hosts.usual:
        alone = f"--allowed-hosts {shlex.quote(entry)} opens it alone"
        return f"`allow` of [security.domains] in agentkernel.toml adds it to the mode's hosts, {alone}"
    return asked


def find_closing(plan: Plan) -> str:
    """The place at which a file says `network = false`; empty: none does."""
    for config in (plan.config, read_user_config()):
        if config is not None and config.options.network is False:
            return config.where("network")
    return ""


def advise_on_program(error: ServiceError, command: Sequence[str], plan: Plan) -> ServiceError:
    """Gives the error another hint where the program is a file of this folder, which is not in the sandbox."""
    program = command[0] if command else ""
    mounted = any(mount.target == PROJECT for mount in plan.policy.mounts)
    if error.code == "program_not_found" and not mounted and "/" in program and os.path.exists(program):
        mounts = "--compatibility-mode claude (codex, gemini) mounts it"
        if plan.policy.profile == "restrictive":
            mounts = "the profile restrictive mounts none"
        error.hint = f"this folder is not in the sandbox: {mounts}"
    return error

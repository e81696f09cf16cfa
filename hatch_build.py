"""Puts into the wheel what is not in the repository: the agents, their loader and the guest's first process, compiled
for both architectures here and only if they are the ones that are pinned, the messages of the gateway, generated from
proto/, and the skill files.

An editable install builds nothing: a checkout uses build/agent/k8e-agent, which `make agent` makes in seconds, and what
`make setup` generates.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class AgentBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        sys.path.insert(0, str(root))
        try:
            from scripts import build_agent, build_proto
        finally:
            sys.path.remove(str(root))

        folder = root / "build" / "release"
        built = build_agent.build_release(root / "agent", folder)
        pinned = build_agent.read_pins()
        for key, digest in built.items():
            if digest != pinned[key]:
                raise RuntimeError(
                    f"the agent ({key}) has SHA-256 {digest}, pinned is {pinned[key]}. "
                    "After a change of the agent: make pin, and commit it with the change."
                )
        for architecture in build_agent.ARCHITECTURES:
            programs = [f"{name}-{architecture}" for name in ("k8e-agent", "k8e-agent-pod", "k8e-guest")]
            for name in (*programs, f"k8e-loader-{architecture}.so"):
                build_data["force_include"][str(folder / name)] = f"k8e/_agent/{name}"
        build_data["force_include"][str(root / "skills")] = "k8e/_skills"
        for module in build_proto.generate(root / "build" / "proto"):
            build_data["force_include"][str(module)] = f"k8e/doors/grpc/{module.name}"

"""Generates the messages (sandbox_pb2) into the wheel; nothing generated is in the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "sandbox/v1/sandbox.proto"


class MessagesBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        proto = Path(self.root).parent.parent / "proto"
        build = Path(self.root) / "build"
        build.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{proto}", f"--python_out={build}"]
        subprocess.run([*command, f"--pyi_out={build}", SOURCE], check=True)
        for name in ("sandbox_pb2.py", "sandbox_pb2.pyi"):
            build_data["force_include"][str(build / "sandbox" / "v1" / name)] = f"sandbox_client/{name}"

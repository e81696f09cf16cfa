"""Generates the Python code for proto/sandbox/v1/sandbox.proto. Nothing generated is committed.

    scripts/build_proto.py            for this checkout: the gateway and the Python SDK (scripts/setup calls it)
    scripts/build_proto.py FOLDER     somewhere else

One module with the messages, and its types. The service's methods are a table in our own code
(src/k8e/doors/grpc/methods.py), so no stubs are generated.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
# Compiled by this name, from the folder above: it is part of the descriptor, and two copies in one process (the SDK's
# and the gateway's) only get along when they agree in everything.
SOURCE = "sandbox/v1/sandbox.proto"
FOLDERS = (ROOT / "src" / "k8e" / "doors" / "grpc", ROOT / "sdk" / "python" / "sandbox_client")
MODULES = ("sandbox_pb2.py", "sandbox_pb2.pyi")


def generate(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--python_out={draft}"]
        subprocess.run([*command, f"--pyi_out={draft}", SOURCE], check=True)
        made = Path(draft, SOURCE).parent
        # Under their names only when they are complete: another process may be importing them.
        return [(made / name).replace(folder / name) for name in MODULES]


if __name__ == "__main__":
    for folder in [Path(sys.argv[1])] if len(sys.argv) > 1 else FOLDERS:
        generate(folder)

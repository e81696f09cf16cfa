"""Completes the folder that scripts/install.sh installs a cluster from: FOLDER has the programs (`k8e cluster build`).

    python -m scripts.build_cluster FOLDER WHEELS      adds k8e.tar.gz from the wheel in WHEELS, and writes SHA256SUMS

k8e.tar.gz has k8e and its locked dependencies, for the distribution's Python of this machine's version and
architecture. The same wheel and lock make the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Final

from k8e.cluster.image import pack
from k8e.cluster.programs import write_sums
from scripts.build_images import ImageFailed, install, list_files, say

START: Final = """\
#!/usr/bin/python3 -P
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))
from k8e.cli import main

sys.exit(main())
"""


def build_program(wheel: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="k8e-cluster-") as temporary:
        root = Path(temporary, "root")
        install(wheel, root, Path(temporary))
        (packages,) = root.glob("usr/local/lib/python3.*/dist-packages")
        files = {f"k8e/lib/{name}": content for name, content in list_files(packages) if "__pycache__" not in name}
    files["k8e/bin/k8e"] = (START.encode(), 0o755)
    return gzip.compress(pack(files, {}), 6, mtime=0)


def main() -> int:
    folder, wheels = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    found = sorted(wheels.glob("k8e-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        say(f"no wheel in {wheels}: make release")
        return 1
    try:
        (folder / "k8e.tar.gz").write_bytes(build_program(found[-1]))
    except ImageFailed as failed:
        say(str(failed))
        return 1
    sums = write_sums(folder)
    print(f"{sums} sha256:{hashlib.sha256(sums.read_bytes()).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

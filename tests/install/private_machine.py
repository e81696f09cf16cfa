"""This machine with the real paths of an installation, in a mount namespace: what is written below /usr, /etc, /var and
/root is in memory, and gone with it. Processes, cgroups and the network are the machine's own."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.machine import make_folder, wait_until

DEADLINE = 200.0
WRITTEN = ("usr", "etc", "var", "root")
# The machine's own engines are hidden: `k8e doctor --fix` looks after all of them.
ENTER = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$1/m"
for name in usr etc var root; do
    mkdir -p "$1/m/$name/upper" "$1/m/$name/work"
    chmod --reference="/$name" "$1/m/$name/upper"
    mount -t overlay overlay -o "lowerdir=/$name,upperdir=$1/m/$name/upper,workdir=$1/m/$name/work" "/$name"
done
mkdir -p /run/k8e-engines
mount -t tmpfs -o mode=0700 tmpfs /run/k8e-engines
rm -rf /var/lib/k8e/k8e.db /usr/local/lib/k8e
echo ready
exec sleep infinity
"""

CLEAR = """
import asyncio, sys
from pathlib import Path
from k8e.engine.local.doctor.fixes import remove_engine
from k8e.engine.local.layout import Layout
async def main():
    async for _ in remove_engine(Layout(Path(sys.argv[1], "s"), Path(sys.argv[1], "r"))):
        pass
asyncio.run(main())
"""


@dataclass
class PrivateMachine:
    pid: int
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LC_ALL": "C.UTF-8",
            # A daemon has an engine of its own, so that it does not meet that of the machine.
            "K8E_STATE_DIR": str(self.folder / "s"),
            "K8E_RUN_DIR": str(self.folder / "r"),
            "K8E_CONFIG": str(self.folder / "k8e.toml"),
            **find_index(),
        }

    def run(self, *words: str | Path, env: Mapping[str, str] | None = None, code: int | None = 0) -> str:
        done = subprocess.run(
            ["nsenter", f"--mount=/proc/{self.pid}/ns/mnt", "--wd=/", "--", *words],
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert code is None or done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def json(self, *words: str | Path, code: int | None = 0) -> Any:
        return json.loads(self.run(*words, code=code))

    def exists(self, path: str) -> bool:
        return self.run("sh", "-c", '[ ! -e "$0" ] && [ ! -L "$0" ] || echo there', path) == "there\n"

    def list_files(self) -> set[str]:
        """Everything below the folders in which an installation writes."""
        places = ["/usr/local", "/etc", "/var/lib/k8e", "/var/lib/systemd"]
        found = self.run("find", *places, "-not", "-type", "d", code=None).splitlines()
        return {name for name in found if "__pycache__" not in name}


@contextlib.contextmanager
def open_private_machine() -> Iterator[PrivateMachine]:
    with make_folder() as folder:
        (folder / "m").mkdir()
        (folder / "home").mkdir()
        os.chown(folder / "home", 65534, 65534)
        command = ["unshare", "--mount", "sh", "-c", ENTER, "sh", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout
                assert process.stdout.readline() == "ready\n"
                yield PrivateMachine(process.pid, folder)
            finally:
                clear_away(PrivateMachine(process.pid, folder))
                process.kill()


def clear_away(machine: PrivateMachine) -> None:
    """After a test that failed: the daemon, and what it has."""
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = int((machine.folder / "r" / "k8e.lock").read_text())
        if str(machine.folder).encode() in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not Path(f"/proc/{pid}").exists())
    if (machine.folder / "s").exists():
        machine.run(sys.executable, "-c", CLEAR, str(machine.folder), code=None)


def find_index() -> dict[str, str]:
    """uv reads none of pip's configuration: hand over what this machine's is."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = {}
    for line in told.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = str(ast.literal_eval(value))
    names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "cert": "SSL_CERT_FILE"}
    found = {names[key]: value for key, value in settings.items() if key in names}
    given = ("UV_DEFAULT_INDEX", "UV_INDEX", "SSL_CERT_FILE", "UV_CACHE_DIR", "HTTPS_PROXY", "https_proxy")
    return {**found, **{name: os.environ[name] for name in given if name in os.environ}}

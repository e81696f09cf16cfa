"""A machine as a user of `agentkernel` sees it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cli.machine import DEADLINE, Done, Machine

AGENTKERNEL = Path(sys.executable).with_name("agentkernel")
# What a machine without images, and without a network for sandboxes, can do.
PLAIN = ("--image", "host", "--no-network")


class Kernel(Machine):
    def call(
        self, *words: str | bytes, stdin: bytes | None = b"", env: Mapping[str, str] | None = None, **settings: Any
    ) -> Done:
        done = subprocess.run(
            [AGENTKERNEL, *words],
            input=stdin,
            capture_output=True,
            env={**self.env, **(env or {})},
            timeout=DEADLINE,
            cwd=self.home,
            **settings,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def run(self, *words: str | bytes, **settings: Any) -> Done:
        """In a sandbox of its own."""
        return self.call("run", *PLAIN, *words, **settings)

    @contextlib.contextmanager
    def starting(self, *words: str | bytes, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
        """The client at work; not when this ends."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(
            [AGENTKERNEL, "run", *PLAIN, *words], env=self.env, cwd=self.home, **{**pipes, **settings}
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

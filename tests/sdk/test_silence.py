"""The TypeScript SDK and a gateway that hangs, then is killed: calls have deadlines, and a command that may have run
is not called one that did not. Python's is in tests/gateway/test_silence.py."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.cli.test_silence import stopped
from tests.gateway.test_silence import Remote, remote  # noqa: F401 - a fixture
from tests.sdk.conftest import TYPESCRIPT

PROGRAM = """
import { SandboxClient } from "../../sandbox_client.js";
import { createInterface } from "node:readline";

const [endpoint, key, session] = process.argv.slice(2);
const client = new SandboxClient({ endpoint: endpoint!, tenantId: "acme", apiKey: key! });
const name = (error: unknown) => (error as Error).name;
const lost = client.exec(session!, "touch ran; sleep 1000", 1000).catch(name);
for await (const line of createInterface({ input: process.stdin })) {
  console.log(line, line === "hangs" ? await client.status().catch(name) : await lost);
  if (line === "killed") {
    console.log("again", await client.exec(session!, "true").catch(name));
    process.exit(0);
  }
}
"""


@pytest.mark.usefixtures("built")
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")
def test_the_typescript_library_tells_both_apart(remote: Remote) -> None:  # noqa: F811
    folder = TYPESCRIPT / "build" / "silence"
    folder.mkdir(parents=True, exist_ok=True)
    source, bundle = (folder / f"program-{os.getpid()}.{end}" for end in ("ts", "mjs"))
    source.write_text(PROGRAM)
    words = ("--platform=node", "--format=esm", "--external", "@grpc/*,yaml", "-o", str(bundle))
    rolldown = str(TYPESCRIPT / "node_modules" / ".bin" / "rolldown")
    subprocess.run([rolldown, str(source), *words], check=True, capture_output=True, cwd=TYPESCRIPT)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    arguments = [remote.house.endpoint, remote.key, remote.session]
    with subprocess.Popen(["node", bundle, *arguments], text=True, bufsize=1, **pipes) as program:  # type: ignore[call-overload]
        remote.wait_for("ran")
        with stopped(remote.daemon):
            print("hangs", file=program.stdin, flush=True)
            assert program.stdout.readline() == "hangs DeadlineExceeded\n", program.stderr.read()
        remote.kill()
        print("killed", file=program.stdin, flush=True)
        assert program.stdout.read() == "killed RunLost\nagain Unavailable\n"
        assert program.wait(60) == 0
    source.unlink()
    bundle.unlink()

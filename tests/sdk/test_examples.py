"""The examples of the document that the SDKs implement, as they are printed there (examples/).

Some are parts of a program: what stands before them on that page is put in front, and what shows how they went
behind. `kata` is not to be had here, which has to be said; the same lines with another runtime have to work.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.machine import Machine
from tests.sdk.conftest import RUNTIME, TYPESCRIPT

EXAMPLES = Path(__file__).with_name("examples")
SDK = TYPESCRIPT.parent / "python"
AVERAGE = re.compile(r"numbers: \[[\d, ]+\]\naverage: [\d.]+\n")

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")


def run_python(before: str, name: str, after: str = "", *, replace: tuple[str, str] = ("", "")) -> tuple[str, str]:
    program = before + (EXAMPLES / name).read_text().replace(*replace) + after
    env = {**os.environ, "PYTHONPATH": str(SDK)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    return done.stdout, done.stderr


def run_typescript(before: str, name: str, after: str = "", *, replace: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """In a folder where `./sandbox_client` is the SDK, as the page has it."""
    program = before + (EXAMPLES / name).read_text().replace(*replace) + after
    folder = TYPESCRIPT / "build" / "examples"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sandbox_client.ts").write_text('export * from "../../sandbox_client.js";\n')
    path = folder / f"{name}-{os.getpid()}.ts"
    path.write_text(program)
    # Bundled by what vitest brings, for node to run.
    bundle = path.with_suffix(".mjs")
    words = ("--platform=node", "--format=esm", "--external", "@grpc/*,yaml", "-o", str(bundle))
    rolldown = str(TYPESCRIPT / "node_modules" / ".bin" / "rolldown")
    subprocess.run([rolldown, str(path), *words], check=True, capture_output=True, cwd=TYPESCRIPT)
    done = subprocess.run(["node", bundle], env=dict(os.environ), capture_output=True, text=True, timeout=300)
    path.unlink()
    bundle.unlink()
    return done.stdout, done.stderr


IMPORT_PYTHON = "from sandbox_client import SandboxClient\n"
IMPORT_TYPESCRIPT = 'import { SandboxClient } from "./sandbox_client";\n'
CODE = "code = 'print(6 * 7)'\n"
OPEN = f"{IMPORT_TYPESCRIPT}const client = new SandboxClient();\nconst code = 'print(6 * 7)';\n"


def test_hello(machine: Machine) -> None:
    assert run_python("", "hello.py") == ("hello\n\n0\n", "")


def test_average(machine: Machine) -> None:
    stdout, stderr = run_python("", "average.py")
    assert AVERAGE.match(stdout), (stdout, stderr)


def test_workflow(machine: Machine) -> None:
    program = "    print(result.stderr.splitlines()[-1], client.run('pip --version').session_id == result.session_id)\n"
    stdout, stderr = run_python(IMPORT_PYTHON, "workflow.py", program)
    assert "analyze.py" in stdout, stderr
    assert stdout.endswith(" True\n")


def test_a_runtime_that_is_not_there_is_said_and_another_works(machine: Machine) -> None:
    stdout, stderr = run_python(CODE, "session.py")
    assert "Unavailable: runtime kata does not work here" in stderr
    replaced = run_python(CODE, "session.py", "    print(result.stdout, end='')\n", replace=('"kata"', f'"{RUNTIME}"'))
    assert (stdout, replaced) == ("", ("42\n", ""))


@needs_npm
@pytest.mark.usefixtures("built")
class TestTypeScript:
    def test_hello(self, machine: Machine) -> None:
        assert run_typescript("", "hello.ts") == ("hello\n\n", "")

    def test_average(self, machine: Machine) -> None:
        stdout, stderr = run_typescript(IMPORT_TYPESCRIPT, "average.ts")
        assert AVERAGE.match(stdout), (stdout, stderr)

    def test_workflow(self, machine: Machine) -> None:
        # Once with pandas (above) is enough to wait for.
        after = "console.log(result.stderr);\n"
        stdout, stderr = run_typescript(IMPORT_TYPESCRIPT, "workflow.ts", after, replace=("pandas", "six"))
        assert "analyze.py" in stdout, stderr

    def test_a_runtime_that_is_not_there_is_said_and_another_works(self, machine: Machine) -> None:
        _, stderr = run_typescript(OPEN, "session.ts")
        assert "runtime kata does not work here" in stderr
        after = "console.log(result.stdout.trim());\nawait client.close();\n"
        assert run_typescript(OPEN, "session.ts", after, replace=('"kata"', f'"{RUNTIME}"')) == ("42\n", "")

    def test_stream(self, machine: Machine) -> None:
        before = (
            f"{OPEN}const sid = await client.createSession({{ runtimeClass: '{RUNTIME}' }});\n"
            "await client.writeFile(sid, '/workspace/train.py', \"print('epoch 1')\\nprint('epoch 2')\\n\");\n"
        )
        after = "await client.destroySession(sid);\nawait client.close();\n"
        assert run_typescript(before, "stream.ts", after) == ("epoch 1\nepoch 2\n", "")

    def test_oneshot(self, machine: Machine) -> None:
        assert run_typescript("", "oneshot.ts", "console.log(stdout);\n") == ("hello\n\n", "")

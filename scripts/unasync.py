"""Derives the synchronous half of the Python SDK from the asynchronous one.

scripts/unasync.py            writes sdk/python/sandbox_client/_sync.py
scripts/unasync.py --check    fails when it is not what would be written (make lint)
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "sdk" / "python" / "sandbox_client"

REPLACEMENTS = [
    (
        r'^"""The client, written once.*?"""',
        '"""The client. Generated from _async.py by scripts/unasync.py: change that one."""',
    ),
    (r"await asyncio\.to_thread\((\w+), ", r"\1("),
    (r"asyncio\.Lock", "threading.Lock"),
    (r"import asyncio\n", ""),
    (r"import contextlib\nimport time\n", "import contextlib\nimport threading\nimport time\n"),
    (r"import grpc\nimport grpc\.aio\n", "import grpc\n"),
    (r"grpc\.aio\.", "grpc."),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\basync_sandbox_session\b", "sandbox_session"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\b__a(enter|exit|iter)__", r"__\1__"),
    (r"\baclose\b", "close"),
    (r"\basync (?=def|with|for)", ""),
    (r"\bawait ", ""),
    (r"many tasks at once", "many threads at once"),
]


def derive(source: str) -> str:
    for pattern, replacement in REPLACEMENTS:
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-m", "ruff"]
    for words in (["check", "--fix-only", "--select", "I", "-q"], ["format", "-q"]):
        filled = [*command, *words, "--stdin-filename", str(FOLDER / "_sync.py"), "-"]
        source = subprocess.run(filled, input=source, text=True, stdout=subprocess.PIPE, check=True).stdout
    return source


def main() -> int:
    derived = derive((FOLDER / "_async.py").read_text())
    target = FOLDER / "_sync.py"
    if "--check" not in sys.argv:
        target.write_text(derived)
        return 0
    if target.read_text() == derived:
        return 0
    print("sdk/python/sandbox_client/_sync.py is not what _async.py gives: run scripts/unasync.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

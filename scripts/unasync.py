"""Derives the synchronous half of the Python SDK from the asynchronous one.

scripts/unasync.py            writes sdk/python/sandbox_client/_sync*.py
scripts/unasync.py --check    fails when they are not what would be written (make lint)
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
        r'\A"""([\w ]+), written once: _sync(\w*)\.py is\b.*?"""',
        r'"""\1. Generated from _async\2.py by scripts/unasync.py: change that one."""',
    ),
    (r"await asyncio\.to_thread\(([\w.]+), ", r"\1("),
    (r"\breturn await call$", "return call.result()"),
    (r" = method\(aiter\(pieces\),", " = method.future(iter(pieces),"),
    (r"\b_async(?=_\w+ import)", "_sync"),
    (r"asyncio\.Lock", "threading.Lock"),
    (r"asyncio\.sleep", "time.sleep"),
    (r"import asyncio\n(?=.*asyncio\.Queue)", "import queue\n"),
    (r"asyncio\.Queue(?!Empty|Full)", "queue.Queue"),
    (r"asyncio\.Queue(?=Empty|Full)", "queue."),
    (r"\ba(next|iter)\(", r"\1("),
    (r"import asyncio\n", ""),
    (r"import contextlib\nimport time\n", "import contextlib\nimport threading\nimport time\n"),
    (r"import grpc\nimport grpc\.aio\n", "import grpc\n"),
    (r"grpc\.aio\.", "grpc."),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\basync_sandbox_session\b", "sandbox_session"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\b__a(enter|exit|iter)__", r"__\1__"),
    (r"\baclose\b", "close"),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r", Awaitable\b", ""),
    (r"\basync (?=def|with|for)", ""),
    (r"\bawait ", ""),
    (r"by many tasks at once", "by many threads at once"),
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
    stale = []
    for source in sorted(FOLDER.glob("_async*.py")):
        derived = derive(source.read_text())
        target = FOLDER / source.name.replace("_async", "_sync")
        if "--check" not in sys.argv:
            target.write_text(derived)
        elif not target.exists() or target.read_text() != derived:
            stale.append(f"{target.relative_to(ROOT)} is not what {source.name} gives: run scripts/unasync.py")
    print(*stale, sep="\n", end="\n" if stale else "", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

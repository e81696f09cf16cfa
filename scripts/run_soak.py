"""Runs the long forms of what `make test` has a share of, to their end: what `make soak` does.

Each file is a run of its own, two at a time, the longest first. A failure ends its file's test and no other file; what
each said is in build/soak, and how each ended is printed when it does and again at the end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "soak"
# How long a file may take in all, and one test of it: neither is a promise, both end what hangs.
FILE_SECONDS, TEST_SECONDS = 7200, 1800
AMOUNTS = {
    "K8E_SOAK": "1",
    "K8E_KILLS": "150",
    "K8E_CYCLES": "400",
    "K8E_FUZZ_CASES": "30000",
    "K8E_ROUNDS": "10",
}
# The longest first: with two at a time the last one should be short. A folder is one run, as a file is: all tests of
# tests/kubernetes use one cluster.
FILES = (
    "tests/kubernetes",
    "tests/engine/vm/test_vm_crashes.py",
    "tests/engine/test_crashes.py",
    "tests/engine/test_cycles.py",
    "tests/engine/vm/attacks",
    "tests/engine/vm/test_vm_contract.py",
    "tests/engine/vm/test_vm_conformance.py",
    "tests/test_agent_fuzz.py",
    "tests/core/test_crashes.py",
    "tests/parking/test_same.py",
    "tests/test_conformance.py",
    "tests/engine/test_conformance.py",
    "tests/engine/test_image_programs.py",
    "tests/engine/vm/test_availability.py",
    "tests/engine/vm/test_machines.py",
    "tests/engine/vm/test_vm_commands.py",
    "tests/engine/vm/test_guest.py",
    "tests/engine/vm/test_vm_doctor.py",
    "tests/engine/vm/test_vm_images.py",
    "tests/engine/vm/test_vm_sessions.py",
    "tests/images/test_base.py",
    "tests/engine/test_warm.py",
    "tests/images/test_fuzz.py",
    "tests/gateway/test_limits.py",
    "tests/gateway/test_many_clients.py",
    "tests/mcp/test_other_clients.py",
)


@dataclass(frozen=True, slots=True)
class Ending:
    file: str
    good: bool
    words: str
    seconds: float

    def __str__(self) -> str:
        verdict = "passed" if self.good else "FAILED"
        return f"{verdict}  {self.file}  {self.words}  {self.seconds:.0f} s"


def log_of(file: str) -> Path:
    return LOGS / (file.removeprefix("tests/").replace("/", "-").removesuffix(".py") + ".log")


def run(file: str) -> Ending:
    # Each has a cache of its own: they run side by side.
    command = [sys.executable, "-m", "pytest", file, f"--timeout={TEST_SECONDS}", "--durations=10"]
    command += ["-o", f"cache_dir={LOGS / 'cache' / log_of(file).stem}"]
    began = time.monotonic()
    with log_of(file).open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            status = process.wait(FILE_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return Ending(file, False, f"not at its end after {FILE_SECONDS} s", time.monotonic() - began)
    lines = log_of(file).read_text(errors="replace").strip().splitlines() or ["said nothing"]
    words = re.sub(r"^=+ | in [0-9.]+s.*$", "", lines[-1])
    return Ending(file, status == 0, words, time.monotonic() - began)


def announce(ending: Ending) -> Ending:
    print(f"soak: {ending}", flush=True)
    if not ending.good:
        failures = [line for line in log_of(ending.file).read_text(errors="replace").splitlines() if line[:6] in WORDS]
        print(*failures, sep="\n", flush=True)
    return ending


WORDS = ("FAILED", "ERROR ")


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from tests.shares import settle

    for name, value in AMOUNTS.items():
        os.environ.setdefault(name, value)
    settle(os.environ)
    (LOGS / "cache").mkdir(parents=True, exist_ok=True)
    files = arguments or FILES
    chosen = " ".join(f"{name}={os.environ[name]}" for name in (*AMOUNTS, "K8E_SHARE", "K8E_SEED"))
    print(f"soak: {len(files)} files, two at a time, with {chosen}; what each says is in {LOGS}", flush=True)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        endings = list(pool.map(lambda file: announce(run(file)), files))
    print(f"\nsoak: {time.monotonic() - began:.0f} s in all")
    for ending in endings:
        print(f"soak: {ending}")
    bad = sum(not ending.good for ending in endings)
    print(f"soak: {'failed' if bad else 'passed'}: {len(endings)} files, {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

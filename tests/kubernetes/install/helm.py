"""helm, with the chart of deploy/helm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm"
# All that has to be given.
LEAST = {
    "images": {"registry": "k8e.local", "pullPolicy": "Never"},
    "sandboxes": {"image": "k8e.local/tools:test", "egress": "policy"},
}


def merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {**values, **changes}
    for key in values.keys() & changes.keys():
        if isinstance(values[key], dict) and isinstance(changes[key], dict):
            both[key] = merge(values[key], changes[key])
    return both


class Helm:
    def __init__(self, program: Path, folder: Path, kubeconfig: Path | None = None) -> None:
        self._program = program
        self._folder = folder
        # Nothing of this machine's own helm.
        homes = {f"HELM_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        self._env = {"PATH": os.environ["PATH"], "HOME": str(folder), "KUBECONFIG": str(kubeconfig or "/none"), **homes}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self._program, *words], env=self._env, capture_output=True, text=True, timeout=200)

    def __call__(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, f"helm {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def refused(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode != 0, f"helm {' '.join(words)}: {done.stdout}"
        return done.stderr + done.stdout

    def values(self, changes: dict[str, Any] | None = None) -> str:
        path = self._folder / f"values-{len(list(self._folder.glob('values-*')))}.yaml"
        path.write_text(yaml.safe_dump(merge(LEAST, changes or {})))
        return f"--values={path}"

    def render(self, changes: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        text = self("template", "boxes", str(CHART), "--namespace=house", self.values(changes))
        return [document for document in yaml.safe_load_all(text) if document]

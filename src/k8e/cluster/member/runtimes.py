"""Runtimes of sandboxes that this machine has, found at every start: what containerd and the cluster are told."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LABEL: Final = "runtime.k8e.dev/"


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str  # of the RuntimeClass
    handler: str  # containerd's name
    kind: str  # which shim it starts
    programs: tuple[str, ...]  # all have to be there
    needs_kvm: bool = False


RUNTIMES: Final = (
    Runtime("native", "runc", "io.containerd.runc.v2", ("runc", "containerd-shim-runc-v2")),
    Runtime("gvisor", "runsc", "io.containerd.runsc.v1", ("runsc", "containerd-shim-runsc-v1")),
    Runtime("kata", "kata", "io.containerd.kata.v2", ("containerd-shim-kata-v2",), needs_kvm=True),
    Runtime("firecracker", "kata-fc", "io.containerd.kata-fc.v2", ("containerd-shim-kata-fc-v2", "firecracker"), True),
)


def find_runtimes(path: str, device: Path = Path("/dev/kvm")) -> list[Runtime]:
    """Returns those whose programs are on the PATH, and whose device is there."""
    kvm = device.exists()
    return [
        runtime
        for runtime in RUNTIMES
        if all(shutil.which(program, path=path) for program in runtime.programs) and (kvm or not runtime.needs_kvm)
    ]


def describe_containerd(runtimes: Iterable[Runtime]) -> str:
    """Returns their part of containerd's configuration."""
    section = '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes'
    return "".join(f'{section}.{each.handler}]\nruntime_type = "{each.kind}"\n' for each in runtimes)


def label_node(runtimes: Sequence[Runtime]) -> dict[str, str | None]:
    """Returns the labels of a node; None removes that of a runtime which is not there any more."""
    return {f"{LABEL}{each.name}": "true" if each in runtimes else None for each in RUNTIMES}


def describe_classes(nodes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a RuntimeClass for each runtime that a node has; pods go to nodes that have it."""
    labels = {label for node in nodes for label in (node["metadata"].get("labels") or {})}
    return [
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": runtime.name},
            "handler": runtime.handler,
            "scheduling": {"nodeSelector": {f"{LABEL}{runtime.name}": "true"}},
        }
        for runtime in RUNTIMES
        if f"{LABEL}{runtime.name}" in labels
    ]

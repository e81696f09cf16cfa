"""The files that all servers of a cluster have in common: authorities with their keys, the key that signs tokens of
service accounts, the one that encrypts Secrets, and the workers' token. A further server gets them, and a backup
contains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from k8e.cluster.errors import ClusterError
from k8e.cluster.member.layout import AUTHORITIES, Layout
from k8e.cluster.trust.leaves import read_if_there, write_file


def list_key_files(layout: Layout) -> dict[str, Path]:
    """By name. A key comes after its certificate: without it there is no authority yet."""
    found = {}
    for name in AUTHORITIES:
        found[f"{name}/ca.crt"] = layout.authorities / name / "ca.crt"
        found[f"{name}/ca.key"] = layout.authorities / name / "ca.key"
    found["encryption.key"] = layout.encryption_key
    found["node-token"] = layout.node_token
    found["service-account.key"] = layout.signing_key
    return found


def read_keys(layout: Layout) -> dict[str, bytes]:
    found = {name: read_if_there(path) for name, path in list_key_files(layout).items()}
    if missing := [name for name, content in found.items() if content is None]:
        text = f"this server does not have all keys of its cluster: {', '.join(missing)}"
        raise ClusterError("keys_missing", text, hint="restore the server's folder from a backup")
    return {name: content for name, content in found.items() if content is not None}


def write_keys(layout: Layout, keys: Mapping[str, bytes]) -> None:
    """Writes the keys of a cluster to a machine that has none, or the same. It can be repeated."""
    files = list_key_files(layout)
    if set(keys) != set(files):
        hint = "both sides have to be the same version of k8e"
        raise ClusterError("keys_unknown", "these are not the keys of a cluster of this version", hint=hint)
    check_keys(layout, keys)
    for name, path in files.items():
        write_file(path, keys[name], mode=0o644 if name.endswith(".crt") else 0o600)


def check_keys(layout: Layout, keys: Mapping[str, bytes]) -> None:
    """Refuses keys on a machine that has those of another cluster."""
    for name, path in list_key_files(layout).items():
        there = read_if_there(path)
        if name.endswith("ca.key") and there is not None and there != keys.get(name):
            text = "this machine is a server of another cluster"
            hint = f"remove that one first, `k8e cluster uninstall`; its keys are in {layout.authorities}"
            raise ClusterError("other_cluster", text, hint=hint)

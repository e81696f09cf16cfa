"""The sandbox gateway of a server: the daemon with the Kubernetes engine, on this cluster, under the same supervisor.
Its account can do what the engine needs, in the namespace of sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from k8e.cluster.errors import StartFailed
from k8e.cluster.member.control_plane import ControlPlane
from k8e.cluster.member.images import NodeImages
from k8e.cluster.member.layout import SANDBOXES, Layout
from k8e.cluster.member.node import accepts
from k8e.cluster.supervisor import Program
from k8e.cluster.trust.authority import Leaf
from k8e.cluster.trust.leaves import describe_kubeconfig, name_file, write_file

PORT: Final = 50051
_USER: Final = "k8e:gateway"
_NAME: Final = "k8e-gateway"
_RBAC: Final = "rbac.authorization.k8s.io"
_SETTINGS: Final = Path("/etc/k8e/k8e.toml")


class Gateway:
    def __init__(
        self, layout: Layout, control_plane: ControlPlane, images: NodeImages, node: str, program: Sequence[str]
    ) -> None:
        self._layout = layout
        self._images = images
        self._node = node
        self._program = program
        _refuse_sessions(layout)
        self.certificate = control_plane.leaves.write(
            "gateway/client", control_plane.authorities["client"], Leaf(_USER)
        )
        self._url = control_plane.url
        self._authority = control_plane.authorities["server"].certificate

    def program(self) -> Program:
        kubeconfig = self._layout.tls / "gateway" / "kubeconfig"
        write_file(kubeconfig, describe_kubeconfig(self._url, self._authority, name_file(self.certificate)))
        settings = self._layout.server / "gateway.toml"
        own = self._describe_settings(kubeconfig)
        write_file(settings, write_toml(merge_settings(read_settings(_SETTINGS), own)).encode())
        environment = {
            "K8E_STATE_DIR": str(self._layout.state),
            "K8E_RUN_DIR": str(self._layout.run),
            "K8E_CONFIG": str(settings),
        }
        argv = [*self._program, "server", "--engine", "kubernetes"]
        return Program(
            "gateway", argv, self._serves, 120.0, self._lives, reads=(settings, kubeconfig), environment=environment
        )

    def _describe_settings(self, kubeconfig: Path) -> dict[str, dict[str, Any]]:
        return {
            "kubernetes": {
                "namespace": SANDBOXES,
                "kubeconfig": str(kubeconfig),
                "image": self._images.sandbox,
                "agent_image": self._images.agent,
                "egress": "node",
                "native": "native",
                "pull_policy": "IfNotPresent",
            },
            "gateway": {"listen": f"0.0.0.0:{PORT}", "names": [self._node, self._url.split("//")[1].split(":")[0]]},
        }

    async def _serves(self) -> bool:
        return await accepts("127.0.0.1", PORT) and await self._lives()

    async def _lives(self) -> bool:
        """Asks at the unix socket."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(10):
                reader, writer = await asyncio.open_unix_connection(str(self._layout.run / "k8e.sock"))
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                line = await reader.readline()
                writer.close()
                return b" 200 " in line
        return False


def describe_sandboxes() -> list[dict[str, Any]]:
    """The namespace of sandboxes, and the rights of the gateway."""
    from k8e.engine.kubernetes.doctor.rights import NEEDED

    rules: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for right in NEEDED:
        rules[right.everywhere].append(
            {"apiGroups": [right.group], "resources": [right.resource], "verbs": [right.verb]}
        )
    subjects = [{"apiGroup": _RBAC, "kind": "User", "name": _USER}]
    inside = {"name": _NAME, "namespace": SANDBOXES}
    version = f"{_RBAC}/v1"
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": SANDBOXES, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        },
        {"apiVersion": version, "kind": "Role", "metadata": inside, "rules": rules[False]},
        {
            "apiVersion": version,
            "kind": "RoleBinding",
            "metadata": inside,
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": _NAME},
            "subjects": subjects,
        },
        {"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": _NAME}, "rules": rules[True]},
        {
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": _NAME},
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": _NAME},
            "subjects": subjects,
        },
    ]


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the administrator's settings, as every daemon of this machine has them."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        hint = f"correct {path}; docs/settings.md has its form"
        raise StartFailed("settings_unreadable", f"{path} cannot be read", detail=str(error), hint=hint) from error


def merge_settings(given: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Keeps what the administrator has set; the rest of these sections is ours."""
    merged = dict(given)
    for section, values in own.items():
        merged[section] = {**values, **dict(given.get(section) or {})}
    return merged


def write_toml(value: Mapping[str, Any], prefix: str = "") -> str:
    """A file of settings: tables of plain values, lists, and lists of flat tables. JSON's texts are TOML's, too."""
    plain = {name: each for name, each in value.items() if not isinstance(each, dict)}
    lines = [f"{_key(name)} = {_value(each)}\n" for name, each in plain.items()]
    for name, each in value.items():
        if isinstance(each, dict):
            path = f"{prefix}{_key(name)}"
            lines.append(f"\n[{path}]\n{write_toml(each, f'{path}.')}")
    return "".join(lines)


def _key(name: str) -> str:
    return json.dumps(name)


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(name)} = {_value(each)}' for name, each in value.items())}}}"
    return json.dumps(value)


def _refuse_sessions(layout: Layout) -> None:
    """Sessions of a daemon of this machine alone would be lost."""
    if (layout.state / "k8e.db").exists() and not (layout.state / "kubernetes" / "gateway.pem").exists():
        hint = "`k8e uninstall`, or move /var/lib/k8e away; or --disable-sandbox-matrix"
        raise StartFailed("machine_in_use", "this machine has sandboxes of its own daemon", hint=hint)

"""Objects and controllers that a cluster has from the start: RuntimeClasses, agent-sandbox, and the pause image."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from k8e.cluster.api import Api, Question, becomes_true
from k8e.cluster.build import Components
from k8e.cluster.components import COMPONENTS
from k8e.cluster.errors import StartFailed
from k8e.cluster.image import PAUSE, make_image
from k8e.cluster.node import RUNTIMES
from k8e.cluster.place import Addresses, Place
from k8e.cluster.secrets import Secrets
from k8e.cluster.supervisor import Program
from k8e.cluster.trust.authority import Leaf

_CONTROLLER: Final = "k8e:agent-sandbox-controller"
_CRDS: Final = (
    "sandboxes.agents.x-k8s.io",
    "sandboxclaims.extensions.agents.x-k8s.io",
    "sandboxtemplates.extensions.agents.x-k8s.io",
    "sandboxwarmpools.extensions.agents.x-k8s.io",
)


class Addons:
    def __init__(
        self,
        place: Place,
        addresses: Addresses,
        components: Components,
        secrets: Secrets,
        api: Api,
        environment: Mapping[str, str],
    ) -> None:
        self._place = place
        self._addresses = addresses
        self._components = components
        self._secrets = secrets
        self._api = api
        self._environment = environment

    async def import_pause(self) -> None:
        pause = self._components.program("pause").read_bytes()
        image = make_image(PAUSE, {"pause": pause}, ["/pause"])
        command = [str(self._components.program("ctr")), f"--address={self._place.containerd}", "--namespace=k8s.io"]
        await self._run(*command, "images", "import", "-", given=image)

    async def apply(self, further: Iterable[dict[str, Any]] = ()) -> None:
        """Applies all objects in one call; server-side, because the CRDs are too large for the other way."""
        objects = {"apiVersion": "v1", "kind": "List", "items": [*_objects(), *self._upstream_objects(), *further]}
        command = [str(self._components.program("kubectl")), f"--kubeconfig={self._place.kubeconfig}"]
        await self._run(*command, "apply", "--server-side", "--filename=-", given=json.dumps(objects).encode())
        for name in _CRDS:
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
            await self._until(self._api.has_condition(path, "Established"), f"the CRD {name}")

    def controller(self) -> Program:
        kubeconfig = self._place.secrets / "agent-sandbox.kubeconfig"
        self._secrets.write_kubeconfig(kubeconfig, self._addresses.api, Leaf(_CONTROLLER))
        command = [
            str(self._components.program("agent-sandbox-controller")),
            f"--kubeconfig={kubeconfig}",
            "--extensions",
            "--leader-elect=false",
            "--enable-webhook=false",
            "--metrics-bind-address=127.0.0.1:8080",
            "--health-probe-bind-address=127.0.0.1:8081",
        ]
        return Program("agent-sandbox-controller", command)

    async def wait(self) -> None:
        """Returns when a pod can be created: its account is made by a controller, a moment after the namespace."""
        path = "/api/v1/namespaces/default/serviceaccounts/default"
        await self._until(self._api.is_served(path), "the account of pods in the namespace default")

    def _upstream_objects(self) -> Iterator[dict[str, Any]]:
        """The roles and CRDs of agent-sandbox."""
        for file in next(component for component in COMPONENTS if component.name == "agent-sandbox").files:
            for found in yaml.safe_load_all(self._components.file("agent-sandbox", Path(file).name).read_text()):
                if found["kind"] == "CustomResourceDefinition":
                    serve_one_version(found["spec"])
                yield found

    async def _until(self, question: Question, what: str, patience: float = 60.0) -> None:
        if not await becomes_true(question, patience):
            raise _failure(f"{what} is not there after {patience:.0f} s", "")

    async def _run(self, *command: str, given: bytes) -> None:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
        )
        output, _ = await process.communicate(given)
        if process.returncode != 0:
            raise _failure(f"{command[0]} ended with {process.returncode}", output.decode(errors="replace")[-1500:])


def _objects() -> list[dict[str, Any]]:
    classes: list[dict[str, Any]] = [
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler}
        for name, handler in RUNTIMES.items()
    ]
    bindings = [
        _bind("agent-sandbox-controller", _CONTROLLER),
        _bind("agent-sandbox-controller-extensions", _CONTROLLER),
        # The role of a node's proxy is bound to a user by Kubernetes itself; the kubelet's own API has none.
        _bind("system:kubelet-api-admin", "kube-apiserver"),
    ]
    return classes + bindings


def serve_one_version(spec: dict[str, Any]) -> None:
    """Old versions are translated by a webhook of the controller, which does not run: the API server would ask for it
    every second."""
    spec["conversion"] = {"strategy": "None"}
    for version in spec["versions"]:
        version["served"] = version["storage"]


def _bind(role: str, user: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"k8e:{role}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }


def _failure(error: str, detail: str) -> StartFailed:
    hint = "the logs of all components are in the cluster's folder, logs/"
    return StartFailed("cluster_not_set_up", error, detail=detail, hint=hint)

"""Decides which server runs the gateway of sandboxes: one, because its sessions are in files of its machine. An object
names it; another server takes its place when that one's node was removed.
"""

from __future__ import annotations

import json
from typing import Any, Final

from k8e.cluster.api import Api
from k8e.cluster.trust.join_token import NAMESPACE

_NAME: Final = "k8e-gateway"
_PATH: Final = f"/api/v1/namespaces/{NAMESPACE}/configmaps"


async def take_gateway(api: Api, node: str) -> str:
    """Returns the name of the node whose server has the gateway: this one's if it was free. Of two that ask at once one
    gets it, by the object's version; empty when there is no answer."""
    metadata: dict[str, Any] = {"name": _NAME, "namespace": NAMESPACE}
    wanted = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"node": node}}
    made = await api.request("POST", _PATH, wanted)
    if made is not None and made[0] == 201:
        return node
    found = await api.get(f"{_PATH}/{_NAME}")
    if found is None or found[0] != 200:
        return ""
    body = json.loads(found[1])
    holder = str((body.get("data") or {}).get("node", ""))
    if holder != node and (not holder or await _is_removed(api, holder)):
        metadata["resourceVersion"] = body["metadata"]["resourceVersion"]
        changed = await api.request("PUT", f"{_PATH}/{_NAME}", wanted)
        return node if changed is not None and changed[0] == 200 else holder
    return holder


async def _is_removed(api: Api, node: str) -> bool:
    answer = await api.get(f"/api/v1/nodes/{node}")
    return answer is not None and answer[0] == 404

"""Tokens with which a further server joins: each with a Secret of its own, in which the authorities' keys are sealed,
and with the right to read that one and no other. All of it goes with the token, which owns it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from k8e.cluster.api import Api
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.tokens import ask
from k8e.cluster.trust.join_token import NAMESPACE, JoinToken, describe_token
from k8e.cluster.trust.sealed_keys import open_keys, seal_keys

_SECRETS: Final = f"/api/v1/namespaces/{NAMESPACE}/secrets"
_RBAC: Final = "rbac.authorization.k8s.io"
_ROLES: Final = f"/apis/{_RBAC}/v1/namespaces/{NAMESPACE}"


async def create_server_token(
    api: Api, fingerprint: str, keys: Mapping[str, bytes], description: str, expires: float | None
) -> JoinToken:
    """Returns a new token. Only its text opens the keys: it cannot be shown again."""
    token = JoinToken.make(fingerprint, server=True)
    made = json.loads(await ask(api, "POST", _SECRETS, describe_token(token, description, expires), 201))
    owner = {"apiVersion": "v1", "kind": "Secret", "name": made["metadata"]["name"], "uid": made["metadata"]["uid"]}
    metadata = {"name": _name(token), "namespace": NAMESPACE, "ownerReferences": [owner]}
    sealed = base64.b64encode(seal_keys(keys, token)).decode()
    for path, body in _describe(token, metadata, sealed):
        await ask(api, "POST", path, body, 201)
    return token


async def fetch_keys(api: Api, token: JoinToken) -> dict[str, bytes]:
    """Returns the cluster's keys, with the token's own rights."""
    if not token.key:
        text = "this is a worker's token, which makes no server"
        hint = "server-token of a server has one; with this one the machine can be a worker: `k8e agent`"
        raise ClusterError("worker_token", text, hint=hint)
    found = json.loads(await ask(api, "GET", f"{_SECRETS}/{_name(token)}", None, 200))
    return open_keys(base64.b64decode(found["data"]["keys"]), token)


def _describe(token: JoinToken, metadata: dict[str, Any], sealed: str) -> list[tuple[str, dict[str, Any]]]:
    rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [_name(token)], "verbs": ["get"]}
    kind = {"apiVersion": f"{_RBAC}/v1", "metadata": metadata}
    user = {"apiGroup": _RBAC, "kind": "User", "name": f"system:bootstrap:{token.id}"}
    binding = {
        **kind,
        "kind": "RoleBinding",
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": _name(token)},
        "subjects": [user],
    }
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "k8e.dev/keys", "metadata": metadata}
    return [
        (_SECRETS, {**secret, "data": {"keys": sealed}}),
        (f"{_ROLES}/roles", {**kind, "kind": "Role", "rules": [rule]}),
        (f"{_ROLES}/rolebindings", binding),
    ]


def _name(token: JoinToken) -> str:
    return f"k8e-keys-{token.id}"

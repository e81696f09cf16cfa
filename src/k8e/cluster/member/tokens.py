"""Makes, lists and deletes the tokens of a cluster, on a server."""

from __future__ import annotations

import json
from typing import Final

from k8e.cluster.api import Api
from k8e.cluster.errors import ClusterError
from k8e.cluster.trust.join_token import NAMESPACE, JoinToken, TokenRecord, describe_token, name_secret, read_token

DEFAULT_LIFE: Final = 86_400.0
_PATH: Final = f"/api/v1/namespaces/{NAMESPACE}/secrets"
_OURS: Final = "?fieldSelector=type%3Dbootstrap.kubernetes.io%2Ftoken"


async def create_token(api: Api, fingerprint: str, description: str, expires: float | None) -> JoinToken:
    """Returns a new token. Only its text has the secret: it cannot be shown again."""
    token = JoinToken.make(fingerprint)
    await ask(api, "POST", _PATH, describe_token(token, description, expires), 201)
    return token


async def list_tokens(api: Api) -> list[TokenRecord]:
    """Returns the tokens, the oldest first; also those that are over and not removed yet."""
    found = json.loads(await ask(api, "GET", _PATH + _OURS, None, 200))["items"]
    records = [record for each in found if (record := read_token(each)) is not None]
    return sorted(records, key=lambda record: (record.created, record.id))


async def delete_token(api: Api, token_id: str) -> None:
    """Deletes a token. Machines that have joined with it stay."""
    await ask(api, "DELETE", f"{_PATH}/{name_secret(token_id)}", None, 200)


async def ask(api: Api, method: str, path: str, body: object, expected: int) -> bytes:
    """Returns the body of the expected answer; any other is an error."""
    answer = await api.request(method, path, body)
    if answer is None:
        hint = "it runs on the servers; `k8e server --cluster` starts this machine's"
        raise ClusterError("cluster_unreachable", "the cluster's API server does not answer", hint=hint)
    if answer[0] == 404:
        raise ClusterError("token_not_found", "there is no such token", hint="list the tokens: one may be over already")
    if answer[0] != expected:
        detail = answer[1].decode(errors="replace")[-500:]
        hint = "the detail has its reason"
        raise ClusterError("cluster_refuses", f"the API server answers {answer[0]}", detail=detail, hint=hint)
    return answer[1]

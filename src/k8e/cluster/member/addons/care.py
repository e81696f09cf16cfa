"""Keeps the certificate of metrics-server: it is in a Secret, and is renewed there as all others are in their files."""

from __future__ import annotations

import base64
import binascii
import json
import time
from typing import Final

from k8e.cluster.api import Api
from k8e.cluster.member.addons.objects import METRICS_HOST, METRICS_SECRET
from k8e.cluster.member.addons.pods import NAMESPACE
from k8e.cluster.trust.authority import Authority, Leaf

_PATH: Final = f"/api/v1/namespaces/{NAMESPACE}/secrets"
_LEAF: Final = Leaf("metrics-server", hosts=(METRICS_HOST,))


async def renew_metrics(api: Api, authority: Authority) -> bool:
    """Makes the certificate if it is missing, damaged or old; returns whether it did."""
    answer = await api.get(f"{_PATH}/{METRICS_SECRET}")
    if answer is None or answer[0] not in (200, 404):
        return False
    now = time.time()
    if answer[0] == 200 and authority.is_good(_read(answer[1]), _LEAF, now):
        return False
    content = base64.b64encode(authority.issue(_LEAF, now)).decode()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": METRICS_SECRET, "namespace": NAMESPACE},
        "data": {"tls.crt": content, "tls.key": content},
    }
    if answer[0] == 404:
        done = await api.request("POST", _PATH, secret)
    else:
        done = await api.request("PUT", f"{_PATH}/{METRICS_SECRET}", secret)
    return done is not None and done[0] in (200, 201)


def _read(body: bytes) -> bytes:
    try:
        return base64.b64decode(json.loads(body)["data"]["tls.crt"], validate=True)
    except (KeyError, ValueError, TypeError, binascii.Error):
        return b""

"""Joins a cluster: finds the authority that the token names, and learns from it what a node has to know.

No secret is sent to a server that another authority vouches for: a first handshake, which verifies and sends nothing,
shows the authority's certificate, which has to have the fingerprint in the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import ssl
from ipaddress import IPv4Address, IPv4Network
from typing import Final
from urllib.parse import urlsplit

from k8e.cluster.api import Api
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.layout import LOCAL_URL, Layout, Membership, Networks
from k8e.cluster.member.objects import SHARED
from k8e.cluster.trust.join_token import NAMESPACE, JoinToken
from k8e.cluster.trust.leaves import describe_kubeconfig, write_file
from k8e.identity.chain import list_chain

_PATIENCE: Final = 20.0


class JoinRefused(ClusterError):
    """This machine does not become a member; nothing of it was changed."""


async def join(layout: Layout, url: str, token: JoinToken, node: str, address: IPv4Address) -> Membership:
    """Makes this machine a member, whose kubelet then asks for its certificate. It can be repeated."""
    authority = await asyncio.to_thread(find_authority, url, token)
    api = Api(url, authority, token=token.bearer)
    answer = await api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{SHARED}")
    if answer is None:
        raise _unreachable(url, "it does not answer")
    if answer[0] != 200:
        raise JoinRefused(
            "join_refused",
            "the cluster does not accept this token",
            detail=f"its API server answers {answer[0]}",
            hint="it may be over or deleted: make a new one on a server, `k8e cluster token create`",
        )
    data = json.loads(answer[1])["data"]
    networks = Networks(IPv4Network(data["pods"]), IPv4Network(data["services"]))
    member = Membership(url, node, address, networks, authority, data["client-ca.crt"])
    layout.agent.mkdir(mode=0o711, parents=True, exist_ok=True)
    write_file(layout.bootstrap, describe_kubeconfig(LOCAL_URL, authority.encode(), {"token": token.bearer}))
    write_file(layout.membership, json.dumps(member.body, indent=1).encode())
    return member


def read_membership(layout: Layout) -> Membership | None:
    """Returns what this machine knows of its cluster; None when it is no member."""
    try:
        return Membership.parse(json.loads(layout.membership.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        hint = f"remove {layout.membership} and join again, with K8E_URL and K8E_TOKEN"
        raise JoinRefused(
            "membership_unusable", "what this machine knows of its cluster is damaged", hint=hint
        ) from error


def find_authority(url: str, token: JoinToken) -> str:
    """Returns the authority's certificate (PEM), if the server at this address has one with the token's fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    parts = urlsplit(url)
    if parts.scheme != "https" or parts.hostname is None:
        raise _unreachable(url, "it is no https address")
    try:
        where = (parts.hostname, parts.port or 6443)
        with socket.create_connection(where, _PATIENCE) as plain, context.wrap_socket(plain) as connection:
            chain = list_chain(connection)
    except (OSError, ValueError) as error:
        raise _unreachable(url, str(error)) from error
    for certificate in chain:
        if token.is_for(hashlib.sha256(certificate).hexdigest()):
            return ssl.DER_cert_to_PEM_cert(certificate)
    raise JoinRefused(
        "wrong_cluster",
        f"{url} is not the cluster that this token is for",
        detail=f"no certificate of it has the fingerprint {token.fingerprint}",
        hint="nothing was sent. Is the address right? Another machine may be in between",
    )


def _unreachable(url: str, detail: str) -> JoinRefused:
    hint = "K8E_URL is https://SERVER:6443, as this machine reaches a server of the cluster"
    return JoinRefused("cluster_unreachable", f"the cluster at {url} cannot be reached", detail=detail, hint=hint)

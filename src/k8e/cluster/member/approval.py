"""Decides which requests of nodes for certificates are granted. Pure; `approver.py` asks and answers.

A token makes new nodes and never an existing one: with it alone, no machine becomes a node that is there already. A
node renews its own certificate, which the controller-manager approves, and gets one to serve with, for its own name and
addresses only.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509.oid import NameOID

from k8e.cluster.trust.join_token import WORKERS

CLIENT: Final = "kubernetes.io/kube-apiserver-client-kubelet"
SERVING: Final = "kubernetes.io/kubelet-serving"
_NODES: Final = "system:nodes"
_PREFIX: Final = "system:node:"
_CLIENT_USAGES: Final = {"digital signature", "key encipherment", "client auth"}
_SERVING_USAGES: Final = {"digital signature", "key encipherment", "server auth"}


@dataclass(frozen=True, slots=True)
class Verdict:
    granted: bool
    reason: str


def judge(request: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]) -> Verdict | None:
    """Returns the verdict about a CertificateSigningRequest; None when it is not ours to decide. `nodes` are those that
    the cluster has, by name."""
    spec = request.get("spec") or {}
    if is_decided(request) or spec.get("signerName") not in (CLIENT, SERVING):
        return None
    joins = spec["signerName"] == CLIENT
    if joins and WORKERS not in (spec.get("groups") or ()):
        return None  # a renewal: the controller-manager compares it with the certificate that it was asked with
    try:
        asked = x509.load_pem_x509_csr(base64.b64decode(spec["request"], validate=True))
        whole = asked.is_signature_valid
        extensions = list(asked.extensions)
    except (KeyError, ValueError, TypeError, binascii.Error, UnsupportedAlgorithm, x509.DuplicateExtension):
        return Verdict(False, "it cannot be read")
    name = _read_node(asked.subject)
    if not whole or name is None:
        return Verdict(False, "its subject is no node's")
    if not set(spec.get("usages") or ()) <= (_CLIENT_USAGES if joins else _SERVING_USAGES):
        return Verdict(False, "it is for more than a node needs")
    names = [each.value for each in extensions if isinstance(each.value, x509.SubjectAlternativeName)]
    if joins:
        return _judge_new(name, nodes, has_names=bool(names))
    return _judge_serving(name, str(spec.get("username")), names, nodes)


def is_decided(request: Mapping[str, Any]) -> bool:
    return bool((request.get("status") or {}).get("conditions"))


def _judge_new(name: str, nodes: Mapping[str, Mapping[str, Any]], *, has_names: bool) -> Verdict:
    if has_names:
        return Verdict(False, "a node's certificate for the API has no names of hosts")
    if name in nodes:
        return Verdict(False, f"there is a node {name}: a token makes new nodes only; remove it first")
    return Verdict(True, f"{name} joins with a token")


def _judge_serving(
    name: str, asks: str, names: list[x509.SubjectAlternativeName], nodes: Mapping[str, Mapping[str, Any]]
) -> Verdict:
    if asks != f"{_PREFIX}{name}" or name not in nodes:
        return Verdict(False, "it was asked for by another than the node itself")
    addresses = ((nodes[name].get("status") or {}).get("addresses")) or []
    own = {str(each.get("address")) for each in addresses} | {name}
    for found in (each for value in names for each in value):
        if isinstance(found, x509.IPAddress | x509.DNSName) and _write(found) in own:
            continue
        return Verdict(False, "it names a host that is not the node")
    return Verdict(True, f"{name} serves with it") if names else Verdict(False, "it names no host")


def _write(name: x509.IPAddress | x509.DNSName) -> str:
    return str(name.value) if isinstance(name.value, str | ipaddress.IPv4Address | ipaddress.IPv6Address) else ""


def _read_node(subject: x509.Name) -> str | None:
    common = [each.value for each in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    groups = [each.value for each in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
    if len(list(subject)) != 2 or groups != [_NODES] or len(common) != 1:
        return None
    text = str(common[0])
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) and len(text) > len(_PREFIX) else None

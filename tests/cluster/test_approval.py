"""Which requests for certificates are granted: a token makes new nodes only, a node serves as itself only."""

from __future__ import annotations

import base64
import ipaddress
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from k8e.cluster.member.approval import CLIENT, SERVING, judge
from k8e.cluster.trust.authority import Leaf
from k8e.cluster.trust.join_token import WORKERS

KEY = ec.generate_private_key(ec.SECP256R1())
NODES = {"one": {"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}, "two": {}}


def ask(user: str, *groups: str, hosts: tuple[str, ...] = (), name: x509.Name | None = None) -> str:
    leaf = Leaf(user, groups, hosts)
    builder = x509.CertificateSigningRequestBuilder().subject_name(name or leaf.subject)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(leaf.names), False)
    content = builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return base64.b64encode(content).decode()


def join(request: str, **changes: Any) -> dict[str, Any]:
    spec = {
        "signerName": CLIENT,
        "username": "system:bootstrap:abc123",
        "groups": ["system:bootstrappers", WORKERS, "system:authenticated"],
        "usages": ["digital signature", "client auth"],
        "request": request,
    }
    return {"metadata": {"name": "csr-1"}, "spec": {**spec, **changes}}


def serve(request: str, node: str, **changes: Any) -> dict[str, Any]:
    spec = {
        "signerName": SERVING,
        "username": f"system:node:{node}",
        "groups": ["system:nodes"],
        "usages": ["digital signature", "server auth"],
        "request": request,
    }
    return {"metadata": {"name": "csr-2"}, "spec": {**spec, **changes}}


def is_granted(request: dict[str, Any]) -> bool:
    verdict = judge(request, NODES)
    assert verdict is not None
    assert verdict.reason
    return verdict.granted


class TestToken:
    def test_makes_a_node_that_is_not_there(self) -> None:
        assert is_granted(join(ask("system:node:three", "system:nodes")))

    def test_makes_no_node_that_is_there(self) -> None:
        assert not is_granted(join(ask("system:node:one", "system:nodes")))

    @pytest.mark.parametrize(
        ("user", "groups"),
        [
            ("system:node:three", ["system:masters"]),
            ("system:node:three", ["system:nodes", "system:masters"]),
            ("system:node:three", []),
            ("system:node:", ["system:nodes"]),
            ("k8e:admin", ["system:nodes"]),
            ("kube-apiserver", ["system:nodes"]),
        ],
    )
    def test_makes_nothing_but_a_node(self, user: str, groups: list[str]) -> None:
        assert not is_granted(join(ask(user, *groups)))

    def test_makes_no_server(self) -> None:
        assert not is_granted(join(ask("system:node:three", "system:nodes", hosts=("10.0.0.9",))))
        usages = ["digital signature", "client auth", "server auth"]
        assert not is_granted(join(ask("system:node:three", "system:nodes"), usages=usages))

    @given(st.binary(max_size=300))
    def test_with_a_request_that_cannot_be_read_makes_nothing(self, content: bytes) -> None:
        assert not is_granted(join(base64.b64encode(content).decode()))

    def test_with_a_request_that_another_key_has_signed_makes_nothing(self) -> None:
        content = bytearray(base64.b64decode(ask("system:node:three", "system:nodes")))
        der = bytearray(x509.load_pem_x509_csr(bytes(content)).public_bytes(serialization.Encoding.DER))
        der[-1] ^= 1
        pem = (
            b"-----BEGIN CERTIFICATE REQUEST-----\n"
            + base64.encodebytes(bytes(der))
            + b"-----END CERTIFICATE REQUEST-----\n"
        )
        assert not is_granted(join(base64.b64encode(pem).decode()))


class TestNode:
    def test_serves_as_itself(self) -> None:
        assert is_granted(serve(ask("system:node:one", "system:nodes", hosts=("one", "10.0.0.1")), "one"))

    @pytest.mark.parametrize("hosts", [(), ("two",), ("one", "10.0.0.2"), ("kubernetes.default.svc",), ("*.one",)])
    def test_serves_as_no_other_host(self, hosts: tuple[str, ...]) -> None:
        assert not is_granted(serve(ask("system:node:one", "system:nodes", hosts=hosts), "one"))

    @given(st.ip_addresses(v=4))
    def test_serves_with_no_other_address(self, address: ipaddress.IPv4Address) -> None:
        hosts = ("one", str(address))
        granted = is_granted(serve(ask("system:node:one", "system:nodes", hosts=hosts), "one"))
        assert granted == (str(address) == "10.0.0.1")

    def test_asks_for_no_other_node(self) -> None:
        request = ask("system:node:one", "system:nodes", hosts=("one", "10.0.0.1"))
        assert not is_granted(serve(request, "two"))
        assert not is_granted(serve(request, "one", username="system:serviceaccount:default:default"))

    def test_that_was_removed_gets_nothing(self) -> None:
        assert not is_granted(serve(ask("system:node:gone", "system:nodes", hosts=("gone",)), "gone"))


class TestNotOurs:
    def test_a_renewal_is_the_controllers(self) -> None:
        request = join(ask("system:node:one", "system:nodes"), username="system:node:one", groups=["system:nodes"])
        assert judge(request, NODES) is None

    def test_another_signer_and_a_decided_request_are_left_alone(self) -> None:
        request = join(ask("system:node:three", "system:nodes"))
        assert judge({**request, "status": {"conditions": [{"type": "Denied"}]}}, NODES) is None
        request["spec"]["signerName"] = "kubernetes.io/kube-apiserver-client"
        assert judge(request, NODES) is None

"""Add-ons: a name of a service resolves in a pod, the use of resources is known, and a claim gets its volume."""

from __future__ import annotations

import json

from tests.members.conftest import Member, until
from tests.members.test_members import get, make_pod

SERVE = "echo hello > /tmp/index.html; exec httpd -f -p 8000 -h /tmp"


def test_a_name_of_a_service_resolves_in_a_pod_of_every_node(server: Member, worker: Member) -> None:
    server.kubectl("wait", "--for=condition=Available", "deployment/coredns", "-n=kube-system", "--timeout=150s")
    pod = json.loads(make_pod("named", "one", "native", SERVE))
    pod["metadata"]["labels"] = {"app": "named"}
    server.kubectl("apply", "--filename=-", given=json.dumps(pod))
    server.kubectl("expose", "pod", "named", "--port=80", "--target-port=8000")
    server.kubectl("apply", "--filename=-", given=make_pod("asking", "two", "native", "exec sleep infinity"))
    server.kubectl("wait", "--for=condition=Ready", "pod/named", "pod/asking", "--timeout=150s")
    for name in ("named", "named.default", "named.default.svc.cluster.local"):
        ask = f"until echo 'GET / HTTP/1.0\n' | nc -w 5 {name} 80; do sleep 0.2; done"
        assert server.kubectl("exec", "asking", "--", "sh", "-c", ask).endswith("\nhello\n")
    looked = server.kubectl(
        "exec", "named", "--", "busybox", "nslookup", "kubernetes.default.svc.cluster.local", check=False
    )
    assert "10.43.0.1" in looked
    other = server.kubectl("exec", "named", "--", "busybox", "nslookup", "example.org", check=False)
    assert "Address: " not in other.partition("Name:")[2]  # no way out by names
    server.kubectl("delete", "pod/named", "pod/asking", "service/named", "--wait=false")


def test_the_use_of_resources_is_known(server: Member, worker: Member) -> None:
    def is_known(node: str) -> bool:
        found = server.kubectl("top", "nodes", "--no-headers", check=False).splitlines()
        return any(
            line.split()[0] == node and line.split()[3].endswith("Mi") for line in found if len(line.split()) == 5
        )

    until(lambda: is_known("one") and is_known("two"))
    until(lambda: "coredns" in server.kubectl("top", "pods", "-n=kube-system", check=False))


def test_a_claim_gets_a_volume_which_goes_with_it(server: Member, worker: Member) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "kept"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    }
    server.kubectl("apply", "--filename=-", given=json.dumps(claim))
    pod = json.loads(make_pod("writer", "two", "native", "echo text > /kept/file; exec sleep infinity"))
    pod["spec"]["volumes"].append({"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}})
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "kept", "mountPath": "/kept"})
    server.kubectl("apply", "--filename=-", given=json.dumps(pod))
    server.kubectl("wait", "--for=condition=Ready", "pod/writer", "--timeout=150s")
    assert get(server, "pvc/kept")["status"]["phase"] == "Bound"
    find = ["find", "/var/lib/k8e/storage", "-name", "file"]
    until(lambda: worker.machine.run(*find, check=False).stdout != "")
    server.kubectl("delete", "pod/writer", "--wait=true")
    server.kubectl("delete", "pvc/kept", "--wait=true")
    until(lambda: worker.machine.run("ls", "-A", "/var/lib/k8e/storage").stdout == "")


def test_add_ons_have_limits_and_no_rights_on_their_node(server: Member) -> None:
    for item in get(server, "deployments", "-n=kube-system")["items"]:
        spec = item["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            assert "memory" in container["resources"]["limits"]
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]

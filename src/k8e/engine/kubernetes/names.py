"""Names, labels and annotations of the engine's objects. Pure.

Everything of one sandbox is found by its name, which is derived from the sandbox's id, and everything of one gateway by
a label: a gateway that shares its namespace with another one never lists, and so never removes, what is not its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Final

from lightkube.models.meta_v1 import ObjectMeta

MANAGER: Final = "app.kubernetes.io/managed-by"
GATEWAY: Final = "k8e.dev/gateway"  # label: which gateway's it is
SANDBOX: Final = "k8e.dev/sandbox"  # annotation: the id that core chose
AGENT_KEY: Final = "k8e.dev/agent-key"  # annotation: the agent's public key, from the first contact on
GATEWAY_KEY: Final = "k8e.dev/gateway-key"  # annotation: the gateway's public key, for the helper of the node
POOL: Final = "k8e.dev/pool"  # label: the warm pool that it was made for
RUNTIME: Final = "k8e.dev/runtime"  # annotation: the runtime that the session named
KEPT: Final = "k8e.dev/set-aside"  # label of what belongs to no sandbox any more: the gateway that kept it
_MANAGED: Final = "k8e"
_PREFIX: Final = "k8e-"
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,49}[a-z0-9])?")  # short enough for a pod's name to be a host's too


def object_name(sandbox: str) -> str:
    """Names the objects of a sandbox. Two sandboxes never have the same: a digest is marked as one."""
    if _LABEL.fullmatch(sandbox) and not sandbox.startswith("x-"):
        return _PREFIX + sandbox
    return f"{_PREFIX}x-{hashlib.sha256(sandbox.encode(errors='surrogateescape')).hexdigest()[:40]}"


def gateway_label(public_key: bytes) -> str:
    """Names a gateway by the key that its sandboxes' agents answer to."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def labels(gateway: str) -> Mapping[str, str]:
    return {MANAGER: _MANAGED, GATEWAY: gateway}


def selector(gateway: str) -> str:
    return ",".join(f"{name}={value}" for name, value in labels(gateway).items())


def managed_selector() -> str:
    """Of every gateway's."""
    return f"{MANAGER}={_MANAGED}"


def owns(meta: ObjectMeta | None, gateway: str) -> bool:
    """Whether it is this gateway's own. What was set aside keeps its labels, and with them its network policy, and is
    no gateway's any more; a pod that a claim has is the claim's."""
    if meta is None or meta.ownerReferences:
        return False
    labels = meta.labels or {}
    return labels.get(GATEWAY) == gateway and KEPT not in labels


def find_sandbox(meta: ObjectMeta | None) -> str:
    """The sandbox that an object belongs to; empty: none."""
    return (meta.annotations or {}).get(SANDBOX, "") if meta is not None else ""


def disown(uid: str, gateway: str) -> Sequence[Mapping[str, str]]:
    """The patch that sets an object aside."""
    return (
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "add", "path": f"/metadata/labels/{escape(KEPT)}", "value": gateway},
    )


def escape(name: str) -> str:
    """A label's or an annotation's name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def policy_name(gateway: str) -> str:
    return f"{_PREFIX}sandboxes-{gateway}"


def pool_name(gateway: str, digest: str) -> str:
    """Of a warm pool and its template. A pod's name is this and six characters more."""
    return f"{_PREFIX}{gateway[:8]}-{digest[:16]}"

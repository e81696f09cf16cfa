"""The rights of agent-sandbox's controller: it sees the cluster, and changes the namespace of sandboxes."""

from __future__ import annotations

from k8e.cluster.member.addons.agent_sandbox import divide


def test_what_upstream_lets_it_change_everywhere_it_changes_in_one_namespace() -> None:
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "get", "list", "watch"]}
    events = {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]}
    kinds = {
        "apiGroups": ["apiextensions.k8s.io"],
        "resources": ["customresourcedefinitions"],
        "resourceNames": ["sandboxes.agents.x-k8s.io"],
        "verbs": ["get", "patch", "update"],
    }
    seen, changed = divide([pods, events, kinds])
    assert seen == [{**pods, "verbs": ["get", "list", "watch"]}]
    assert changed == [pods, events]

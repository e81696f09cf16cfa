"""`k8e cluster leave` and `k8e cluster uninstall`: take a member back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from k8e.cli.cluster.place import find_layout, find_membership, open_own, require_root, run
from k8e.cli.install import systemd
from k8e.cli.process import Failure, read_some, write_all
from k8e.cli.view import shapes, show_value
from k8e.cluster.member.departure import forget_node, list_sandboxes, stop_supervisor
from k8e.cluster.member.installation import UNIT, remove_installation
from k8e.cluster.member.removal import remove_member, remove_state
from k8e.cluster.member.servers.departure import find_other_servers, forget_server, leave_etcd
from k8e.profiles import text

if TYPE_CHECKING:
    import argparse

    from k8e.cluster.member.layout import Layout

# `uninstall` removes the program itself, which then can import nothing more: its answer needs these.
_NEEDED = (shapes, text)


def leave(options: argparse.Namespace) -> int:
    require_root("k8e cluster leave")
    layout = find_layout()
    membership = find_membership(layout)
    others = run(find_other_servers(layout, membership)) if layout.is_server else []
    if layout.is_server and not others:
        hint = "the last server goes with `k8e cluster uninstall`, and the cluster with it"
        raise Failure("is_a_server", "this machine is the only server of the cluster", hint=hint)
    check_sandboxes(layout, options)
    ask(f"Take {membership.node} out of the cluster of {membership.url}?", options)
    if others:
        run(leave_etcd(layout, membership, others))
    left = take_out(layout)
    if others and not run(forget_server(layout, membership, others)):
        left.append(f"the node {membership.node}: on a server, `kubectl delete node {membership.node}`")
    run(remove_member(layout))
    show_value({"ok": True, "node": membership.node, "left": left})
    return 0


def uninstall(options: argparse.Namespace) -> int:
    require_root("k8e cluster uninstall")
    layout = find_layout()
    check_sandboxes(layout, options)
    what = f"the cluster with all its data in {layout.state}" if layout.is_server else f"{layout.state}"
    ask(f"Remove {what}, and its programs, from this machine?", options)
    left = take_out(layout)
    run(remove_member(layout))
    remove_state(layout)
    removed = remove_installation()
    if systemd.runs():
        systemd.reload()
    show_value({"ok": True, "removed": [str(layout.state), *map(str, removed)], "left": left})
    return 0


def check_sandboxes(layout: Layout, options: argparse.Namespace) -> None:
    if options.with_sandboxes or not layout.membership.exists():
        return
    membership = find_membership(layout)
    found = run(list_sandboxes(open_own(layout, membership), membership.node))
    if found:
        raise Failure(
            "sandboxes_live",
            f"there are {len(found)} sandboxes on this machine",
            detail=", ".join(found[:20]),
            hint="`k8e sandbox destroy SID` ends one; --with-sandboxes ends them all",
        )


def ask(question: str, options: argparse.Namespace) -> None:
    if options.yes:
        return
    if not os.isatty(0):
        raise Failure("not_confirmed", f"there is no terminal to ask at: {question}", hint="--yes does not ask")
    write_all(2, f"{question} Type yes: ".encode())
    if read_some(0).strip().lower() != b"yes":
        raise Failure("not_confirmed", "nothing was removed", hint="type yes to remove it; --yes does not ask")


def take_out(layout: Layout) -> list[str]:
    """Ends the supervisor, and removes the node from the cluster. Returns what could not be done."""
    if systemd.runs() and UNIT.exists():
        systemd.disable()
    stop_supervisor(layout)
    if layout.is_server or not layout.membership.exists():
        return []
    membership = find_membership(layout)
    if run(forget_node(open_own(layout, membership), membership.node)):
        return []
    return [f"the node {membership.node}: on a server, `kubectl delete node {membership.node}`"]

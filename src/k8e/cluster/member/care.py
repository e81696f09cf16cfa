"""The work that k8e does for a cluster as long as it runs: certificates are renewed, requests of nodes are judged, each
runtime of a node has its RuntimeClass, and nodes have routes to each other's pods. Each is a question and an answer,
repeated: one that was lost or interrupted is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from k8e.cluster.api import Api
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.addons.care import renew_metrics
from k8e.cluster.member.approval import Verdict, judge
from k8e.cluster.member.backups.backup import is_due, make_backup, remove_old
from k8e.cluster.member.control_plane import ControlPlane
from k8e.cluster.member.layout import Membership
from k8e.cluster.member.routes import apply_routes, want_routes
from k8e.cluster.member.runtimes import describe_classes
from k8e.cluster.member.servers.disk import DiskWatch
from k8e.cluster.member.servers.server_list import ServerList
from k8e.cluster.supervisor import Supervisor

_REQUESTS: Final = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
_CLASSES: Final = "/apis/node.k8s.io/v1/runtimeclasses"
_OFTEN, _SELDOM = 1.0, 3600.0

log = logging.getLogger("k8e.cluster")


async def look_after_cluster(control_plane: ControlPlane) -> None:
    """Does a server's part, until it is cancelled."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_repeat(lambda: judge_requests(control_plane.api), _OFTEN))
        group.create_task(_repeat(lambda: make_classes(control_plane.api), 5.0))
        group.create_task(_repeat(lambda: renew(control_plane), _SELDOM))
        group.create_task(_repeat(lambda: back_up(control_plane), 600.0))
        disk = DiskWatch(control_plane.layout.etcd)
        group.create_task(_repeat(lambda: asyncio.to_thread(disk.look), 10.0))


async def look_after_node(api: Api, membership: Membership, servers: ServerList) -> None:
    """Does a node's part, until it is cancelled."""

    async def set_routes() -> None:
        nodes = await _list(api, "/api/v1/nodes")
        if nodes is not None:
            await apply_routes(want_routes(nodes, membership.node, membership.networks.pods))

    async with asyncio.TaskGroup() as group:
        group.create_task(_repeat(set_routes, 2.0))
        group.create_task(_repeat(servers.refresh, 5.0))


async def restart_after(supervisor: Supervisor, name: str, certificate: Path) -> None:
    """Ends a program that reads its certificate only at its start, whenever that was renewed; the supervisor starts it
    again. Until it is cancelled."""

    def stamp() -> float:
        return certificate.stat().st_mtime if certificate.exists() else 0.0

    last = await asyncio.to_thread(stamp)
    while True:
        await asyncio.sleep(60.0)
        now = await asyncio.to_thread(stamp)
        if now != last and (pid := supervisor.pids.get(name)) is not None:
            log.info("%s is started again, with its renewed certificate", name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            last = now


async def judge_requests(api: Api) -> None:
    requests = await _list(api, _REQUESTS)
    if not requests or all((each.get("status") or {}).get("conditions") for each in requests):
        return
    nodes = await _list(api, "/api/v1/nodes")
    if nodes is None:
        return
    known = {node["metadata"]["name"]: node for node in nodes}
    for request in requests:
        if (verdict := judge(request, known)) is not None:
            await _answer(api, request, verdict)


async def make_classes(api: Api) -> None:
    nodes, there = await _list(api, "/api/v1/nodes"), await _list(api, _CLASSES)
    if nodes is None or there is None:
        return
    names = {each["metadata"]["name"] for each in there}
    for found in describe_classes(nodes):
        if found["metadata"]["name"] not in names:
            await api.request("POST", _CLASSES, found)


async def renew(control_plane: ControlPlane) -> None:
    renewed = await asyncio.to_thread(control_plane.leaves.renew)
    if renewed:
        log.info("renewed certificates: %s", ", ".join(renewed))
        await asyncio.to_thread(control_plane.write_kubeconfig)

    if await renew_metrics(control_plane.api, control_plane.authorities["server"]):
        log.info("renewed the certificate of metrics-server")


async def back_up(control_plane: ControlPlane) -> None:
    """Makes a backup when one is due. One that fails is tried again, and said each time."""
    layout = control_plane.layout
    if not await asyncio.to_thread(is_due, layout, time.time()):
        return
    etcdutl = control_plane.components.program("etcdutl")
    try:
        made = await asyncio.to_thread(make_backup, layout, control_plane.etcd, etcdutl, control_plane.node)
    except ClusterError as error:
        log.error("%s: no backup was made: %s (%s)", error.code, error, error.detail)
        return
    log.info("backup %s: %d keys at revision %d", made.path, made.keys, made.revision)
    await asyncio.to_thread(remove_old, layout)


async def _answer(api: Api, request: dict[str, Any], verdict: Verdict) -> None:
    """With the version that was judged: a request that was changed since is judged again."""
    kind, reason = ("Approved", "K8eApproved") if verdict.granted else ("Denied", "K8eDenied")
    condition = {"type": kind, "status": "True", "reason": reason, "message": verdict.reason}
    body = {**request, "status": {**(request.get("status") or {}), "conditions": [condition]}}
    name = request["metadata"]["name"]
    answer = await api.request("PUT", f"{_REQUESTS}/{name}/approval", body)
    if answer is not None and answer[0] == 200:
        log.info("request %s: %s: %s", name, kind, verdict.reason)


async def _list(api: Api, path: str) -> list[dict[str, Any]] | None:
    answer = await api.get(path)
    if answer is None or answer[0] != 200:
        return None
    body = json.loads(answer[1])
    items: list[dict[str, Any]] = body.get("items") or []
    kind = str(body.get("kind", "")).removesuffix("List")
    return [{"apiVersion": body.get("apiVersion"), "kind": kind, **item} for item in items]


async def _repeat(work: Callable[[], Awaitable[None]], pause: float) -> NoReturn:
    while True:
        with contextlib.suppress(OSError):
            await work()
        await asyncio.sleep(pause)

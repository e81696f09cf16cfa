"""Runs a member of a cluster on this machine, in the foreground: a server, or a worker."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import IO, Any, Final

from k8e.cluster.api import becomes_true
from k8e.cluster.build import Components
from k8e.cluster.errors import ClusterError, StartFailed
from k8e.cluster.limits import Groups
from k8e.cluster.member.addons.agent_sandbox import DEPLOYMENT, describe_agent_sandbox
from k8e.cluster.member.addons.agent_sandbox import NAME as CONTROLLER
from k8e.cluster.member.addons.care import renew_metrics
from k8e.cluster.member.addons.images import ADDONS, find_addon_images
from k8e.cluster.member.addons.objects import describe_addons
from k8e.cluster.member.care import look_after_cluster, look_after_node, make_classes, restart_after
from k8e.cluster.member.control_plane import ControlPlane
from k8e.cluster.member.gateways.gateway import PORT, PROGRAM, Gateway, refuse_sessions
from k8e.cluster.member.gateways.objects import describe_sandboxes
from k8e.cluster.member.images import NodeImages, find_images
from k8e.cluster.member.join import join, read_membership
from k8e.cluster.member.layout import GROUP, SANDBOXES, Layout, Membership, Networks
from k8e.cluster.member.node import Node
from k8e.cluster.member.objects import SERVER_ROLE, describe_cluster
from k8e.cluster.member.runtimes import find_runtimes
from k8e.cluster.member.servers.key_files import read_keys
from k8e.cluster.member.servers.server_join import (
    ServerJoin,
    check_start,
    has_data,
    receive_keys,
    remove_earlier_node,
)
from k8e.cluster.member.servers.server_list import ServerList
from k8e.cluster.member.servers.server_tokens import create_server_token
from k8e.cluster.member.skills import stage_skills
from k8e.cluster.programs import SANDBOX_IMAGE
from k8e.cluster.supervisor import Supervisor
from k8e.cluster.trust.join_token import JoinToken, describe_token
from k8e.cluster.trust.leaves import read_if_there, write_file

Say = Callable[[str], None]
_PATIENCE: Final = 60.0  # for the controller of agent-sandbox
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Options:
    layout: Layout
    components: Components
    node: str
    address: IPv4Address
    url: str = ""  # of a cluster that is there
    token: JoinToken | None = None
    sandboxes: bool = False  # of a server: the gateway serves sandboxes of this cluster
    program: Sequence[str] = ()  # the command that is k8e


def find_address() -> IPv4Address:
    """Returns the address by which this machine is reached from others: that of its default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documents: nothing is sent
        except OSError as error:
            hint = "say which one it is: --node-ip ADDRESS"
            text = "this machine has no default route"
            raise StartFailed("no_address", text, detail=str(error), hint=hint) from error
        return IPv4Address(probe.getsockname()[0])


async def run_server(options: Options, say: Say) -> None:
    """Runs until SIGTERM or SIGINT: then its programs are ended, and pods go on."""
    member = _Member(options, say)
    with member.lock():
        await member.run(server=True)


async def run_worker(options: Options, say: Say) -> None:
    member = _Member(options, say)
    with member.lock():
        await member.run(server=False)


class _Member:
    def __init__(self, options: Options, say: Say) -> None:
        self._options = options
        self._layout = options.layout
        self._say = say
        path = f"{options.components.path}:{_PATH}"
        require_tools(path)
        self._runtimes = find_runtimes(path)
        self._addon_images = find_addon_images(options.components)
        options.layout.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = {"PATH": path, "HOME": str(options.layout.agent)}
        self._supervisor = Supervisor(options.layout.logs, environment, groups=Groups(GROUP))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One supervisor for each machine. A process between fork and exec keeps the lock, too: what the last one has
        started can be seen when this one has it."""
        self._layout.run.mkdir(mode=0o711, parents=True, exist_ok=True)
        with open(self._layout.lock, "a+") as file:
            _take(file)
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    async def run(self, *, server: bool) -> None:
        loop = asyncio.get_running_loop()
        own = asyncio.current_task()
        assert own is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, own.cancel)
        begin = time.monotonic()
        self._supervisor.find_left()
        try:
            async with asyncio.TaskGroup() as group:
                token, url = self._options.token, self._options.url
                control_plane = None
                if server:
                    control_plane = await self._start_control_plane(group)
                    token, url = self._read_node_token(), control_plane.url
                membership = await self._find_membership(url, token)
                await self._start_node(membership, group)
                if control_plane is not None:
                    await control_plane.api.request(
                        "PATCH",
                        f"/api/v1/nodes/{membership.node}",
                        {"metadata": {"labels": {SERVER_ROLE: "true"}}},
                        "application/merge-patch+json",
                    )
                    await make_classes(control_plane.api)
                    if self._options.sandboxes:
                        await self._start_gateway(control_plane, group)
                await self._supervisor.end_left()
                self._say(f"ready after {time.monotonic() - begin:.1f} s")
        except asyncio.CancelledError:
            pass
        except BaseExceptionGroup as errors:
            # Of several that failed at once the first tells most.
            first = next((each for each in errors.exceptions if isinstance(each, ClusterError)), None)
            if first is None:
                raise
            raise first from None
        finally:
            await self._supervisor.stop()

    async def _start_control_plane(self, group: asyncio.TaskGroup) -> ControlPlane:
        options = self._options
        if options.sandboxes:
            refuse_sessions(options.layout)
        if options.url and not has_data(options.layout):
            if options.token is None:
                # Without it this machine would become the first server of another cluster.
                hint = "K8E_TOKEN, which is in server-token of a server"
                raise StartFailed("no_cluster", "a further server joins with a token", hint=hint)
            await receive_keys(options.layout, options.url, options.token)
        else:
            check_start(options.layout)
        control_plane = await asyncio.to_thread(
            ControlPlane, options.layout, Networks(), options.components, options.node, options.address
        )
        joins = ServerJoin(options.layout, control_plane, options.url, options.node, options.address, self._say)
        needs_vote = bool(options.url) and await joins.prepare()
        for program in control_plane.programs():
            await self._supervisor.start(program)
            self._say(f"{program.name} runs")
            if program.name == "etcd" and needs_vote:
                await joins.finish()
        authority = control_plane.authorities["client"].certificate.decode()
        await self._apply(describe_cluster(Networks(), authority, SANDBOXES if options.sandboxes else ""))
        await asyncio.to_thread(stage_skills, self._layout)
        write_file(self._layout.kubeconfig_place, f"{self._layout.kubeconfig}\n".encode(), mode=0o644)
        await self._make_node_token(control_plane)
        await self._make_server_token(control_plane)
        await self._apply_addons(control_plane)
        await remove_earlier_node(control_plane.api, options.layout, options.node, options.address)
        group.create_task(look_after_cluster(control_plane))
        return control_plane

    async def _make_node_token(self, control_plane: ControlPlane) -> None:
        """The token that has no end. One that was deleted in the cluster is not made again."""
        if read_if_there(self._layout.node_token) is not None:
            return
        token = JoinToken.make(control_plane.authorities["server"].fingerprint)
        await self._apply([describe_token(token, "node-token of the first server", None)])
        write_file(self._layout.node_token, f"{token.text}\n".encode())

    async def _make_server_token(self, control_plane: ControlPlane) -> None:
        if read_if_there(self._layout.server_token) is not None:
            return
        fingerprint, keys = control_plane.authorities["server"].fingerprint, read_keys(self._layout)
        told = "server-token of the first server"
        token = await create_server_token(control_plane.api, fingerprint, keys, told, None)
        write_file(self._layout.server_token, f"{token.text}\n".encode())

    async def _apply_addons(self, control_plane: ControlPlane) -> None:
        images = {name: image.name for name, image in self._addon_images.items()}
        if missing := [name for name in ADDONS if name not in images]:
            self._say(f"without add-ons, whose programs are not there: {', '.join(missing)}")
        server, kubelet = (control_plane.authorities[name] for name in ("server", "kubelet"))
        await renew_metrics(control_plane.api, server)
        certificates = server.certificate.decode(), kubelet.certificate.decode()
        if objects := describe_addons(images, Networks(), *certificates, str(self._layout.storage)):
            await self._apply(objects)

    def _read_node_token(self) -> JoinToken | None:
        content = read_if_there(self._layout.node_token)
        return None if content is None else JoinToken.parse(content.decode(errors="replace"))

    async def _find_membership(self, url: str, token: JoinToken | None) -> Membership:
        options = self._options
        known = await asyncio.to_thread(read_membership, self._layout)
        if known is not None and self._layout.node_certificate.exists():
            return known
        if token is None or not url:
            hint = "K8E_URL=https://SERVER:6443 and K8E_TOKEN, which is in node-token of the first server"
            raise StartFailed("no_cluster", "this machine is in no cluster yet", hint=hint)
        return await join(self._layout, url, token, options.node, options.address)

    async def _start_node(self, membership: Membership, group: asyncio.TaskGroup) -> None:
        node = await asyncio.to_thread(Node, self._layout, membership, self._options.components, self._runtimes)
        servers = await asyncio.to_thread(ServerList, self._layout, membership)
        await self._supervisor.start(node.forwarder())
        await self._supervisor.start(node.containerd())
        await node.import_pause()
        await node.import_addons(self._addon_images)
        self._say("containerd runs")
        if self._programs.joinpath(SANDBOX_IMAGE).exists():
            # Before the kubelet: a node that is ready has them.
            await node.import_images(await asyncio.to_thread(self._find_images))
            self._say("images are imported")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")  # noqa: ASYNC240 - the kernel's own, never waits
        await self._supervisor.start(node.kubelet())
        self._say("kubelet runs")
        await node.set_up_network()
        await self._supervisor.start(node.proxy())
        group.create_task(look_after_node(node.api, membership, servers))
        if namespace := await node.read_sandboxes():
            await asyncio.to_thread(self._find_images)
            await self._supervisor.start(node.helper(self._options.program, namespace))
            group.create_task(restart_after(self._supervisor, "node-helper", self._layout.node_certificate))
            self._say("node-helper runs")
        await node.wait_ready()

    async def _start_gateway(self, control_plane: ControlPlane, group: asyncio.TaskGroup) -> None:
        options = self._options
        await self._apply(await asyncio.to_thread(self._describe_sandboxes))
        images = await asyncio.to_thread(self._find_images)
        parts = (self._layout, control_plane, images, str(options.address), options.program)
        gateway = await asyncio.to_thread(Gateway, *parts)
        if not await becomes_true(control_plane.api.has_condition(DEPLOYMENT, "Available"), _PATIENCE):
            self._say("agent-sandbox's controller does not run yet: no sandbox can be claimed before")
        await self._supervisor.start(await gateway.program())
        group.create_task(restart_after(self._supervisor, PROGRAM, gateway.certificate))
        group.create_task(gateway.keep_names(self._supervisor))
        self._say(f"gateway runs on port {PORT}")

    def _describe_sandboxes(self) -> list[dict[str, Any]]:
        image = self._addon_images[CONTROLLER].name
        return [*describe_sandboxes(), *describe_agent_sandbox(self._options.components, image)]

    def _find_images(self) -> NodeImages:
        return find_images(self._programs)

    @property
    def _programs(self) -> Path:
        return self._options.components.program("kubelet").parent

    async def _apply(self, objects: list[dict[str, Any]]) -> None:
        """Applies objects as the administrator; server-side, so that a repetition changes nothing."""
        command = [str(self._options.components.program("kubectl")), f"--kubeconfig={self._layout.kubeconfig}"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *("apply", "--server-side", "--force-conflicts", "--filename=-"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"HOME": str(self._layout.server), "PATH": _PATH},
        )
        content = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}).encode()
        output, _ = await process.communicate(content)
        if process.returncode != 0:
            detail = output.decode(errors="replace")[-1500:]
            hint = "the logs of all components are in /var/lib/k8e/logs"
            raise StartFailed("cluster_not_set_up", "the cluster does not take its objects", detail=detail, hint=hint)


def require_tools(path: str) -> None:
    """Of the distribution: pods that name no runtime run with runc, and rules and routes are set by the others."""
    if missing := [tool for tool in ("runc", "nft", "ip") if shutil.which(tool, path=path) is None]:
        hint = "Debian and Ubuntu: apt-get install runc nftables iproute2"
        raise StartFailed("tools_missing", f"this machine has no {', '.join(missing)}", hint=hint)


def _take(file: IO[str]) -> None:
    """Tried for a second: a command that asks whether a supervisor runs has the lock for a moment."""
    end = time.monotonic() + 1.0
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                hint = "end that one first, or let it run"
                raise StartFailed("already_running", "a supervisor runs on this machine", hint=hint) from None
            time.sleep(0.05)


def name_node() -> str:
    """The machine's own name, as Kubernetes writes it."""
    return os.uname().nodename.lower()

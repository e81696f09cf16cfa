"""A server on a unix socket that takes Firecracker's requests as its published description has them, and nothing else.

The facts are those of src/firecracker/swagger/firecracker.yaml in the repository firecracker-microvm/firecracker,
version 1.17.0-dev, of the requests that k8e makes: which fields there are, of which type, and which have to be there.
Besides, what its text says: only before the start, an id in a path is that of the body.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# By path: fields that have to be there, and those that may.
FACTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "/machine-config": (
        {"vcpu_count": range(1, 33), "mem_size_mib": int},
        {"smt": bool, "track_dirty_pages": bool, "cpu_template": str, "huge_pages": ("None", "Transparent", "2M")},
    ),
    "/boot-source": ({"kernel_image_path": str}, {"boot_args": str, "initrd_path": str}),
    "/drives/{drive_id}": (
        {"drive_id": str, "is_root_device": bool},
        {
            "partuuid": str,
            "cache_type": ("Unsafe", "Writeback"),
            "is_read_only": bool,
            "path_on_host": str,
            "rate_limiter": dict,
            "io_engine": ("Sync", "Async"),
            "socket": str,
        },
    ),
    "/network-interfaces/{iface_id}": (
        {"iface_id": str, "host_dev_name": str},
        {"guest_mac": str, "mtu": range(68, 65536), "rx_rate_limiter": dict, "tx_rate_limiter": dict},
    ),
    "/vsock": ({"guest_cid": range(3, 1 << 32), "uds_path": str}, {"vsock_id": str}),
    "/entropy": ({}, {"rate_limiter": dict}),
    "/actions": ({"action_type": ("FlushMetrics", "InstanceStart", "SendCtrlAltDel")}, {}),
}


def suits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        return value in wanted
    if isinstance(wanted, range):
        return type(value) is int and value in wanted
    return type(value) is wanted


def find_fault(path: str, body: Any) -> str:
    """Empty when it is as described."""
    for pattern, (required, optional) in FACTS.items():
        names = re.findall(r"{(\w+)}", pattern)
        match = re.fullmatch(re.sub(r"{\w+}", "([A-Za-z0-9_]+)", pattern), path)
        if match is None:
            continue
        if not isinstance(body, dict) or set(required) - set(body):
            return f"missing of {path}: {set(required) - set(body or ())}"
        known = {**required, **optional}
        for name, value in body.items():
            if name not in known or not suits(value, known[name]):
                return f"{path}: {name} is {value!r}"
        if [body[name] for name in names] != list(match.groups()):
            return f"{path}: the body has another id"
        return ""
    return f"no such path: {path}"


@dataclass
class Api:
    """Serves until its socket is closed; as Firecracker does, a connection has several requests."""

    heard: list[tuple[str, Any]] = field(default_factory=list)
    started: bool = False
    answers: Mapping[str, bytes] = field(default_factory=dict)  # by path: instead of the usual

    async def serve(self, path: Path) -> asyncio.Server:
        return await asyncio.start_unix_server(self._talk, path)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await self._read_head(reader):
            method, path, _ = head.split("\r\n")[0].split(" ")
            found = re.search(r"(?i)content-length: (\d+)", head)
            body = json.loads(await reader.readexactly(int(found[1]) if found else 0))
            writer.write(self.answers.get(path) or self._answer(method, path, body))
            await writer.drain()
        writer.close()

    async def _read_head(self, reader: asyncio.StreamReader) -> str:
        try:
            return (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return ""

    def _answer(self, method: str, path: str, body: Any) -> bytes:
        fault = "" if method == "PUT" else f"{method} is not used"
        fault = fault or find_fault(path, body) or ("it runs already" if self.started else "")
        if fault:
            return refuse(fault)
        self.heard.append((path, body))
        self.started = body.get("action_type") == "InstanceStart"
        return b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"


def refuse(fault: str) -> bytes:
    content = json.dumps({"fault_message": fault}).encode()
    head = f"HTTP/1.1 400 \r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content

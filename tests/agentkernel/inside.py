"""Tries from inside what a sandbox lets through: prints one JSON object. It uses the standard library alone.

Arguments: JSON with `names` and `addresses` to be reached, `reads` and `writes` of paths, `env` of variables.
"""

import contextlib
import json
import os
import socket
import sys
from typing import Any


def reach(host: str) -> str:
    """The address that answered, or the name of the error."""
    try:
        with socket.create_connection((host, 80), timeout=20) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            data = b""
            while piece := connection.recv(65536):
                data += piece
        return str(json.loads(data.partition(b"\r\n\r\n")[2])["address"])
    except OSError as error:
        return "!" + type(error).__name__


def read(path: str) -> str:
    try:
        if os.path.isdir(path):
            return ",".join(sorted(os.listdir(path)))
        with open(path, errors="replace") as file:
            return file.read(1000)
    except OSError as error:
        return "!" + type(error).__name__


def write(path: str) -> str:
    try:
        with open(path, "a") as file:
            file.write("")
        return "written"
    except OSError as error:
        return "!" + type(error).__name__


def fill(path: str) -> int:
    """How many bytes there is room for, of 128 MiB."""
    block = bytes(1 << 20)
    done = 0
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while done < 128 << 20:
            done += file.write(block)
    os.unlink(path)
    return done


def hold() -> int:
    """The capabilities that any process inside could ever have: the agent's bounding set."""
    with contextlib.suppress(OSError), open("/proc/1/status") as file:
        for line in file:
            if line.startswith("CapBnd:"):
                return int(line.split()[1], 16)
    return -1


wanted: dict[str, Any] = json.loads(sys.argv[1])
found = {
    "reached": {host: reach(host) for host in wanted["hosts"]},
    "read": {path: read(path) for path in wanted["reads"]},
    "written": {path: write(path) for path in wanted["writes"]},
    "env": {name: os.environ.get(name) for name in wanted["env"]},
    "capabilities": hold(),
    "root": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
    "filled": fill("/tmp/filled"),
    "loopback": socket.create_server(("127.0.0.1", 0)).getsockname()[0],
}
sys.stdout.write(json.dumps(found) + "\n")

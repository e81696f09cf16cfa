"""Starts the real agent as PID 1: in bare namespaces (bubblewrap) and inside gVisor (runsc). Needs root.

Not the product's engine: just enough of a sandbox around the agent that its behaviour can be seen. Whatever happens
to the caller, nothing stays: both are tied to the life of the thread that starts them, and closing one waits until
its last process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Another build of the agent can be tried by naming it.
AGENT = Path(os.environ.get("K8E_AGENT", ROOT / "build" / "agent" / "k8e-agent"))
ASAN_AGENT = Path(os.environ.get("K8E_AGENT_ASAN", ROOT / "build" / "agent" / "k8e-agent-asan"))
SMALL_BYTES = 2 << 20
PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:20001:20001:user:/workspace:/bin/sh\n"
GROUP = "root:x:0:\nuser:x:20001:\n"
# The same that an engine will give: what the agent needs to act for others, and nothing towards the kernel.
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETPCAP", "SETUID"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A sandbox with an agent that is starting or running in it."""

    kind: str
    socket: Path  # of the agent, seen from the host
    instance: bytes
    runtime: subprocess.Popen[bytes]  # bwrap or runsc
    stderr: Path | None = None  # what the agent says, in bare namespaces
    agent_pid: int = 0  # on the host, in bare namespaces


@dataclass(frozen=True, slots=True)
class Variation:
    """What a test may want different about a bare sandbox."""

    agent: Path = AGENT
    env: dict[str, str] = field(default_factory=dict)
    bwrap: Sequence[str] = ()
    inherit_listener: bool = False  # `--fd`: the socket is nowhere inside the sandbox


def find_runsc() -> str | None:
    return shutil.which("runsc")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="k8e-sandbox-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def filesystem_arguments(folder: Path) -> list[str]:
    """A small world: the machine's own /usr, read only, and nothing else of it."""
    for name, content in (("passwd", PASSWD), ("group", GROUP)):
        (folder / name).write_text(content)
    arguments = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/tmp"]
    for name in ("/etc", "/run"):
        arguments += ["--perms", "0755", "--dir", name]
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", f"usr/{name}", f"/{name}"]
    arguments += ["--perms", "0755", "--tmpfs", "/workspace"]
    arguments += ["--perms", "1777", "--size", str(SMALL_BYTES), "--tmpfs", "/small"]
    for name in ("passwd", "group"):
        arguments += ["--ro-bind", str(folder / name), f"/etc/{name}"]
    return arguments


@contextlib.contextmanager
def launch_bare(variation: Variation | None = None) -> Iterator[Launched]:
    """The agent in pid, mount, ipc, uts and net namespaces of its own, as root without a user namespace."""
    chosen = variation or Variation()
    instance = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        sockets = folder / "run"
        sockets.mkdir(mode=0o700)
        path = sockets / "agent.sock"
        status_read, status_write = os.pipe()
        stack.callback(os.close, status_read)
        inherited = [status_write]
        arguments = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--as-pid-1"]
        arguments += ["--die-with-parent", "--cap-add", "ALL", "--json-status-fd", str(status_write)]
        arguments += [*filesystem_arguments(folder), "--ro-bind", str(chosen.agent), "/agent"]
        if chosen.inherit_listener:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen(16)
            inherited.append(listener.fileno())
            listen = ["--fd", str(listener.fileno())]
        else:
            arguments += ["--bind", str(sockets), "/run/k8e"]
            listen = ["--listen", "/run/k8e/agent.sock"]
        arguments += [*chosen.bwrap, "/agent", *listen, "--instance", instance.hex()]
        stderr = folder / "stderr"
        with stderr.open("wb") as output:
            runtime = subprocess.Popen(
                arguments, env=chosen.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=inherited
            )
        stack.callback(end_process, runtime)
        os.close(status_write)
        agent_pid = read_child_pid(status_read, stderr)
        yield Launched("bare", path, instance, runtime, stderr, agent_pid)


def read_child_pid(status: int, stderr: Path) -> int:
    """From bwrap's report, which it writes once the namespaces stand."""
    report = b""
    while b"\n" not in report:
        if not (chunk := os.read(status, 4096)):
            raise RuntimeError(f"bwrap did not start: {stderr.read_text()}")
        report += chunk
    return int(json.loads(report.splitlines()[0])["child-pid"])


def end_process(runtime: subprocess.Popen[bytes]) -> None:
    """bwrap takes PID 1 of the sandbox with it, and that everything else."""
    runtime.kill()
    runtime.wait()


def describe_bundle(folder: Path, sockets: Path, instance: bytes) -> dict[str, Any]:
    """The OCI bundle of a gVisor sandbox like the bare one."""
    capabilities = [f"CAP_{name}" for name in CAPABILITIES]

    def bind(source: Path | str, target: str, *options: str) -> dict[str, Any]:
        return {"destination": target, "type": "bind", "source": str(source), "options": ["rbind", *options]}

    def tmpfs(target: str, *options: str) -> dict[str, Any]:
        return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", *options]}

    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": ["/agent", "--listen", "/run/k8e/agent.sock", "--instance", instance.hex()],
            "env": [],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": str(folder / "rootfs"), "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts"},
            bind("/usr", "/usr", "ro"),
            bind(sockets, "/run/k8e", "rw"),
            tmpfs("/tmp", "mode=1777"),
            tmpfs("/workspace", "mode=0755"),
            tmpfs("/small", "mode=1777", f"size={SMALL_BYTES}"),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]},
    }


def fill_rootfs(rootfs: Path, agent: Path) -> None:
    for name in ("usr", "proc", "dev", "tmp", "workspace", "small", "run/k8e", "etc"):
        (rootfs / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            (rootfs / name).symlink_to(f"usr/{name}")
    (rootfs / "etc" / "passwd").write_text(PASSWD)
    (rootfs / "etc" / "group").write_text(GROUP)
    shutil.copy(agent, rootfs / "agent")


@contextlib.contextmanager
def launch_gvisor(agent: Path = AGENT) -> Iterator[Launched]:
    runsc = find_runsc()
    if runsc is None:
        raise FileNotFoundError("runsc is not installed")
    instance = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        sockets, state = folder / "run", folder / "state"
        sockets.mkdir(mode=0o700)
        fill_rootfs(folder / "rootfs", agent)
        (folder / "config.json").write_text(json.dumps(describe_bundle(folder, sockets, instance)))
        name = f"k8e-{instance.hex()[:12]}"
        common = [runsc, "--root", str(state), "--network=none", "--host-uds=create", "--ignore-cgroups"]
        # Killed with this thread, and the sandbox with it. No output: runsc writes files at offset 0, and a pipe that
        # nobody reads would stop it.
        runtime = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *common, "run", "--bundle", str(folder), name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(end_process, runtime)
        stack.callback(subprocess.run, [*common, "delete", "--force", name], stderr=subprocess.DEVNULL, check=False)
        yield Launched("gvisor", sockets / "agent.sock", instance, runtime)

"""Starts the real agent as PID 1: in bare namespaces (bubblewrap) and inside gVisor (runsc). Needs root.

Not the product's engine: just enough of a sandbox around the agent that its behaviour can be seen. Whatever happens
to the caller, nothing stays: sandboxes end with the thread that started them, and closing one waits until its last
process is gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
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
POD_AGENT = Path(os.environ.get("K8E_AGENT_POD", ROOT / "build" / "agent" / "k8e-agent-pod"))
ASAN_POD_AGENT = Path(os.environ.get("K8E_AGENT_POD_ASAN", ROOT / "build" / "agent" / "k8e-agent-pod-asan"))
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
    port: int = 0  # of an agent of pods, on 127.0.0.1


@dataclass(frozen=True, slots=True)
class Variation:
    """What a test may want different about a bare sandbox."""

    agent: Path = AGENT
    env: dict[str, str] = field(default_factory=dict)
    bwrap: Sequence[str] = ()
    inherit_listener: bool = False  # `--fd`: the socket is nowhere inside the sandbox
    gateway: bytes | None = None  # its public key: an agent of pods, which inherits a TCP socket
    listen: Sequence[str] | None = None  # ... or listens by itself, in the network namespace of who starts it
    as_pid_1: bool = True
    prefix: Sequence[str] = ()  # a command that starts bwrap, such as prlimit


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
    # Root of this sandbox is the machine's root, without a user namespace between: the machine's settings are not its.
    arguments += ["--ro-bind", "/proc/sys", "/proc/sys"]
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
        arguments = [*chosen.prefix, "bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        arguments += ["--unshare-net"] if chosen.listen is None else []
        arguments += ["--as-pid-1"] if chosen.as_pid_1 else []
        arguments += ["--die-with-parent", "--json-status-fd", str(status_write)]
        for capability in CAPABILITIES:
            arguments += ["--cap-add", f"CAP_{capability}"]
        arguments += [*filesystem_arguments(folder), "--ro-bind", str(chosen.agent), "/agent"]
        port = 0
        if chosen.listen is not None:
            listen = list(chosen.listen)
        elif chosen.gateway is not None:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
            port = server.getsockname()[1]
            inherited.append(server.fileno())
            listen = ["--fd", str(server.fileno())]
        elif chosen.inherit_listener:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen(16)
            inherited.append(listener.fileno())
            listen = ["--fd", str(listener.fileno())]
        else:
            arguments += ["--bind", str(sockets), "/run/k8e"]
            listen = ["--listen", "/run/k8e/agent.sock"]
        listen += ["--gateway", chosen.gateway.hex()] if chosen.gateway is not None else []
        arguments += [*chosen.bwrap, "/agent", *listen, "--instance", instance.hex()]
        stderr = folder / "stderr"
        with stderr.open("wb") as output:
            runtime = subprocess.Popen(
                arguments, env=chosen.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=inherited
            )
        stack.callback(end_process, runtime)
        os.close(status_write)
        agent_pid = read_child_pid(status_read, stderr)
        stack.enter_context(kill_at_the_end(agent_pid))
        yield Launched("bare", path, instance, runtime, stderr, agent_pid, port)


def read_child_pid(status: int, stderr: Path) -> int:
    """From bwrap's report, which it writes once the namespaces stand."""
    report = b""
    while b"\n" not in report:
        if not (chunk := os.read(status, 4096)):
            raise RuntimeError(f"bwrap did not start: {stderr.read_text()}")
        report += chunk
    return int(json.loads(report.splitlines()[0])["child-pid"])


def end_process(runtime: subprocess.Popen[bytes]) -> None:
    """Lets it see the end of what it started (it is the one who reaps that), but not for ever."""
    try:
        runtime.wait(10)
    except subprocess.TimeoutExpired:
        runtime.kill()
        runtime.wait()


# Reads "pid namespace" lines; at their end kills every such process that is still the one it was.
WATCHDOG = """
while read -r pid namespace; do set -- "$@" "$pid:$namespace"; done
for each; do [ "$(readlink "/proc/${each%%:*}/ns/pid")" = "${each#*:}" ] && kill -9 "${each%%:*}"; done
"""


@functools.cache
def watchdog() -> int:
    """A pipe to somebody who outlives this process and then ends the sandboxes it has left.

    bwrap's --die-with-parent is not enough for that: the kernel forgets it when a process changes its ids, as the agent
    does to act for somebody.
    """
    read, write = os.pipe()
    os.posix_spawn("/bin/sh", ["sh", "-c", WATCHDOG], {}, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)], setsid=True)
    os.close(read)
    return write


@contextlib.contextmanager
def kill_at_the_end(agent_pid: int) -> Iterator[None]:
    """Kills PID 1 of a sandbox, and so everything else in it, at the end of the block or of this process."""
    handle = os.pidfd_open(agent_pid)
    try:
        os.write(watchdog(), f"{agent_pid} {os.readlink(f'/proc/{agent_pid}/ns/pid')}\n".encode())
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


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
        stack.callback(end_container, runtime, common, name)
        yield Launched("gvisor", sockets / "agent.sock", instance, runtime)


def end_container(runtime: subprocess.Popen[bytes], common: list[str], name: str) -> None:
    # Killed before it is deleted: `delete --force` by itself waits five seconds and then gives up.
    subprocess.run([*common, "kill", name, "KILL"], stderr=subprocess.DEVNULL)
    end_process(runtime)
    subprocess.run([*common, "delete", "--force", name], stderr=subprocess.DEVNULL)

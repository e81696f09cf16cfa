"""Nothing of the host is inside, by whatever path, and nothing on the host follows a path that a sandbox made."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.engine import EngineError
from k8e.link.errors import AgentError, Code
from k8e.link.model import AGENT, ExecOptions, Identity
from tests.engine.rig import ROOT, Rig, Room, read_host
from tests.engine.traces import living_processes

NOT_THERE = (
    "/boot",
    "/etc/gshadow",
    "/etc/machine-id",
    "/etc/shadow",
    "/etc/ssh",
    "/etc/ssl/private",
    "/etc/sudoers",
    "/home/user/.ssh",
    "/lost+found",
    "/media",
    "/mnt",
    "/root/.bash_history",
    "/root/.config",
    "/root/.ssh",
    "/run/containerd",
    "/run/dbus",
    "/run/docker.sock",
    "/run/systemd",
    "/sys/fs/cgroup/memory",
    "/var/lib",
    "/var/log",
    "/var/run/docker.sock",
    "/var/spool",
    "/work",
)
ROUTES = (
    "{}",
    "/workspace/../{}",
    "/workspace/../../../../../../../..{}",
    "/proc/self/root{}",
    "/proc/1/root{}",
    "/proc/1/root/../../..{}",
    "/proc/1/cwd{}",
    "/proc/self/cwd{}",
    "/workspace/link-to-root{}",
    "/workspace/link-up{}",
    "/usr/..{}",
    "/tmp/../..{}",
    "/dev/fd/../../..{}",
    "/run/k8e/../..{}",
)
NOBODY_OUT = frozenset({Code.NOT_FOUND, Code.DENIED, Code.NOT_DIRECTORY, Code.LINK_LOOP})


@pytest.fixture(scope="module")
def secret() -> Iterator[Path]:
    """A file of the host that all users there may read and write, where a sandbox has a directory of the same name."""
    path = Path("/tmp", f"k8e-secret-{secrets.token_hex(8)}")
    path.write_text("the host's own")
    path.chmod(0o666)
    yield path
    path.unlink()


@pytest.mark.parametrize("path", NOT_THERE)
async def test_paths_of_the_host_are_not_there(room: Room, path: str) -> None:
    with pytest.raises(AgentError) as raised:
        await room.link.stat(path.encode(), follow=False)
    assert raised.value.code is Code.NOT_FOUND


async def test_the_engines_own_directories_are_not_there(rig: Rig, room: Room) -> None:
    for path in (rig.engine.layout.state, rig.engine.layout.run, room.paths.top, room.paths.bundle):
        with pytest.raises(AgentError) as raised:
            await room.link.stat(os.fsencode(path))
        assert raised.value.code is Code.NOT_FOUND


async def test_nothing_but_the_image_is_in(rig: Rig) -> None:
    expected = {
        "/": "bin dev etc home k8e-agent k8e-loader.so lib lib32 lib64 libx32 opt proc root run sbin srv sys tmp usr "
        "var workspace",
        "/home": "user",
        "/root": "",
        "/var": "tmp",
        "/run": "k8e",
        "/opt": "k8e",
        "/srv": "",
        "/tmp": "",
    }
    async with rig.room() as room:  # in which no other test has been
        for folder, known in expected.items():
            found = {entry.name.decode() for entry in await room.link.list_dir(folder.encode())}
            assert found <= set(known.split()), folder
        names = {entry.name.decode() for entry in await room.link.list_dir(b"/etc")}
    own = "passwd group hosts hostname resolv.conf nsswitch.conf alternatives ssl ld.so.cache"
    assert set(own.split()) <= names
    assert not {"shadow", "sudoers", "ssh", "fstab", "machine-id", "cron.d", "systemd", "apt", "docker"} & names


@pytest.mark.parametrize("who", [AGENT, ROOT, Identity(1000, 1000)], ids=["agent", "root", "user"])
async def test_no_route_leads_out_through_the_file_api(room: Room, secret: Path, who: Identity) -> None:
    for name, target in (("link-to-root", "/"), ("link-up", "../../../..")):
        await room.output("ln", "-sfn", target, f"/workspace/{name}")
    for route in ROUTES:
        path = route.format(secret).encode()
        with pytest.raises(AgentError) as raised:
            await room.link.read_file(path, identity=who)
        assert raised.value.code in NOBODY_OUT, path
        # Writing makes a file of the sandbox's own, or none at all.
        with contextlib.suppress(AgentError):
            await room.link.write_file(path, b"changed", identity=who)
            await room.link.remove(path, identity=who)
        with contextlib.suppress(AgentError):
            await room.link.chmod(path, 0o600, identity=who)
    assert read_host(secret) == "the host's own"
    assert os.stat(secret).st_mode & 0o777 == 0o666


@pytest.mark.parametrize("options", [{}, {"identity": ROOT}, {"identity": AGENT, "keep_capabilities": True}])
async def test_no_route_leads_out_for_commands(room: Room, secret: Path, options: ExecOptions) -> None:
    code = """
import json, os, sys
secret, routes = sys.argv[1], json.loads(sys.argv[2])
for pid in filter(str.isdigit, os.listdir("/proc")):
    routes += [f"/proc/{pid}/root{{}}", f"/proc/{pid}/cwd{{}}", f"/proc/{pid}/task/{pid}/root{{}}"]
    try:
        routes += [f"/proc/{pid}/fd/{fd}{{}}" for fd in os.listdir(f"/proc/{pid}/fd")]
        routes += [f"/proc/{pid}/fd/{fd}/../../../../..{{}}" for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        pass
for route in routes:
    path = route.format(secret)
    try:
        with open(path, "r+") as file:
            print("reached", path, file.read())
    except OSError:
        pass
"""
    done = await room.python(code, str(secret), json.dumps(ROUTES), **options)
    assert (done.outcome.exit_code, done.stdout, done.stderr) == (0, b"", b"")
    assert read_host(secret) == "the host's own"


async def test_an_open_directory_does_not_lead_out_of_a_new_root(room: Room, secret: Path) -> None:
    """The classic: keep a directory open, chroot below it, walk up. Here even the chroot fails."""
    code = """
import os, sys
here = os.open("/", os.O_RDONLY)
os.makedirs("/tmp/jail", exist_ok=True)
try:
    os.chroot("/tmp/jail")
except PermissionError:
    pass
os.fchdir(here)
for _ in range(64):
    os.chdir("..")
try:
    print(open(sys.argv[1].lstrip("/")).read())
except FileNotFoundError:
    print("not there")
"""
    done = await room.as_agent("/usr/bin/python3", "-c", code, str(secret))
    assert done.stdout == b"not there\n"


async def test_other_sandboxes_are_not_there(rig: Rig, room: Room) -> None:
    token = secrets.token_hex(8)
    async with rig.room() as other:
        for folder in ("/workspace", "/tmp", "/home/user", "/dev/shm"):
            await other.output("bash", "-c", f"echo {token} > {folder}/{token}")
        process = await other.link.start(other.spec("sleep", f"1000.{int(token, 16)}"))
        script = "find / -path /proc -prune -o -path /sys -prune -o -path /usr -prune -o -name '*'$1'*' -print"
        for options in (ExecOptions(), ExecOptions(identity=AGENT, keep_capabilities=True)):
            done = await room.run("bash", "-c", script, "bash", token, **options)
            assert done.stdout == b""
            listing = await room.output("bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '", **options)
            assert str(int(token, 16)) not in listing
        await process.end(0)
        process.discard()
        await process.wait()


async def test_processes_of_the_host_are_not_there(room: Room) -> None:
    names = [entry.name for entry in await room.link.list_dir(b"/proc") if entry.name.isdigit()]
    assert len(names) < 20
    hosts = {pid for pid, _ in living_processes()}
    assert max(hosts) > 100, "the host has more processes than a fresh sandbox"
    listing = await room.output("bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    assert "pytest" not in listing
    assert "systemd" not in listing


async def test_the_hosts_environment_is_not_there(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8E_TEST_SECRET", token := secrets.token_hex(8))
    output = await room.output("env")
    assert token not in output
    wanted = {name.decode() for name, _ in room.place.env} | {"PWD", "SHLVL", "_"}
    assert {line.partition("=")[0] for line in output.splitlines()} <= wanted
    done = await room.as_agent("bash", "-c", "cat /proc/[0-9]*/environ | tr '\\0' '\\n'")
    assert token.encode() not in done.stdout
    assert {line for line in done.stdout.decode().splitlines() if line.startswith(("SSH_", "AWS_", "SUDO_"))} == set()


async def test_the_description_of_the_sandbox_shows_no_path_of_the_host(rig: Rig, room: Room) -> None:
    """mountinfo names the roots of bind mounts. Where the kernel is the host's, that much can be seen: it must at least
    not show where on the host a person's files are."""
    text = await room.output("cat", "/proc/self/mountinfo")
    assert "/home/" not in text.replace("/home/user", "")
    if not rig.native:
        assert os.fspath(rig.engine.layout.state) not in text


async def test_what_is_read_only_stays_as_it_is(room: Room) -> None:
    for path in (b"/usr/bin/evil", b"/k8e-agent", b"/k8e-loader.so", b"/usr/lib/evil.so", b"/opt/k8e/evil"):
        with pytest.raises(AgentError) as raised:
            await room.link.write_file(path, b"evil")
        assert raised.value.code in {Code.READ_ONLY, Code.DENIED, Code.BUSY}, path
    done = await room.as_agent("bash", "-c", "rm -f /usr/bin/env; mv /usr/bin/true /tmp; chmod 777 /usr; touch /usr/x")
    assert done.outcome.exit_code != 0
    assert {"env", "true"} <= set(os.listdir("/usr/bin"))
    assert "x" not in os.listdir("/usr")


SWAP = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
print("swapping", flush=True)
while True:  # RENAME_EXCHANGE: one of the two is there at any moment
    libc.renameat2(-100, b"/workspace/race/a", -100, b"/workspace/race/b", 2)
"""


@pytest.mark.parametrize("kind", ["final", "middle"])
async def test_a_link_swapped_in_during_an_operation_gains_nothing(room: Room, kind: str) -> None:
    """The agent acts with the user's ids: what only root of the sandbox may read is never read for the user."""
    await room.as_agent("bash", "-c", "rm -rf /root/s; mkdir -p /root/s; echo secret > /root/s/f; chmod -R go= /root")
    await room.output("rm", "-rf", "/workspace/race")
    await room.output("mkdir", "/workspace/race")
    if kind == "final":
        await room.output("bash", "-c", "cd race; echo mine > a; ln -s /root/s/f b")
        path = b"/workspace/race/a"
    else:
        await room.output("bash", "-c", "cd race; mkdir a; echo mine > a/f; ln -s /root/s b")
        path = b"/workspace/race/a/f"
    user = room.place.user
    swapper = await room.link.start(room.spec("/usr/bin/python3", "-c", SWAP))
    try:
        assert await swapper.stdout.read() == b"swapping\n"
        seen = set()
        for _ in range(150):
            with contextlib.suppress(AgentError):
                seen.add(await room.link.read_file(path, identity=user))
            with contextlib.suppress(AgentError):
                await room.link.write_file(path, b"mine\n", identity=user)
            with contextlib.suppress(AgentError):
                await room.link.chmod(path, 0o644, identity=user)
        assert seen <= {b"mine\n"}
    finally:
        await swapper.end(0)
        swapper.discard()
        await swapper.wait()
    assert await room.link.read_file(b"/root/s/f") == b"secret\n"
    assert (await room.link.stat(b"/root/s/f")).mode == 0o600


@pytest.mark.parametrize(
    "path", ["/dev/zero", "/dev/random", "/dev/tty", "/dev/ptmx", "/dev/full", "/workspace/fifo", "/workspace/socket"]
)
async def test_devices_fifos_and_sockets_never_hang(room: Room, path: str) -> None:
    if path.startswith("/workspace"):
        code = "import os, socket; os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('socket')"
        await room.output("rm", "-f", "/workspace/fifo", "/workspace/socket")
        done = await room.python(code)
        assert done.outcome.exit_code == 0, done
    for who in (AGENT, room.place.user):
        with pytest.raises(AgentError) as raised:
            await room.link.read_file(path.encode(), identity=who)
        assert raised.value.code in {Code.NOT_REGULAR, Code.DENIED}
        with pytest.raises(AgentError) as raised:
            await room.link.write_file(path.encode(), b"x", append=True, identity=who)
        assert raised.value.code in {Code.NOT_REGULAR, Code.DENIED}


async def test_files_of_the_agents_own_process_are_closed_to_the_user(room: Room) -> None:
    user = room.place.user
    for path in (b"/proc/self/mem", b"/proc/self/environ", b"/proc/self/fd/3", b"/proc/1/mem", b"/proc/self/auxv"):
        with pytest.raises(AgentError) as raised:
            await room.link.read_file(path, identity=user, length=64)
        assert raised.value.code in {Code.DENIED, Code.NOT_REGULAR, Code.NOT_FOUND, Code.IO}, path


# The way in: a directory that root of the sandbox can write to, and a name in it that the host connects to.


class Listener:
    """A socket of the host, and whether it was connected to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(os.fspath(path))
        self._socket.listen(8)
        self._socket.setblocking(False)

    def visited(self) -> bool:
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        self.path.unlink()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(Path("/tmp", f"k8e-listener-{secrets.token_hex(4)}"))
    yield listener
    listener.close()


REPLACEMENTS = {
    "symlink to a socket of the host": "ln -s {target} agent.sock",
    "chain of symlinks": "ln -s {target} x; ln -s x agent.sock",
    "symlink through proc": "ln -s /proc/self/root{target} agent.sock",
    "symlink to itself": "ln -s agent.sock agent.sock",
    "symlink to nowhere": "ln -s nowhere agent.sock",
    "file": "echo evil > agent.sock",
    "fifo": "mkfifo agent.sock",
    "directory": "mkdir agent.sock",
    "directory with a link": "mkdir agent.sock; ln -s {target} agent.sock/agent.sock",
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
async def test_the_hosts_way_in_follows_nothing(rig: Rig, listener: Listener, replacement: str) -> None:
    async with rig.room() as room:
        script = f"cd /run/k8e; rm agent.sock; {REPLACEMENTS[replacement].format(target=listener.path)}"
        done = await room.as_agent("bash", "-c", script)
        assert done.outcome.exit_code == 0, done
        await rig.engine.close()  # lets go of the connection that stands, as a daemon that ends does
        with pytest.raises(EngineError):
            await rig.engine.attach(room.name)
        assert not listener.visited()


async def test_somebody_else_behind_the_socket_is_refused(rig: Rig) -> None:
    """An impostor inside that speaks, but not the protocol."""
    code = """
import os, socket
os.unlink("/run/k8e/agent.sock")
listener = socket.socket(socket.AF_UNIX)
listener.bind("/run/k8e/agent.sock")
listener.listen(8)
print("ready", flush=True)
while True:
    listener.accept()[0].sendall(b"\\xff" * 4096)
"""
    async with rig.room() as room:
        spec = room.spec("/usr/bin/python3", "-c", code, identity=AGENT, keep_capabilities=True)
        process = await room.link.start(spec)
        assert await process.stdout.read() == b"ready\n"
        await rig.engine.close()
        with pytest.raises(EngineError):
            await rig.engine.attach(room.name)


async def test_a_deep_tree_beside_the_socket_does_not_outlive_the_sandbox(rig: Rig) -> None:
    code = """
import os
os.chdir("/run/k8e")
for _ in range(3000):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
os.symlink("/", "link")
"""
    async with rig.room() as room:
        await rig.unless_dead(room.name, room.python(code, identity=ROOT))
    assert room.name not in os.listdir(rig.engine.layout.sandboxes)


@pytest.fixture
def victim() -> Iterator[Path]:
    """A directory of the host that any user could empty."""
    folder = Path("/tmp", f"k8e-victim-{secrets.token_hex(4)}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "file").write_text("precious")
    yield folder
    (folder / "file").unlink()
    folder.rmdir()


async def test_links_in_the_sandboxs_own_root_lead_the_host_nowhere(rig: Rig, victim: Path) -> None:
    """All directories that the host made for the sandbox turned into links: destroying it must not follow them."""
    async with rig.room() as room:
        script = """
            rm -rf /run/k8e/*; ln -s $1 /run/k8e/l; ln -s $1/file /run/k8e/f; ln -s $1 /tmp/l
            cd /; for d in workspace home srv var root; do mv $d $d.old; ln -s $1 $d; done
        """
        await room.as_agent("bash", "-c", script, "bash", str(victim))
    assert read_host(victim / "file") == "precious"

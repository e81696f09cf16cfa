"""An engine of test quality: real processes in bare namespaces that outlive the process that started them.

Everything of a sandbox lies in one directory named after it, and its processes are found again by their command lines:
it can be destroyed by a process that knows nothing but its name. A workspace is a directory there, so that a child can
have its parent's. There is no isolation worth the word and no memory limit; kills for want of memory are a number in a
file, which tests write.

Nor is there a network: nothing is ever reachable. What a sandbox would be allowed is a file, as the rules of a kernel
are there whatever becomes of the daemon, and what it was refused is another one, which tests write.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from devel.sandboxes import AGENT, filesystem_arguments
from k8e.damage import Damage
from k8e.engine import EngineError, Mount, Observation, Place, Refusal, Room, Runtime, RuntimeReport, SandboxSpec, Usage
from k8e.engine.images import Images
from k8e.engine.local.images import LocalImages
from k8e.engine.local.images import Store as ImageStore
from k8e.engine.local.layout import Layout
from k8e.link import AgentLink, Timing
from k8e.link.dial import UnixDialer
from k8e.link.errors import LinkError
from k8e.link.model import Identity
from k8e.policy import HostList

USER = Identity(uid=20_001, gid=20_001)
ENV = (
    (b"PATH", b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    (b"HOME", b"/workspace"),
    (b"LANG", b"C.UTF-8"),
)
DEFAULT_HOSTS = ("packages.test", "code.test")
# A sandbox that dies must not hold a test up.
TIMING = Timing(reconnect=3.0)


def make_instance(sandbox: str) -> bytes:
    return hashlib.sha256(sandbox.encode()).digest()[:16]


def has_mark(pid: int, *marks: str) -> bool:
    """Whether one of the marks is in its command line, or in the name of the file that it complains to: a process that
    is just becoming another program has no command line, which on a busy machine can take a while, and an agent's does
    not say where it lives. A process that is not found is not ended."""
    words = ""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        words += f"\0{os.readlink(f'/proc/{pid}/fd/2')}"
    except OSError:
        pass  # gone, or without such a file
    return any(mark in words for mark in marks)


def find_processes(*marks: str) -> list[int]:
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in pids if pid != os.getpid() and has_mark(pid, *marks)]


def list_tree(roots: list[int]) -> set[int]:
    """The processes, and those that they have started."""
    found, waiting = set[int](), list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in found:
            continue
        found.add(pid)
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                waiting += map(int, children.read_text().split())
    return found


def measure_tree(roots: list[int]) -> Usage:
    """By the kernel's tables of the processes."""
    seconds, memory = 0.0, 0
    for pid in list_tree(roots):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone
        seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with children that were waited for
        memory += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(seconds, memory)


class BareEngine:
    """Implements `k8e.engine.Engine`, and keeps its contract (test_engine.py), but that it shows no directory of the
    machine."""

    made_of = "bwrap and whatever is there"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._links: dict[str, AgentLink] = {}
        self._opening: dict[str, asyncio.Task[AgentLink]] = {}
        self._pids: dict[str, int | None] = {}
        layout = Layout(folder.with_name("image-state"), folder.with_name("image-run"))
        self._images = LocalImages(layout, store=ImageStore(layout, fresh=0))
        self.egress_failure: EngineError | None = None  # what setting a list comes to
        self.stop_failure: EngineError | None = None  # and stopping
        self.bind_failure: EngineError | None = None  # and binding
        self.bound: dict[str, Sequence[Mount]] = {}  # what was asked for; as in `create`, nothing is shown of it
        self.lives: dict[str, float] = {}  # how long each may live, as it was last said
        self.wanted: Mapping[SandboxSpec, int] = {}
        self.most_ready = 0  # of each kind it says that it has so many ready by itself; 0: it says that it has none
        self.reports: Sequence[RuntimeReport] = (
            RuntimeReport(Runtime.GVISOR, available=False, reason="not in this engine", hint="use native"),
            RuntimeReport(Runtime.NATIVE, available=True, version="bwrap"),
        )

    def _top(self, sandbox: str) -> Path:
        return self._folder / sandbox

    def _marks(self, sandbox: str) -> tuple[str, ...]:
        top = self._top(sandbox)
        return f"{top}/run", f"{top}/stderr", make_instance(sandbox).hex()

    def processes(self, sandbox: str) -> list[int]:
        """bwrap and the agent; whatever else runs inside dies with them. (A child's bwrap names its parent, too.)"""
        return find_processes(*self._marks(sandbox))

    def owns(self, sandbox: str, pid: int) -> bool:
        return has_mark(pid, *self._marks(sandbox))

    async def choose(self, wanted: Runtime | None = None) -> RuntimeReport:
        named = [report for report in self.reports if wanted in (None, report.runtime)]
        unknown = RuntimeReport(wanted or Runtime.NATIVE, available=False, reason="not in this engine")
        return next((report for report in named if report.available), named[0] if named else unknown)

    async def probe(self) -> Sequence[RuntimeReport]:
        return self.reports

    async def create(self, sandbox: str, spec: SandboxSpec) -> None:
        await self._require(spec)
        top = self._top(sandbox)
        try:
            top.mkdir(parents=True, mode=0o755)
        except FileExistsError as error:
            raise EngineError("sandbox", f"{sandbox} exists already") from error
        try:
            (top / "run").mkdir(mode=0o700)
            (top / "workspace").mkdir()
            (top / "oom_kills").write_text("0")
            (top / "egress").write_text("\n".join(spec.egress.texts))
            shared = self._top(spec.shares or sandbox) / "workspace"
            os.chown(shared, USER.uid or 0, USER.gid or 0)
            self._spawn(sandbox, top, shared)
            await self._dial(sandbox)
        except BaseException as error:
            await self.destroy(sandbox)
            if isinstance(error, OSError | LinkError):
                raise EngineError("namespaces", str(error)) from error
            raise

    async def _require(self, spec: SandboxSpec) -> None:
        """What it is to be made of is there."""
        report = next((report for report in self.reports if report.runtime is spec.runtime), None)
        if report is None or not report.available:
            raise EngineError(spec.runtime.value, report.reason if report else "not in this engine", "use native")
        if spec.image != "host" and await self._images.find(spec.image) is None:
            raise EngineError("image", f"there is no {spec.image}")

    def _spawn(self, sandbox: str, top: Path, workspace: Path) -> None:
        arguments = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--as-pid-1"]
        arguments += ["--cap-add", "ALL", *filesystem_arguments(top), "--ro-bind", str(AGENT), "/agent"]
        arguments += ["--bind", str(workspace), "/workspace", "--bind", str(top / "run"), "/run/k8e"]
        arguments += ["/agent", "--listen", "/run/k8e/agent.sock"]
        arguments += ["--instance", make_instance(sandbox).hex()]
        with (top / "stderr").open("wb") as output:
            # This process does not wait for it: it is to outlive us. The shell's child has init as its parent.
            subprocess.run(
                ["sh", "-c", '"$@" & exit 0', "sh", *arguments],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                check=True,
            )

    async def bind(self, sandbox: str, mounts: Sequence[Mount]) -> None:
        if self.bind_failure is not None:
            raise self.bind_failure
        if not self._alive(sandbox):
            raise EngineError("sandbox", f"{sandbox} is not running")
        self.bound[sandbox] = mounts

    async def prolong(self, sandbox: str, life: float) -> None:
        self.lives[sandbox] = life

    async def measure_room(self) -> Room | None:
        return None

    async def keep_ready(self, wanted: Mapping[SandboxSpec, int]) -> Mapping[SandboxSpec, int] | None:
        self.wanted = wanted
        return {spec: min(number, self.most_ready) for spec, number in wanted.items()} if self.most_ready else None

    async def edition(self, spec: SandboxSpec) -> str:
        await self._require(spec)
        return self.made_of

    async def attach(self, sandbox: str) -> tuple[AgentLink, Place]:
        if not self._alive(sandbox):
            raise EngineError("sandbox", f"{sandbox} is not running")
        return await self._dial(sandbox)

    async def _dial(self, sandbox: str) -> tuple[AgentLink, Place]:
        link = self._links.get(sandbox)
        if link is None:
            try:
                link = self._links[sandbox] = await asyncio.shield(self._share_opening(sandbox))
            except LinkError as error:
                raise EngineError("agent", str(error)) from error
        return link, Place(user=USER, home=b"/workspace", workspace=b"/workspace", env=ENV)

    def _share_opening(self, sandbox: str) -> asyncio.Task[AgentLink]:
        """One for all callers, also when the first has left: an agent ends the connection that it had for a new one."""

        def forget(done: asyncio.Task[AgentLink]) -> None:
            del self._opening[sandbox]
            if not done.cancelled() and done.exception() is None:
                self._links.setdefault(sandbox, done.result())

        if sandbox not in self._opening:
            dialer = UnixDialer(self._top(sandbox) / "run" / "agent.sock")
            opening = AgentLink.open(dialer, instance=make_instance(sandbox), deadline=10.0, timing=TIMING)
            self._opening[sandbox] = asyncio.create_task(opening)
            self._opening[sandbox].add_done_callback(forget)
        return self._opening[sandbox]

    async def observe(self, sandbox: str) -> Observation:
        kills = self._top(sandbox) / "oom_kills"
        oom_kills = int(kills.read_text() or 0) if kills.exists() else 0
        return Observation(self._alive(sandbox), oom_kills, self._take_refusals(sandbox))

    async def measure(self, sandbox: str) -> Usage:
        return measure_tree(self.processes(sandbox))

    def _alive(self, sandbox: str) -> bool:
        # All of /proc only when the one we saw last is gone: this is asked before every command.
        seen = self._pids.get(sandbox)
        if seen is not None and has_mark(seen, make_instance(sandbox).hex()):
            return True
        # The list of /proc changes while it is read: one look that finds none is no proof.
        looks = (next(iter(self.processes(sandbox)), None) for _ in range(3))
        self._pids[sandbox] = next((pid for pid in looks if pid is not None), None)
        return self._pids[sandbox] is not None

    def count_oom_kill(self, sandbox: str) -> None:
        kills = self._top(sandbox) / "oom_kills"
        kills.write_text(str(int(kills.read_text()) + 1))

    def damages(self) -> Sequence[Damage]:
        return ()

    async def set_aside(self, sandbox: str) -> str:
        await self._halt(sandbox)
        if not self._top(sandbox).exists():
            return ""
        kept = self._folder.with_name("kept") / sandbox
        kept.parent.mkdir(exist_ok=True)
        self._top(sandbox).rename(kept)
        return str(kept)

    async def default_egress(self) -> HostList:
        return HostList.parse(DEFAULT_HOSTS)

    async def set_egress(self, sandbox: str, hosts: HostList) -> None:
        if self.egress_failure is not None:
            raise self.egress_failure
        draft = self._top(sandbox) / "egress.new"
        try:
            draft.write_text("\n".join(hosts.texts))
        except FileNotFoundError as error:
            raise EngineError("network", f"there is no sandbox {sandbox}") from error
        draft.rename(self._top(sandbox) / "egress")

    def egress(self, sandbox: str) -> tuple[str, ...]:
        """What is in force."""
        return tuple((self._top(sandbox) / "egress").read_text().split())

    def refuse(self, sandbox: str, refusal: Refusal) -> None:
        with (self._top(sandbox) / "refusals").open("a") as notes:
            notes.write(json.dumps(asdict(refusal)) + "\n")

    def _take_refusals(self, sandbox: str) -> tuple[Refusal, ...]:
        taken = self._top(sandbox) / "refusals.taken"
        with contextlib.suppress(FileNotFoundError):
            (self._top(sandbox) / "refusals").rename(taken)
            return tuple(Refusal(**json.loads(line)) for line in taken.read_text().splitlines())
        return ()

    def kill_sandbox(self, sandbox: str) -> None:
        for pid in self.processes(sandbox):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    async def destroy(self, sandbox: str) -> None:
        await self._halt(sandbox)
        await asyncio.to_thread(shutil.rmtree, self._top(sandbox), ignore_errors=True)

    async def list(self) -> Sequence[str]:
        return [entry.name for entry in self._folder.iterdir()] if self._folder.exists() else []

    async def _halt(self, sandbox: str) -> None:
        link = self._links.pop(sandbox, None)
        if link is not None:
            await link.close()
        while self.processes(sandbox):
            self.kill_sandbox(sandbox)
            await asyncio.sleep(0.002)

    async def stop(self, sandbox: str) -> None:
        """The workspace stays, and nothing else does: the rest of such a sandbox is memory."""
        await self._halt(sandbox)
        if self.stop_failure is not None:
            raise self.stop_failure
        if not self._top(sandbox).exists():
            raise EngineError("sandbox", f"{sandbox} does not exist")

    async def start(self, sandbox: str, spec: SandboxSpec) -> None:
        if self._alive(sandbox):
            raise EngineError("sandbox", f"{sandbox} is running already")
        top = self._top(sandbox)
        try:
            (top / "oom_kills").write_text("0")
            (top / "egress").write_text("\n".join(spec.egress.texts))
            (top / "run/agent.sock").unlink(missing_ok=True)
            self._spawn(sandbox, top, top / "workspace")
            await self._dial(sandbox)
        except BaseException as error:
            await self._halt(sandbox)
            if isinstance(error, OSError | LinkError):
                raise EngineError("namespaces", str(error)) from error
            raise

    @property
    def images(self) -> Images:
        """Real ones, of which no sandbox here is made."""
        return self._images

    async def close(self) -> None:
        for opening in list(self._opening.values()):
            opening.cancel()
            await asyncio.wait([opening])
        links, self._links = self._links, {}
        for link in links.values():
            await link.close()

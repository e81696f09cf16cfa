"""`k8e uninstall`: takes back what `k8e doctor --fix` has installed, and names what it leaves."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k8e.cli.client import LocalClient
from k8e.cli.client.daemon_process import is_running, stop_daemon
from k8e.cli.install import files, systemd
from k8e.cli.install.places import CURRENT, GROUP, LIBRARY, UNIT
from k8e.cli.install.record import Record
from k8e.cli.process import Failure, read_some, write_all
from k8e.cli.view import show_value
from k8e.daemon.paths import Paths
from k8e.engine.local.doctor.fixes import remove_engine
from k8e.engine.local.layout import Layout
from k8e.engine.local.runtime.cgroup import hierarchies
from k8e.engine.local.toolchain.runsc import BACKPORTS
from k8e.engine.local.toolchain.tools_layer import TARGET
from k8e.settings.file import USUAL

if TYPE_CHECKING:
    import argparse

STOPPED = "stopped"
GONE = ("destroyed",)


def uninstall(options: argparse.Namespace) -> int:
    if os.geteuid() != 0:
        raise Failure("needs_root", "only root takes an installation back", hint="sudo k8e uninstall")
    if options.with_sessions and options.keep_state:
        hint = "--keep-state keeps stopped sessions; destroy those that run first"
        raise Failure("usage", "--with-sessions destroys what --keep-state keeps: give one of them", hint=hint)
    paths = Paths.from_environment()
    layout = Layout(paths.state_dir, paths.run_dir)
    if not CURRENT.is_symlink() and not files.find_files():
        hint = "`pipx uninstall k8e`, or `uv tool uninstall k8e`, is all there is to do"
        raise Failure("not_installed", "`k8e doctor --fix` has installed nothing here", hint=hint)
    record = Record.read()
    check_sessions(layout, options)
    if not options.yes:
        ask(layout, options)
    return Removal(layout, record, options).run()


def check_sessions(layout: Layout, options: argparse.Namespace) -> None:
    """Refuses while there are sessions, unless they are to be destroyed. Stopped ones are in the state directory."""
    if options.with_sessions:
        return
    if is_running():
        found = LocalClient().list_sessions("all").parse()["sessions"]
        kept = (*GONE, STOPPED) if options.keep_state else GONE
        names = [session["session_id"] for session in found if session["phase"] not in kept]
    else:
        untouched = options.keep_state and not has_processes(layout)
        names = [] if untouched else sorted(path.name for path in layout.sandboxes.glob("*"))
    if names:
        raise Failure(
            "sessions_live",
            f"there are {len(names)} sessions",
            detail=", ".join(names[:20]),
            hint="`k8e sandbox destroy SID` ends one; --with-sessions destroys them all, with their files",
        )


def has_processes(layout: Layout) -> bool:
    """Whether sandboxes run there: they do without a daemon, too."""
    groups = (Path(hierarchy, layout.cgroup) for hierarchy in hierarchies())
    return any(file.read_text().strip() for group in groups for file in group.rglob("cgroup.procs"))


def ask(layout: Layout, options: argparse.Namespace) -> None:
    state = "" if options.keep_state else f", and {layout.state} with everything in it"
    if not os.isatty(0):
        error = f"k8e would be removed{state}, and there is no terminal to ask at"
        raise Failure("not_confirmed", error, hint="--yes removes it without asking")
    write_all(2, f"Remove k8e for all users of this machine{state}? Type yes: ".encode())
    if read_some(0).strip().lower() != b"yes":
        raise Failure("not_confirmed", "nothing was removed", hint="type yes to remove it; --yes does not ask")


class Removal:
    """One step after the other; one that fails does not keep the others from being done, and is said at the end. The
    program is the last to go, so that it can be called again."""

    def __init__(self, layout: Layout, record: Record, options: argparse.Namespace) -> None:
        self.layout = layout
        self.record = record
        self.options = options
        self.removed: list[str] = []
        self.left: list[dict[str, str]] = []
        self.failed: list[str] = []

    def run(self) -> int:
        self.attempt("the daemon", self.stop)
        if not self.failed:  # a daemon that runs has all of the rest
            if not self.options.keep_state:
                self.attempt("sandboxes", self.remove_sandboxes)
                self.attempt("the state directory", self.remove_state)
            self.attempt("files", self.remove_files)
            self.attempt(f"the group {GROUP}", self.remove_group)
            self.attempt("packages", self.remove_packages)
        if not self.failed:
            self.attempt("the program", self.remove_program)
        self.name_rest()
        told: dict[str, Any] = {"removed": self.removed, "left": self.left}
        if self.failed:
            raise Failure(
                "uninstall_incomplete",
                "not everything could be removed",
                detail="; ".join(self.failed),
                hint="see to it, and call `k8e uninstall` again",
                more={"ok": False, **told},
            )
        show_value({"ok": True, **told})
        return 0

    def attempt(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Failure as failure:
            self.failed.append(f"{what}: {failure.error}" + (f": {failure.detail}" if failure.detail else ""))
        except OSError as error:
            self.failed.append(f"{what}: {error}")

    def stop(self) -> None:
        if systemd.runs() and UNIT.exists():
            systemd.disable()
            self.removed.append("the service of systemd")
        if is_running():
            self.removed.append(f"the daemon, pid {stop_daemon()}")

    def remove_sandboxes(self) -> None:
        if not self.layout.state.exists():
            return

        async def collect() -> None:
            async for step in remove_engine(self.layout):
                if step.done:
                    self.removed.append(step.what.removeprefix("remove "))
                else:
                    self.failed.append(f"{step.what}: {step.detail}")

        asyncio.run(collect())

    def remove_state(self) -> None:
        for folder in sorted({self.layout.state, TARGET.parent, self.layout.run}):
            if not folder.exists():
                continue
            if below := find_mounts(folder):
                raise OSError(f"{below[0]} is a mount: nothing in {folder} was removed")
            shutil.rmtree(folder)
            self.removed.append(str(folder))

    def remove_files(self) -> None:
        found = files.find_files()
        files.remove_files(found)
        self.removed += map(str, found)
        if BACKPORTS.exists():
            BACKPORTS.unlink()
            self.removed.append(str(BACKPORTS))
        if systemd.runs():
            systemd.reload()

    def remove_group(self) -> None:
        if not self.record.made_group:
            return
        done = subprocess.run(["groupdel", GROUP], capture_output=True, text=True, check=False)
        if done.returncode not in (0, 6):  # 6: there is none
            raise OSError(done.stderr.strip())
        self.removed.append(f"the group {GROUP}")

    def remove_packages(self) -> None:
        if not self.record.packages or not self.options.packages:
            return
        command = ["apt-get", "remove", "-y", "-qq", "--", *self.record.packages]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, check=False)
        if done.returncode != 0:
            raise OSError(done.stderr.strip()[-800:])
        self.removed += [f"the package {name}" for name in self.record.packages]

    def remove_program(self) -> None:
        shutil.rmtree(LIBRARY)
        self.removed.append(str(LIBRARY))

    def name_rest(self) -> None:
        if self.record.packages and not self.options.packages:
            names = " ".join(self.record.packages)
            self.leave(f"packages: {names}", f"`apt-get remove {names}`, if nothing else needs them")
        if self.options.keep_state and self.layout.state.exists():
            self.leave(str(self.layout.state), "--keep-state: an installation later goes on with it")
        if Path(USUAL).parent.exists():
            self.leave(str(Path(USUAL).parent), "settings, which are yours")
        if self.record.source and os.path.exists(self.record.source):
            self.leave(self.record.source, "`pipx uninstall k8e`, or `uv tool uninstall k8e`")
        self.leave("~/.k8e of each user", "connection profiles and the names of their sessions")

    def leave(self, what: str, why: str) -> None:
        self.left.append({"what": what, "why": why})


def find_mounts(folder: Path) -> list[str]:
    """A mount below it may be the disk of a sandbox, or a directory of the machine."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(folder)]

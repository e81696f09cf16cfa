"""`k8e doctor --fix`: what dead engines left is removed, what anybody still has is not, and packages are installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from k8e.cli.agentkernel import choose
from k8e.engine import EngineError, Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.engine.local.doctor import fixes
from k8e.engine.local.doctor.fixes import Step, fix, render
from k8e.engine.local.engine_locks import ENGINES, EngineLock, dead_engine, known_engines
from k8e.engine.local.layout import Layout
from k8e.engine.local.network.leases import LEDGERS
from k8e.engine.local.toolchain import packages, runsc
from k8e.engine.local.toolchain.packages import Package, install_packages, missing_packages, parse_table
from tests.engine.rig import LIMITS, place_for_engine
from tests.engine.traces import CGROUPS, Trace, find_traces, wait_for_no_traces

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can put things right")

# Makes sandboxes and is then killed: what is left is real.
DOOMED = """
import asyncio, os, sys
from pathlib import Path
from k8e.engine import Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from tests.engine.rig import LIMITS
async def main():
    engine = LocalEngine(Path(sys.argv[1]), Path(sys.argv[2]))
    for report in await engine.probe():
        if report.available:
            await engine.create(f"left-{report.runtime.value}", SandboxSpec(report.runtime, limits=LIMITS))
    print("made", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.contextmanager
def engine_of_another(layout: Layout) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has sandboxes there."""
    words = [sys.executable, "-c", DOOMED, str(layout.state), str(layout.run)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"made\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
async def layout() -> AsyncIterator[Layout]:
    with place_for_engine() as (state, run):
        layout = Layout(state, run)
        yield layout
        # Whatever a test that failed has left.
        await put_right(layout)


async def put_right(layout: Layout, *, claimed: bool = False, table: Sequence[Package] = ()) -> list[Step]:
    """Of the engines on this machine only ours is nobody's: others' tests go on beside this one."""
    steps = [step async for step in fix(lambda state: claimed or state != layout.state, table=table)]
    return [step for step in steps if str(layout.state) in step.what or layout.tag in step.what]


def lasting_traces(layout: Layout) -> set[Trace]:
    """Without processes: the sandboxes' agents start and end some whenever they like."""
    return {trace for trace in find_traces(layout) if trace.kind != "process"}


def network_traces(layout: Layout) -> list[str]:
    found: list[str] = []
    for path in LEDGERS.glob("*/*"):
        with contextlib.suppress(OSError):  # no link, or a neighbour's that is gone
            if os.readlink(path).split(" ")[0] == layout.tag:
                found.append(path.name)
    if shutil.which("nft"):
        tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
        found += [line for line in tables.splitlines() if line.endswith(f"k8e_{layout.tag}")]
    return found


async def assert_nothing_left(layout: Layout) -> None:
    await wait_for_no_traces(layout)
    assert network_traces(layout) == []
    assert layout.tag not in known_engines()


async def test_what_a_killed_engine_left_is_removed(layout: Layout) -> None:
    with engine_of_another(layout) as process:
        kinds = {trace.kind for trace in find_traces(layout)}
        assert kinds >= {"process", "cgroup", "loop device", "directory", "mount"}
        assert network_traces(layout)
        assert await put_right(layout) == [], "as long as it lives it is left alone"
        assert {trace.kind for trace in find_traces(layout)} >= kinds
        process.kill()
        process.wait()
    left = sorted(path.name for path in layout.sandboxes.iterdir())
    assert left
    steps = await put_right(layout)
    assert [step.what for step in steps[:-1]] == [f"remove sandbox {name} in {layout.state}" for name in left]
    assert all(step.done for step in steps), steps
    await assert_nothing_left(layout)
    assert not layout.state.exists()
    assert await put_right(layout) == [], "once"


async def test_a_state_directory_that_somebody_removed_hides_nothing(layout: Layout) -> None:
    with engine_of_another(layout) as process:
        process.kill()
        process.wait()
    await asyncio.to_thread(remove_what_can_be_removed, layout)
    assert find_traces(layout)
    steps = await put_right(layout)
    assert steps
    assert all(step.done for step in steps), steps
    await assert_nothing_left(layout)


def remove_what_can_be_removed(layout: Layout) -> None:
    subprocess.run(["rm", "-rf", "--one-file-system", layout.state, layout.run], capture_output=True, check=False)


async def test_what_a_daemon_will_find_again_is_left_to_it(layout: Layout) -> None:
    with engine_of_another(layout) as process:
        process.kill()
        process.wait()
    before = lasting_traces(layout)
    (step,) = await put_right(layout, claimed=True)
    assert not step.done
    assert "daemon" in step.detail
    assert lasting_traces(layout) == before
    engine = LocalEngine(layout.state, layout.run)
    for name in await engine.list():
        assert (await engine.observe(name)).alive
        await engine.attach(name)
    assert await put_right(layout) == [], "and now somebody has it"
    for name in await engine.list():
        await engine.destroy(name)
    await engine.close()
    await assert_nothing_left(layout)


async def test_two_doctors_at_once(layout: Layout) -> None:
    with engine_of_another(layout) as process:
        process.kill()
        process.wait()
    results = await asyncio.gather(put_right(layout), put_right(layout))
    assert any(results)
    assert all(step.done for steps in results for step in steps), results
    await put_right(layout)
    await assert_nothing_left(layout)


async def test_files_of_others_in_the_same_place_stay(layout: Layout) -> None:
    with engine_of_another(layout) as process:
        process.kill()
        process.wait()
    (layout.state / "letter").write_text("mine")
    (layout.run / "other").mkdir()
    assert all(step.done for step in await put_right(layout))
    assert [path.name for path in layout.state.iterdir()] == ["letter"]
    assert (layout.run / "other").is_dir()
    shutil.rmtree(layout.run)


async def test_groups_of_an_engine_that_nobody_knows_are_reported_and_not_touched(layout: Layout) -> None:
    tops = [path for path in (CGROUPS, *CGROUPS.iterdir()) if (path / "cgroup.procs").exists()]
    stranger = tops[0] / f"k8e-{layout.tag}"
    stranger.mkdir()
    try:
        (step,) = await put_right(layout)
        assert not step.done
        assert layout.tag in step.what
        assert stranger.is_dir()
    finally:
        stranger.rmdir()


class TestPresence:
    def test_is_known_until_nothing_is_left(self, tmp_path: Path) -> None:
        layout = Layout(tmp_path / "s", tmp_path / "r")
        first, second = EngineLock(layout, tmp_path / "e"), EngineLock(layout, tmp_path / "e")
        first.take()
        second.take()
        first.release()
        assert known_engines(tmp_path / "e") == [layout.tag], "somebody else has it"
        with dead_engine(layout.tag, tmp_path / "e") as found:
            assert found is None
        second.release()
        second.release()
        assert known_engines(tmp_path / "e") == []
        second.take()
        del second
        with dead_engine(layout.tag, tmp_path / "e") as found:
            assert found == layout, "gone without a word"

    def test_a_note_that_was_never_written_means_that_nothing_was_made(self, tmp_path: Path) -> None:
        (tmp_path / "01234567").touch()
        with dead_engine("01234567", tmp_path) as found:
            assert found is None
        assert known_engines(tmp_path) == []

    def test_what_is_no_note_is_nobody_s_engine_and_hinders_nobody(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "01234567")
        (tmp_path / "12345678").mkdir()
        (tmp_path / "23456789").symlink_to("23456789")
        for tag in known_engines(tmp_path):
            with dead_engine(tag, tmp_path) as found:
                assert found is None

    def test_a_note_about_another_place_is_not_believed(self, tmp_path: Path) -> None:
        (tmp_path / "01234567").write_text(json.dumps({"state": "/", "run": "/"}))
        with dead_engine("01234567", tmp_path) as found:
            assert found is None

    async def test_of_an_engine_that_is_closed_and_used_again(self, layout: Layout) -> None:
        engine = LocalEngine(layout.state, layout.run)
        assert layout.tag in known_engines(ENGINES)
        await engine.close()
        assert layout.tag not in known_engines(ENGINES)
        report = next(report for report in await engine.probe() if report.available)
        await engine.create("one", SandboxSpec(report.runtime, limits=LIMITS))
        assert layout.tag in known_engines(ENGINES)
        await engine.close()
        assert layout.tag in known_engines(ENGINES), "a sandbox is left"
        await engine.destroy("one")
        await engine.close()
        assert report.runtime in (Runtime.GVISOR, Runtime.NATIVE)


class TestPackages:
    def test_the_table_has_what_the_engine_runs(self) -> None:
        table = parse_table(packages.TABLE.read_text())
        assert {package.purpose for package in table} == {"build", "engine", "engine-optional", "test", "cilium"}
        assert {"runc", "nftables", "util-linux", "e2fsprogs", "mount", "iproute2"} <= {each.name for each in table}
        assert all(package.signs for package in table)

    def test_it_is_the_one_that_the_set_up_reads(self) -> None:
        root = Path(__file__).parent.parent
        text = (root / "scripts" / "setup").read_text()
        assert str(packages.TABLE.relative_to(root)) in text
        begin, end = text.index("missing_packages() {"), text.index("mapfile -t missing")
        function = 'have() { [[ $1 == "bwrap" || $1 == "runc" ]]; }\n' + text[begin:end]
        signs = {"bwrap", "runc"}
        missing = [
            each
            for each in parse_table(packages.TABLE.read_text())
            if not any(sign in signs or (sign.startswith("/") and os.path.exists(sign)) for sign in each.signs)
        ]
        # For the demo, for the suite, and for a cluster with Cilium.
        for wanted, purposes in (
            ("", {"build", "engine"}),
            ("tests", {"build", "engine", "engine-optional", "test"}),
            ("cilium", {"build", "engine", "cilium"}),
        ):
            command = ["bash", "-c", f'{function}\nmissing_packages "$1"', "bash", wanted]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
            assert done.stdout.split() == [each.name for each in missing if each.purpose in purposes]

    def test_what_is_there_is_not_missing(self, tmp_path: Path) -> None:
        table = (
            Package("a", "engine", ("no-such-program", "sh")),
            Package("b", "engine", ("/no/such/file", str(tmp_path))),
            Package("c", "engine", ("no-such-program",)),
            Package("d", "build", ("no-such-program",)),
        )
        assert [package.name for package in missing_packages(table=table)] == ["c"]

    async def test_apt_is_asked_and_believed_only_when_it_is_there_afterwards(self, layout: Layout) -> None:
        if not shutil.which("apt-get"):
            pytest.skip("no apt here")
        there = Package("coreutils", "engine", ("no-such-program",))  # apt has it installed already
        with pytest.raises(EngineError, match="is missing"):
            await install_packages([there])
        steps = [step async for step in fix(lambda _: True, table=[there])]
        assert (steps[0].what, steps[0].done) == ("install coreutils", False)
        assert "coreutils" in steps[0].detail

    async def test_who_has_no_apt_is_told_the_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packages, "find_tool", lambda _: None)
        with pytest.raises(EngineError) as raised:
            await install_packages([Package("runc", "engine", ("runc",))])
        assert "runc" in raised.value.hint


class TestRunsc:
    """One place decides for `k8e doctor --fix` and for scripts/setup."""

    @pytest.mark.parametrize(
        ("version", "current"),
        [
            ("0.0~20221219.0-2", False),  # to dpkg it is newer than 0.0~2024
            ("runsc version 0.0~20221219.0", False),
            ("0.0~20231231.0", False),
            ("0.0~20240101.0", True),
            ("0.0~20240729.0-4~bpo12+2", True),
            ("release-20260701.0", True),
            ("runsc version v0.0.0-20260701204157-69c2d17aea96", True),
            ("runsc version VERSION_MISSING", True),  # of no distribution: the administrator's own
        ],
    )
    def test_one_from_before_2024_is_not_current(self, version: str, current: bool) -> None:
        assert runsc.is_current(version) is current

    def test_the_set_up_asks_the_same_place(self) -> None:
        text = (Path(__file__).parent.parent / "scripts" / "setup").read_text()
        assert f"-m {runsc.__name__} " in text
        assert "compare-versions" not in text

    async def test_an_old_one_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        async def run_apt(*words: str, **_: object) -> str:
            asked.append(words[0])
            return "runsc:\n  Installed: (none)\n  Candidate: 0.0~20221219.0-2\n"

        monkeypatch.setattr(runsc, "run_apt", run_apt)
        monkeypatch.setattr(runsc, "find_backports", lambda: "")
        with pytest.raises(EngineError, match="20221219"):
            await runsc.install_runsc()
        assert asked == ["policy"]


def test_steps_are_said_for_people() -> None:
    assert render([]) == "Nothing to put right.\n\n"
    text = render([Step("remove sandbox x", True), Step("install y", False, "no apt")])
    assert text == "Put right:\n  done      remove sandbox x\n  not done  install y\n            no apt\n\n"


async def test_the_command_line(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, because the command itself looks after the whole machine, and other tests kill engines too."""
    with engine_of_another(layout) as process:
        process.kill()
        process.wait()
    everything = fixes.fix
    monkeypatch.setattr(fixes, "fix", lambda _: everything(lambda state: state != layout.state))
    monkeypatch.setenv("K8E_CONFIG", "")
    await asyncio.to_thread(choose, ["doctor", "--json", "--fix"])  # of agentkernel: k8e's own, by another name
    answer = json.loads(capsys.readouterr().out)
    mine = [step for step in answer["fixed"] if str(layout.state) in step["what"]]
    assert mine
    assert all(step["done"] for step in mine), mine
    assert answer["runtimes"]
    assert not find_traces(layout)

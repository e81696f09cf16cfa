"""The doctor: finds nothing wrong with sandboxes as they are, and everything that is wrong with weakened ones."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from k8e.engine import Limits, Runtime, RuntimeReport, SandboxSpec
from k8e.engine.local import LocalEngine, launcher
from k8e.engine.local import record as record_module
from k8e.engine.local.doctor import doctor
from k8e.engine.local.doctor.controls import CONTROLS, limits
from k8e.engine.local.doctor.controls.network import find_foreign_drops
from k8e.engine.local.doctor.decoys import Decoys, plant_decoys
from k8e.engine.local.doctor.remote_host import open_remote_host
from k8e.engine.local.doctor.subject import Subject
from k8e.engine.local.runtime.bundle import BundleSpec, build_config
from k8e.engine.local.runtime.runtime import OciRuntime, find_runtimes
from k8e.engine.report import Check, Examination, Report, Verdict, render
from k8e.link.model import ExecSpec, Process, Sandbox
from tests.egress.namespaces import private_machine
from tests.engine.answers import plant_answers
from tests.engine.rig import find_report, open_engine, place_for_engine
from tests.engine.traces import wait_for_no_traces
from tests.runtimes import do_without

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the local engine needs root")

GENEROUS = Limits(cpus=16.0, memory=1 << 30, pids=4096, disk=256 << 20, inodes=16_384, open_files=1024)

Config = dict[str, Any]
Weaken = Callable[[Config], None]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[LocalEngine]:
    with place_for_engine() as (state, run):
        plant_answers(state)
        async with open_engine(state, run) as engine:
            yield engine
        await wait_for_no_traces(engine.layout, set())


@pytest.fixture
async def decoys(engine: LocalEngine) -> AsyncIterator[Decoys]:
    await engine.probe()
    async with plant_decoys(engine.layout.state) as decoys:
        yield decoys


@pytest.fixture(params=[Runtime.GVISOR, Runtime.NATIVE], ids=lambda runtime: runtime.value)
async def runtime(request: pytest.FixtureRequest, engine: LocalEngine) -> Runtime:
    return await require(engine, request.param)


async def require(engine: LocalEngine, runtime: Runtime) -> Runtime:
    report = await find_report(engine, runtime)
    if not report.available:
        do_without(runtime.value, report.reason)
    return runtime


@contextlib.contextmanager
def weakened(weaken: Weaken) -> Iterator[None]:
    """Every sandbox that is made inside is a worse one than was asked for."""

    def build_worse(spec: BundleSpec) -> Config:
        config = build_config(spec)
        weaken(config)
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "build_config", build_worse)
        yield


async def try_one(name: str, subject: Subject) -> Check:
    control = next(control for control in CONTROLS if control.name == name)
    check = await doctor.try_control(control, subject)
    assert check.name == name
    return check


# As they are ----------------------------------------------------------------------------------------------------------


async def test_this_machine_is_safe(engine: LocalEngine) -> None:
    told: list[tuple[Runtime, Check]] = []
    report = await doctor.examine(engine, lambda runtime, check: told.append((runtime, check)))
    assert report.default is not None
    assert report.safe, render(report)
    for each in report.examinations:
        if each.report.available:
            assert [check.name for check in each.checks] == [control.name for control in CONTROLS]
            assert each.failed == (), render(report)
            assert each.checks == tuple(check for runtime, check in told if runtime is each.report.runtime)
    assert await engine.list() == []


async def test_an_examination_needs_no_engine_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CONTROLS", CONTROLS[:1])
    with place_for_engine() as (state, run):
        report = await doctor.examine_machine(state_dir=state, run_dir=run)
        assert report.safe, render(report)
        assert os.listdir(state.parent) == [f"{run.name}.lock"]
        await wait_for_no_traces(LocalEngine(state, run).layout, set())


async def test_an_examination_begins_by_clearing_up_after_one_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CONTROLS", CONTROLS[:1])
    with place_for_engine() as (state, run):
        killed = LocalEngine(state, run)
        await require(killed, Runtime.NATIVE)
        await killed.create("doctor-native-lost", SandboxSpec(Runtime.NATIVE, limits=doctor.LIMITS))
        await killed.close()
        await doctor.examine_machine(state_dir=state, run_dir=run)
        await wait_for_no_traces(killed.layout, {"doctor-native-lost"})


async def test_decoys_are_gone_afterwards_also_those_of_somebody_who_was_killed(tmp_path: Path) -> None:
    forgotten = "/var/tmp/k8e-decoy-999999999-cafe"
    os.close(os.open(forgotten, os.O_CREAT))
    async with plant_decoys(tmp_path) as decoys:
        planted = [os.path.join(folder, decoys.token) for folder in ("/tmp", "/run", tmp_path)]
        assert all(map(os.path.exists, planted))
    assert not any(map(os.path.exists, [forgotten, *planted]))


NETWORK = ("listed host", "unlisted names", "metadata", "machine's services")


async def test_the_network_is_tried_behind_a_wire_of_the_doctors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CONTROLS", [control for control in CONTROLS if control.name in NETWORK])
    with place_for_engine() as (state, run):
        report = await doctor.examine_machine(state_dir=state, run_dir=run)
        assert report.safe, render(report)
        for each in report.examinations:
            if each.report.available:
                assert [(check.name, check.verdict) for check in each.checks] == [
                    (name, Verdict.OK) for name in NETWORK
                ]
        await wait_for_no_traces(LocalEngine(state, run).layout, set())


async def test_without_anybody_to_reach_it_says_that_it_was_not_tried(engine: LocalEngine, decoys: Decoys) -> None:
    await require(engine, Runtime.NATIVE)
    async with doctor.open_subject(engine, Runtime.NATIVE, decoys) as subject:
        assert (await try_one("listed host", subject)).verdict is Verdict.SKIPPED


@pytest.mark.usefixtures("private")
def test_chains_that_drop_what_is_forwarded_are_named() -> None:
    assert find_foreign_drops() == []
    chain = "{ type filter hook forward priority 0; policy drop; }"
    for words in ("add table ip filter", f"add chain ip filter FORWARD {chain}"):
        subprocess.run(["nft", words], check=True)
    assert find_foreign_drops() == ["ip filter FORWARD"]


@pytest.fixture
def private() -> Iterator[None]:
    """A machine of the test's own, as far as its network goes."""
    with private_machine():
        yield


# Weakened -------------------------------------------------------------------------------------------------------------


def show_host_folder(config: Config) -> None:
    options = ["bind", "ro", "nosuid", "nodev"]
    config["mounts"].append({"destination": "/srv", "type": "bind", "source": "/var/tmp", "options": options})


def make_toolchain_writable(config: Config) -> None:
    mount = next(mount for mount in config["mounts"] if mount["destination"] == "/usr")
    mount["options"].remove("ro")


def show_host_processes(config: Config) -> None:
    config["mounts"][0] = {"destination": "/proc", "type": "bind", "source": "/proc", "options": ["rbind"]}
    config["linux"] |= {"maskedPaths": [], "readonlyPaths": []}


def share_network(config: Config) -> None:
    drop_namespaces(config, "network")


def drop_namespaces(config: Config, *types: str) -> None:
    config["linux"]["namespaces"] = [each for each in config["linux"]["namespaces"] if each["type"] not in types]


def add_device(config: Config) -> None:
    config["linux"]["devices"] = [{"path": "/dev/kmsg", "type": "c", "major": 1, "minor": 11}]


def share_user_ids(config: Config) -> None:
    """Where the ids of sandboxes begin at 0: root of the sandbox is root of the machine."""
    assert config["linux"]["uidMappings"][0]["hostID"] == 0


def open_kernel_settings(config: Config) -> None:
    share_user_ids(config)
    config["linux"]["readonlyPaths"] = []


def drop_filter(config: Config) -> None:
    del config["linux"]["seccomp"]


WEAKENED = [
    ("host files", show_host_folder, "as /srv/k8e-decoy-"),
    ("mounts", show_host_folder, "not ours: /srv"),
    ("mounts", make_toolchain_writable, "writable: /usr"),
    ("host processes", show_host_processes, "a process of the machine is visible"),
    ("host loopback", share_network, "of the machine's loopback can be reached"),
    ("devices", add_device, "there are kmsg"),
    ("kernel settings", open_kernel_settings, "core_pattern can be written"),
    ("system call filter", drop_filter, "Seccomp is 0"),
    ("user namespace", share_user_ids, "ids are mapped as 0 0 "),
    ("network interfaces", share_network, "there are "),
]


@pytest.mark.parametrize(("control", "weaken", "found"), WEAKENED)
async def test_a_weaker_native_sandbox_is_found_out(
    engine: LocalEngine, decoys: Decoys, monkeypatch: pytest.MonkeyPatch, control: str, weaken: Weaken, found: str
) -> None:
    await require(engine, Runtime.NATIVE)
    interfaces = set(os.listdir("/sys/class/net")) - {"lo"}
    if weaken in (share_user_ids, open_kernel_settings):
        monkeypatch.setattr(record_module, "_FIRST_ID", 0)
    with weakened(weaken):
        async with doctor.open_subject(engine, Runtime.NATIVE, decoys) as subject:
            check = await try_one(control, subject)
    assert (check.verdict, found in check.found) == (Verdict.FAILED, True), check
    if control == "network interfaces":
        # Those of engines come and go beside this test; the machine's own are all seen.
        assert {name for name in interfaces if not name.startswith("k8e-")} <= set(re.findall(r"[\w.@-]+", check.found))
    assert check.hint


async def test_a_sandbox_that_reaches_services_of_the_machine_is_found_out(engine: LocalEngine, decoys: Decoys) -> None:
    await require(engine, Runtime.NATIVE)
    wire = await engine.reserve_wire("far-end")
    try:
        async with open_remote_host(wire) as remote:
            with weakened(share_network):
                async with doctor.open_subject(engine, Runtime.NATIVE, decoys, remote=remote) as subject:
                    check = await try_one("machine's services", subject)
    finally:
        await engine.destroy("far-end")
    assert (check.verdict, "is not refused" in check.found) == (Verdict.FAILED, True), check


async def test_a_gvisor_sandbox_with_a_folder_of_the_machine_is_found_out(engine: LocalEngine, decoys: Decoys) -> None:
    await require(engine, Runtime.GVISOR)
    with weakened(show_host_folder):
        async with doctor.open_subject(engine, Runtime.GVISOR, decoys) as subject:
            checks = [await try_one(name, subject) for name in ("host files", "mounts")]
    assert [check.verdict for check in checks] == [Verdict.FAILED] * 2, checks


async def test_a_gvisor_process_without_a_filter_is_found_out(engine: LocalEngine, decoys: Decoys) -> None:
    class Bare(Subject):
        def statuses_on_machine(self) -> list[dict[str, str]]:
            return [status | {"Seccomp": "0"} for status in super().statuses_on_machine()]

    await require(engine, Runtime.GVISOR)
    async with doctor.open_subject(engine, Runtime.GVISOR, decoys) as subject:
        bare = Bare(*(getattr(subject, field.name) for field in dataclasses.fields(subject)))
        check = await try_one("system call filter", bare)
    assert (check.verdict, "have no filter" in check.found) == (Verdict.FAILED, True), check


@pytest.mark.parametrize(
    ("control", "found"),
    [
        ("CPU limit", "busy loops were not held back to 0.5 CPUs"),
        ("open files limit", "instead of 512"),
        ("disk limit", "were written to a disk of 64"),
        ("process limit", "commands run at once, with a limit of 64 processes"),
        ("memory limit", "48 MiB fit into 24"),
    ],
)
async def test_a_sandbox_with_more_than_it_was_given_is_found_out(
    engine: LocalEngine, decoys: Decoys, runtime: Runtime, control: str, found: str
) -> None:
    async with doctor.open_subject(engine, runtime, decoys, GENEROUS) as subject:
        told = dataclasses.replace(doctor.LIMITS, memory=24 << 20)
        check = await try_one(control, dataclasses.replace(subject, limits=told))
    assert (check.verdict, found in check.found) == (Verdict.FAILED, True), check


class Different:
    """A sandbox that starts commands differently than it was told."""

    def __init__(self, sandbox: Sandbox, change: Callable[[ExecSpec], ExecSpec], *also: ExecSpec) -> None:
        self._sandbox = sandbox
        self._change = change
        self._also = also

    async def start(self, spec: ExecSpec) -> Process:
        for extra in self._also:
            await self._sandbox.start(extra)
        return await self._sandbox.start(self._change(spec))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


async def test_commands_with_capabilities_are_found_out(engine: LocalEngine, decoys: Decoys, runtime: Runtime) -> None:
    async with doctor.open_subject(engine, runtime, decoys) as subject:
        powerful: Any = Different(subject.sandbox, lambda spec: dataclasses.replace(spec, keep_capabilities=True))
        check = await try_one("capabilities", dataclasses.replace(subject, sandbox=powerful))
    assert (check.verdict, "a command of uid 1000 has Cap" in check.found) == (Verdict.FAILED, True), check


async def test_a_machine_that_is_busy_is_not_taken_for_a_weak_one(
    engine: LocalEngine, decoys: Decoys, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Subject):
        async def processes(self) -> set[int]:
            """As when the agent's supervisor of a command that has ended takes its time: it is the agent, once more."""
            seen.append(await super().processes())
            return seen[-1] - {1} if len(seen) == 1 else seen[-1]

    seen: list[set[int]] = []
    monkeypatch.setattr(limits, "_BUSY_ROUNDS", 0)  # others have all of the CPU
    async with doctor.open_subject(engine, runtime, decoys) as subject:
        slow = Slow(*(getattr(subject, field.name) for field in dataclasses.fields(subject)))
        checks = [await try_one(name, slow) for name in ("timeouts", "CPU limit")]
    assert [check.verdict for check in checks] == [Verdict.OK] * 2, checks
    assert "too busy" in checks[1].found
    assert len(seen) == 2


async def test_a_process_that_outlives_a_timeout_is_found_out(
    engine: LocalEngine, decoys: Decoys, runtime: Runtime
) -> None:
    stray = ExecSpec.of("/bin/sleep", "600", stdin=False)
    async with doctor.open_subject(engine, runtime, decoys) as subject:
        leaky: Any = Different(subject.sandbox, lambda spec: spec, stray)
        check = await try_one("timeouts", dataclasses.replace(subject, sandbox=leaky))
    assert (check.verdict, "outlived" in check.found) == (Verdict.FAILED, True), check


async def test_a_program_that_gains_privileges_is_found_out(
    engine: LocalEngine, decoys: Decoys, runtime: Runtime
) -> None:
    """As if the set-uid bit counted."""

    def as_root(spec: ExecSpec) -> ExecSpec:
        gains = decoys.token.encode() in spec.argv[0]
        return dataclasses.replace(spec, identity=doctor_root) if gains else spec

    async with doctor.open_subject(engine, runtime, decoys) as subject:
        doctor_root = dataclasses.replace(subject.place.user, uid=0)
        gaining: Any = Different(subject.sandbox, as_root)
        check = await try_one("no new privileges", dataclasses.replace(subject, sandbox=gaining))
    assert (check.verdict, check.found) == (Verdict.FAILED, "a set-uid program runs as uid 0")


async def test_a_control_that_cannot_be_tried_counts_as_broken(engine: LocalEngine, decoys: Decoys) -> None:
    await require(engine, Runtime.NATIVE)
    async with doctor.open_subject(engine, Runtime.NATIVE, decoys) as subject:
        broken: Any = Different(subject.sandbox, lambda spec: dataclasses.replace(spec, argv=(b"/nonexistent",)))
        check = await try_one("host files", dataclasses.replace(subject, sandbox=broken))
    assert (check.verdict, check.found.startswith("could not be tried: NotStarted")) == (Verdict.FAILED, True), check


# Reports --------------------------------------------------------------------------------------------------------------


async def test_a_machine_whose_default_is_weak_is_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find_native_only(runtime: Runtime) -> Sequence[OciRuntime]:
        return await find_runtimes(runtime) if runtime is Runtime.NATIVE else []

    monkeypatch.setattr("k8e.engine.local.engine.find_runtimes", find_native_only)
    with place_for_engine() as (state, run), weakened(drop_filter):
        async with open_engine(state, run) as engine:
            await require(engine, Runtime.NATIVE)
            report = await doctor.examine(engine)
    assert not report.safe
    assert report.default is not None
    assert [check.name for check in report.default.failed] == ["system call filter"]
    text = render(report)
    assert "gvisor: not available: not installed; install runsc" in text
    assert "NOT SAFE: sandboxes would run with native" in text
    assert "do: use a runc with seccomp" in text


def make_report(*examinations: Examination) -> Report:
    return Report(examinations, 1.25)


GOOD = Check("mounts", Verdict.OK, "looked", "fine")
BAD = Check("mounts", Verdict.FAILED, "looked", "a hole", "mend it")
GVISOR = RuntimeReport(Runtime.GVISOR, True, "runsc 1", notes=("network: none",))
NATIVE = RuntimeReport(Runtime.NATIVE, True, "runc 1")
ABSENT = RuntimeReport(Runtime.GVISOR, False, reason="not installed", hint="install it")


def test_only_the_default_decides_whether_a_machine_is_safe() -> None:
    assert make_report(Examination(GVISOR, (GOOD,)), Examination(NATIVE, (BAD,))).safe
    assert not make_report(Examination(GVISOR, (BAD,)), Examination(NATIVE, (GOOD,))).safe
    assert make_report(Examination(ABSENT), Examination(NATIVE, (GOOD,))).safe


def test_a_machine_without_a_runtime_is_not_safe() -> None:
    report = make_report(Examination(ABSENT))
    assert (report.safe, report.default) == (False, None)
    assert render(report).endswith("No runtime works here: no sandbox can be started.\n")


def test_reports_are_json() -> None:
    report = make_report(Examination(GVISOR, (GOOD, BAD)), Examination(ABSENT))
    told = json.loads(json.dumps(report.as_dict()))
    assert (told["safe"], told["default"], told["seconds"]) == (False, "gvisor", 1.2)
    assert told["runtimes"][0] == {
        "runtime": "gvisor",
        "available": True,
        "version": "runsc 1",
        "reason": "",
        "hint": "",
        "notes": ["network: none"],
        "emulated": False,
        "safe": False,
        "checks": [
            {"name": "mounts", "verdict": "ok", "tried": "looked", "found": "fine", "hint": ""},
            {"name": "mounts", "verdict": "failed", "tried": "looked", "found": "a hole", "hint": "mend it"},
        ],
    }


def test_a_table_says_what_was_tried_and_what_to_do_where_something_failed() -> None:
    text = render(make_report(Examination(GVISOR, (GOOD, BAD)), Examination(NATIVE, (GOOD,))))
    assert text.splitlines() == [
        "gvisor (default): runsc 1, NOT SAFE: 1 of 2 checks failed",
        "  network: none",
        "  ok      mounts              fine",
        "  failed  mounts              a hole",
        "                              tried: looked",
        "                              do: mend it",
        "",
        "native: runc 1, every control holds",
        "  ok      mounts              fine",
        "",
        "NOT SAFE: sandboxes would run with gvisor, and not all of its controls hold.",
    ]

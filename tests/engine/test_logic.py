"""The engine's pure parts, for whatever comes: the filter, the bundle, the layout, and what the kernel prints."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.engine import Limits, Runtime, SandboxSpec
from k8e.engine.local.disk.cleanup import mounts_below
from k8e.engine.local.layout import Layout
from k8e.engine.local.roots import host_image
from k8e.engine.local.roots.host_image import host_paths
from k8e.engine.local.runtime import bundle, seccomp
from k8e.engine.local.runtime.bundle import Bind, BundleSpec, HostPath, build_config
from k8e.engine.local.runtime.cgroup import hierarchies

WORDS = st.integers(0, 2**64 - 1)
HALVES = st.integers(0, 2**32 - 1)
NAMES = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_-]{0,62}\Z")
MACHINES = ("x86_64", "aarch64")
PROFILES = {machine: seccomp.build_profile(machine) for machine in MACHINES}

PROTOCOLS = st.one_of(st.sampled_from([0, 1, 6, 17, 58, 132, 255, 262]), HALVES)

# seccomp


def matches(condition: Mapping[str, Any], arguments: Sequence[int]) -> bool:
    """As the kernel's filter would: on all 64 bits, through the mask."""
    assert condition["op"] == "SCMP_CMP_MASKED_EQ"
    return bool(arguments[condition["index"]] & condition["value"] == condition["valueTwo"])


def verdict(profile: Mapping[str, Any], call: str, arguments: Sequence[int]) -> str:
    """Of the whole profile: rules for a call are alternatives, the conditions of one rule all have to hold."""
    for rule in profile["syscalls"]:
        if call in rule["names"] and all(matches(condition, arguments) for condition in rule.get("args", ())):
            return str(rule["action"])
    return str(profile["defaultAction"])


@given(st.frozensets(HALVES, min_size=1, max_size=6), WORDS)
def test_all_but_matches_everything_else_and_nothing_of_them(excluded: frozenset[int], word: int) -> None:
    alternatives = seccomp.all_but(0, excluded)
    matched = [all(matches(c, [word]) for c in alternative) for alternative in alternatives]
    assert any(matched) == (word & 0xFFFFFFFF not in excluded)
    assert sum(matched) <= 1, "alternatives overlap"


@given(st.frozensets(HALVES, min_size=1, max_size=6), HALVES)
def test_all_but_is_not_fooled_by_high_bits(excluded: frozenset[int], high: int) -> None:
    alternatives = seccomp.all_but(1, excluded)
    for value in excluded:
        word = high << 32 | value
        assert not any(all(matches(c, [0, word]) for c in alternative) for alternative in alternatives)


@given(st.frozensets(st.integers(0, 255), min_size=1, max_size=200))
def test_all_but_is_exact_on_a_small_width(excluded: frozenset[int]) -> None:
    alternatives = seccomp.all_but(0, excluded, width=8)
    for value in range(256):
        passes = any(all(matches(c, [value]) for c in alternative) for alternative in alternatives)
        assert passes == (value not in excluded)


@pytest.mark.parametrize("machine", MACHINES)
@given(high=HALVES, request_bits=HALVES)
def test_ioctl_lets_everything_through_but_typing_into_terminals(machine: str, high: int, request_bits: int) -> None:
    profile = PROFILES[machine]
    for bad in (seccomp.TIOCSTI, seccomp.TIOCLINUX):
        assert verdict(profile, "ioctl", [0, high << 32 | bad, 0]) == "SCMP_ACT_ERRNO"
    if request_bits not in (seccomp.TIOCSTI, seccomp.TIOCLINUX):
        assert verdict(profile, "ioctl", [0, high << 32 | request_bits, 0]) == "SCMP_ACT_ALLOW"


@pytest.mark.parametrize("machine", MACHINES)
@given(flags=WORDS)
def test_clone_never_makes_a_namespace(machine: str, flags: int) -> None:
    namespaces = 0x7E020080
    allowed = verdict(PROFILES[machine], "clone", [flags]) == "SCMP_ACT_ALLOW"
    assert allowed == (flags & namespaces == 0)


@pytest.mark.parametrize("machine", MACHINES)
@given(high=HALVES, family=st.one_of(st.sampled_from([1, 2, 10, 16]), HALVES), kind=HALVES, protocol=PROTOCOLS)
def test_only_local_and_internet_sockets(machine: str, high: int, family: int, kind: int, protocol: int) -> None:
    """Of the internet's: TCP, UDP and ping, by type and protocol; the upper bits of a type are flags."""
    words = [high << 32 | word for word in (family, kind, protocol)]
    allowed = verdict(PROFILES[machine], "socket", words) == "SCMP_ACT_ALLOW"
    internet = {(1, 0), (1, 6), (1, 262), (2, 0), (2, 17), (2, {2: 1, 10: 58}.get(family))}
    assert allowed == (
        family == 1 or (family == 16 and protocol == 0) or (family in (2, 10) and (kind & 0xF, protocol) in internet)
    )


NEVER = (
    "acct", "add_key", "bpf", "chroot", "clock_adjtime", "clock_settime", "create_module", "delete_module",
    "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "io_uring_enter",
    "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl",
    "lookup_dcookie", "mount", "mount_setattr", "move_mount", "name_to_handle_at", "open_by_handle_at",
    "open_tree", "open_tree_attr", "perf_event_open", "pidfd_getfd", "pivot_root", "process_vm_readv",
    "process_vm_writev", "quotactl", "quotactl_fd", "reboot", "request_key", "setdomainname", "sethostname",
    "setns", "settimeofday", "swapoff", "swapon", "syslog", "umount", "umount2", "unshare", "userfaultfd",
    "uselib", "vhangup",
)  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", NEVER)
def test_calls_that_are_never_allowed(machine: str, call: str) -> None:
    actions = {rule["action"] for rule in PROFILES[machine]["syscalls"] if call in rule["names"]}
    assert actions <= {"SCMP_ACT_ERRNO"}
    assert verdict(PROFILES[machine], call, [0] * 6) == "SCMP_ACT_ERRNO"


@pytest.mark.parametrize("machine", MACHINES)
@given(mode=HALVES)
def test_mknod_makes_no_device(machine: str, mode: int) -> None:
    profile = PROFILES[machine]
    device = stat.S_IFMT(mode) in (stat.S_IFCHR, stat.S_IFBLK)
    for call, arguments in (("mknod", [0, mode, 0]), ("mknodat", [0, 0, mode, 0])):
        if device:
            assert verdict(profile, call, arguments) == "SCMP_ACT_ERRNO"
    for kind in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG):
        assert verdict(profile, "mknodat", [0, 0, kind | 0o644, 0]) == "SCMP_ACT_ALLOW"


@pytest.mark.parametrize("machine", MACHINES)
@given(mode=WORDS, flags=WORDS)
def test_no_file_gets_a_set_id_bit_where_files_are_the_machines(machine: str, mode: int, flags: int) -> None:
    profile = seccomp.build_profile(machine, set_ids=False)
    allowed = not mode & (stat.S_ISUID | stat.S_ISGID)
    for call, arguments in (
        *(("chmod", [0, mode]), ("fchmod", [0, mode]), ("fchmodat", [0, 0, mode]), ("fchmodat2", [0, 0, mode, 0])),
        *(("creat", [0, mode]), ("open", [0, flags | os.O_CREAT, mode]), ("openat", [0, 0, flags | os.O_CREAT, mode])),
        *(("open", [0, flags | os.O_TMPFILE, mode]), ("openat", [0, 0, flags | os.O_TMPFILE, mode])),
    ):
        assert (verdict(profile, call, arguments) == "SCMP_ACT_ALLOW") == allowed, call
        assert verdict(PROFILES[machine], call, arguments) == "SCMP_ACT_ALLOW", call
    plain = flags & ~(os.O_CREAT | os.O_TMPFILE)  # then what is in the register means nothing
    assert verdict(profile, "openat", [0, 0, plain, mode]) == "SCMP_ACT_ALLOW"
    assert verdict(profile, "openat2", [0] * 6) == "SCMP_ACT_ERRNO"
    node = mode & ~stat.S_IFMT(0o170000) | stat.S_IFIFO
    assert (verdict(profile, "mknodat", [0, 0, node, 0]) == "SCMP_ACT_ALLOW") == allowed


@pytest.mark.parametrize("machine", MACHINES)
def test_a_filter_denies_by_default_and_knows_one_architecture(machine: str) -> None:
    profile = PROFILES[machine]
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert len(profile["architectures"]) == 1
    assert verdict(profile, "clone3", [0] * 6) == "SCMP_ACT_ERRNO"
    assert verdict(profile, "no_such_call", [0] * 6) == "SCMP_ACT_ERRNO"


def test_an_unknown_machine_has_no_filter_and_so_no_sandbox() -> None:
    with pytest.raises(KeyError):
        seccomp.build_profile("riscv64")


# Bundles

FILES = st.builds(
    Path, st.text("abcdefghijklmnopqrstuvwxyz/._-", min_size=1).map(lambda text: os.path.normpath("/" + text))
)
LIMITS = st.builds(
    Limits,
    cpus=st.floats(0.001, 1024),
    memory=st.integers(1, 1 << 44),
    pids=st.integers(1, 1 << 22),
    disk=st.integers(1, 1 << 50),
    inodes=st.integers(1, 1 << 32),
    open_files=st.integers(1, 1 << 20),
)
BINDS = st.lists(
    st.builds(
        Bind,
        source=st.sampled_from(("disk/workspace", "mounts/0", "mounts/0/x")).map("/state/sandboxes/x/{}".format),
        target=st.sampled_from(("/workspace", "/workspace/x", "/home/user")),
        writable=st.booleans(),
        whole=st.booleans(),
    ),
    max_size=3,
)
SPECS = st.builds(
    BundleSpec,
    sandbox=st.builds(SandboxSpec, st.just(Runtime.NATIVE), limits=LIMITS, hostname=NAMES),
    root=st.just("/state/sandboxes/x/disk/root"),
    agent=st.just("/state/agents/hash"),
    loader=st.just("/state/agents/other"),
    link=st.just("/state/sandboxes/x/disk/link"),
    instance=st.binary(min_size=16, max_size=16),
    cgroup=NAMES.map(lambda name: f"/k8e-0/{name}"),
    host_paths=st.lists(st.builds(HostPath, FILES, FILES.map(os.fspath)), max_size=4),
    first_id=st.one_of(st.none(), st.integers(0x30000000, 0x7FFE0000)),
    seccomp=st.just({"defaultAction": "SCMP_ACT_ERRNO"}),
    hard_files=st.integers(1, 1 << 20),
    network=st.just("/proc/1/fd/7"),
    binds=BINDS,
    hidden=st.lists(FILES.map(os.fspath), max_size=2),
)
# Nothing with which one reaches beyond files, ids and signals of the sandbox's own.
HARMLESS = {
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
}


@given(SPECS)
def test_nothing_of_the_host_is_writable(spec: BundleSpec) -> None:
    """Binds are of three kinds: the image's, read-only; the agent, read-only; and what is below the sandbox's own
    directory."""
    config = build_config(spec)
    own = spec.root.removesuffix("/disk/root")
    for mount in config["mounts"]:
        if mount["type"] != "bind":
            assert not mount["source"].startswith("/"), "a filesystem of the kernel's"
            assert mount["type"] in {"proc", "tmpfs", "devpts", "mqueue"}
            continue
        options = set(mount["options"])
        assert {"nosuid", "nodev"} <= options
        assert ("ro" in options) != ("rw" in options)
        if "rw" in options or "rbind" in options:  # what is mounted below it on the host comes along
            assert mount["source"].startswith(own + "/"), mount


@given(SPECS)
def test_no_capability_beyond_the_list(spec: BundleSpec) -> None:
    process = build_config(spec)["process"]
    assert process["noNewPrivileges"] is True
    for kind, names in process["capabilities"].items():
        assert set(names) <= HARMLESS, kind
    assert "ambient" not in process["capabilities"]
    assert "inheritable" not in process["capabilities"]


@given(SPECS)
def test_native_sandboxes_have_every_namespace_and_ids_of_their_own(spec: BundleSpec) -> None:
    linux = build_config(spec)["linux"]
    kinds = {namespace["type"] for namespace in linux["namespaces"]}
    joined = [namespace for namespace in linux["namespaces"] if "path" in namespace]
    assert joined == [{"type": "network", "path": spec.network}], "all others are made new"
    assert {"pid", "mount", "ipc", "uts", "network"} <= kinds
    if spec.first_id is not None:
        assert {"user", "cgroup"} <= kinds
        for name in ("uidMappings", "gidMappings"):
            (mapping,) = linux[name]
            assert mapping["containerID"] == 0
            assert mapping["hostID"] == spec.first_id > 0
            assert mapping["hostID"] + mapping["size"] <= 1 << 31


@given(SPECS)
def test_limits_are_all_in_the_bundle(spec: BundleSpec) -> None:
    config = build_config(spec)
    resources = config["linux"]["resources"]
    assert resources["memory"]["limit"] == resources["memory"]["swap"] == spec.sandbox.limits.memory
    assert resources["pids"]["limit"] >= spec.sandbox.limits.pids
    assert spec.first_id is None or resources["pids"]["limit"] == spec.sandbox.limits.pids + bundle.PARKED_TASKS
    assert resources["cpu"]["quota"] > 0
    assert resources["devices"][0] == {"allow": False, "access": "rwm"}
    rlimits = {limit["type"]: limit for limit in config["process"]["rlimits"]}
    assert rlimits["RLIMIT_CORE"]["hard"] == 0
    assert rlimits["RLIMIT_NOFILE"]["hard"] <= min(spec.sandbox.limits.open_files, spec.hard_files)
    assert config["linux"]["seccomp"] == spec.seccomp


@given(SPECS)
def test_dangerous_files_of_the_kernel_are_masked_or_read_only(spec: BundleSpec) -> None:
    linux = build_config(spec)["linux"]
    covered = {*linux["maskedPaths"], *linux["readonlyPaths"]}
    assert {"/proc/kcore", "/proc/keys", "/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"} <= covered


def test_the_image_shows_the_toolchain_and_nothing_else(tmp_path: Path) -> None:
    for overlay in host_paths(tmp_path):
        top = overlay.target.split("/")[1]
        assert top in {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt"}, overlay


def test_the_images_root_holds_no_private_file(tmp_path: Path) -> None:
    root = tmp_path / "root"
    host_image.build_root(root)
    for parent, _, names in os.walk(root):
        for name in names:
            path = Path(parent, name)
            kind = stat.S_IFMT(path.lstat().st_mode)
            assert kind in (stat.S_IFREG, stat.S_IFLNK), path
            if kind == stat.S_IFREG:
                content = path.read_bytes()
                assert b"PRIVATE KEY" not in content, path
    assert not (root / "etc/shadow").exists()
    assert {path.name for path in (root / "home").iterdir()} == {"user"}


# Layout


@given(NAMES)
def test_everything_of_a_sandbox_is_below_its_own_directory(name: str) -> None:
    layout = Layout(Path("/state"), Path("/run/k8e"))
    paths = layout.sandbox(name)
    assert paths.top.parent == layout.sandboxes
    assert paths.top.name == name
    properties = [key for key, value in vars(type(paths)).items() if isinstance(value, property)]
    assert len(properties) > 5
    for key in properties:
        path: Path = getattr(paths, key)
        assert os.path.normpath(path) == os.fspath(path)
        assert path.is_relative_to(paths.top)


@given(NAMES, NAMES)
def test_sandboxes_never_share_a_directory(first: str, second: str) -> None:
    layout = Layout(Path("/state"), Path("/run/k8e"))
    one, other = layout.sandbox(first).top, layout.sandbox(second).top
    assert (one == other) == (first == second)
    assert not (first != second and one.is_relative_to(other))


@given(st.lists(FILES, min_size=2, max_size=2, unique=True))
def test_two_state_directories_have_two_groups(states: list[Path]) -> None:
    names = {Layout(state, Path("/run/k8e")).cgroup for state in states}
    assert len(names) == 2
    assert all("/" not in name and name.startswith("k8e-") for name in names)


# What the kernel prints


def escape(path: str) -> str:
    """As the kernel does in mountinfo: these four, in octal."""
    return "".join(f"\\{ord(letter):03o}" if letter in " \t\n\\" else letter for letter in path)


# What a name may contain and mountinfo shows as it is, also all that Python takes for white space or the end of a line.
LETTERS = "ab0123 \t\n\\\r\x0b\x0c\x1c\x85\xa0\u2028\u3000#*é漢"
COMPONENTS = st.text(LETTERS, min_size=1, max_size=12)


def fake_mountinfo(points: Sequence[str]) -> bytes:
    lines = (f"{n} 1 7:{n} / {escape(point)} rw shared:1 - ext4 /dev/loop{n} rw\n" for n, point in enumerate(points))
    return "".join(lines).encode()


@given(st.lists(COMPONENTS, min_size=1, max_size=4))
def test_mount_points_are_found_whatever_their_names(names: list[str]) -> None:
    top = "/state/sandboxes/x"
    inside = ["/".join((top, *names[:count])) for count in range(len(names) + 1)]
    outside = ["/", "/state", "/state/sandboxes", top + "y", top + " y", f"/other{top}", "/state/sandboxes/x\\040"]
    content = fake_mountinfo([*outside, *inside])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: content)
        patch.setattr(Path, "read_text", lambda path, *_, **__: content.decode())
        found = [os.fspath(point) for point in mounts_below(Path(top))]
    assert sorted(found) == sorted(inside)
    depths = [len(Path(point).parts) for point in found]
    assert depths == sorted(depths, reverse=True), "the innermost first"


FIND_AWKWARD = r"""
import asyncio, os, subprocess, sys
from pathlib import Path
from k8e.engine.local.runtime import cgroup
from k8e.engine.local.disk.cleanup import mounts_below, unmount_below
top = os.fsencode(sys.argv[1])
# The last two are not text at all: a disk that was labelled elsewhere is enough to have one on a machine.
for name in (b"with space", b"new\nline", b"tab\t", b"back\\040slash", "\u2028\xa0".encode(), b"cr\r", b"\xff\xfe"):
    os.mkdir(top + b"/" + name)
    subprocess.run([b"mount", b"-t", b"tmpfs", b"tmpfs", top + b"/" + name], check=True)
found = mounts_below(Path(sys.argv[1]))
assert sorted(map(os.fsencode, found)) == sorted(top + b"/" + name for name in os.listdir(top)), found
assert cgroup.hierarchies()
asyncio.run(unmount_below(Path(sys.argv[1])))
assert mounts_below(Path(sys.argv[1])) == []
"""


def test_real_mounts_with_awkward_names_are_found_and_unmounted(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    # In a mount namespace of its own: no other program on this machine has to cope with these.
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", FIND_AWKWARD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_hierarchies_are_where_they_are_mounted() -> None:
    assert hierarchies()
    assert all(path.is_dir() for path in hierarchies())


def test_agent_and_link_paths_do_not_lie_in_each_other() -> None:
    for one, other in itertools.permutations((bundle.AGENT_PATH, bundle.LINK_PATH), 2):
        assert not Path(one).is_relative_to(other)

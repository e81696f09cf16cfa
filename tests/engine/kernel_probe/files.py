"""Files behind which there is the kernel: devices, settings, its memory."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct

from .calls import ATTEMPTS, attempt, call, scratch

DEVICES = (
    "kmsg", "mem", "kmem", "port", "kvm", "fuse", "net/tun", "loop-control", "loop0", "vda", "sda", "nvme0n1",
    "dm-0", "mapper/control", "userfaultfd", "vhost-net", "vhost-vsock", "vsock", "hpet", "console", "tty0", "rtc0",
    "cuse", "uinput", "snapshot", "btrfs-control", "autofs", "uhid", "cpu_dma_latency", "watchdog",
)  # fmt: skip
SETTINGS = (
    "kernel/core_pattern", "kernel/modprobe", "kernel/hotplug", "kernel/hostname", "kernel/domainname",
    "kernel/randomize_va_space", "kernel/yama/ptrace_scope", "kernel/unprivileged_bpf_disabled", "kernel/sysrq",
    "kernel/panic", "kernel/kptr_restrict", "kernel/ns_last_pid", "kernel/core_uses_pid", "kernel/shmmax",
    "fs/binfmt_misc/register", "fs/suid_dumpable", "fs/protected_symlinks", "fs/file-max", "vm/overcommit_memory",
    "vm/mmap_min_addr", "vm/drop_caches", "net/ipv4/ip_forward", "net/core/bpf_jit_enable",
    "net/ipv4/ping_group_range", "user/max_user_namespaces",
)  # fmt: skip


def open_for_writing(path: str) -> object:
    handle = os.open(path, os.O_WRONLY)
    if stat.S_ISCHR(os.fstat(handle).st_mode):
        raise OSError(errno.EACCES, "a device was laid over it")  # how runtimes mask a file: with /dev/null
    os.close(handle)
    return "opened for writing"


def write_to(path: str, content: bytes) -> object:
    handle = os.open(path, os.O_WRONLY)
    os.write(handle, content)
    os.close(handle)
    return "written"


def open_device(path: str) -> object:
    handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
    if path == "/dev/net/tun":  # gVisor shows it to all users; what counts is whether it makes an interface
        fcntl.ioctl(handle, 0x400454CA, struct.pack("16sH22x", b"evil0", 0x1001))  # TUNSETIFF
    elif path == "/dev/fuse":
        options = f"fd={handle},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
        call("mount", b"fuse", scratch().encode(), b"fuse", 0, options)
    return "usable"


for _name in DEVICES:
    ATTEMPTS[f"/dev/{_name}"] = lambda path=f"/dev/{_name}": open_device(path)  # type: ignore[misc]
for _name in SETTINGS:
    ATTEMPTS[f"/proc/sys/{_name}"] = lambda path=f"/proc/sys/{_name}": open_for_writing(path)  # type: ignore[misc]
for _path in ("/proc/sysrq-trigger", "/proc/irq/default_smp_affinity", "/proc/kcore", "/proc/timer_list", "/proc/mtrr",
              "/proc/acpi/wakeup", "/proc/1/mem", "/k8e-agent", "/usr/bin/env"):  # fmt: skip
    ATTEMPTS[f"write-{_path}"] = lambda path=_path: open_for_writing(path)  # type: ignore[misc]
for _path, _content in (
    ("/proc/1/uid_map", b"0 0 1"),
    ("/proc/1/gid_map", b"0 0 1"),
    ("/proc/1/setgroups", b"deny"),
    ("/proc/1/attr/current", b"unconfined"),
    ("/proc/1/attr/exec", b"unconfined"),
    ("/proc/1/loginuid", b"0"),
    ("/proc/1/oom_score_adj", b"-1000"),
    ("/proc/self/oom_score_adj", b"-1000"),
):
    ATTEMPTS[f"write-{_path}"] = lambda path=_path, content=_content: write_to(path, content)  # type: ignore[misc]


@attempt("read-/proc/kcore")
def read_kcore() -> object:
    with open("/proc/kcore", "rb") as file:
        found = file.read(4096)
    if not found:
        raise OSError(errno.EACCES, "empty")
    return found.hex()


@attempt("read-/proc/kallsyms")
def read_addresses() -> object:
    with open("/proc/kallsyms") as file:
        addresses = [line.split()[0] for line in file]
    if not any(int(address, 16) for address in addresses):
        raise OSError(errno.EACCES, "nothing but zeros")
    return addresses[:3]


@attempt("read-/proc/keys")
def read_keys() -> object:
    with open("/proc/keys") as file:
        found = file.read()
    if not found:
        raise OSError(errno.EACCES, "empty")
    return found


def walk_for_writable(top: str) -> object:
    found = []
    for parent, _, names in os.walk(top):
        for name in names:
            path = os.path.join(parent, name)
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
            except OSError:
                continue
            found.append(path)
    if not found:
        raise OSError(errno.EACCES, "nothing is writable")
    return found


ATTEMPTS["anything-writable-in-/proc/sys"] = lambda: walk_for_writable("/proc/sys")
ATTEMPTS["anything-writable-in-/sys"] = lambda: walk_for_writable("/sys")
ATTEMPTS["anything-writable-in-/usr"] = lambda: walk_for_writable("/usr/bin")


@attempt("release_agent")
def find_release_agent() -> object:
    for parent, _, names in os.walk("/sys"):
        for name in names:
            if name in ("release_agent", "cgroup.procs", "devices.allow"):
                with open(os.path.join(parent, name), "w") as file:
                    file.write("")
                return os.path.join(parent, name)
    raise FileNotFoundError(errno.ENOENT, "there is none")


@attempt("write-own-core_pattern-by-mount")
def core_pattern_by_own_proc() -> object:
    point = scratch()
    call("mount", b"proc", point.encode(), b"proc", 0, None)
    return open_for_writing(f"{point}/sys/kernel/core_pattern")


def make_device(kind: int, major: int, minor: int, folder: str) -> object:
    path = f"{folder}/device"
    os.mknod(path, kind | 0o666, os.makedev(major, minor))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # one that no user can open is a name and no more
    os.close(handle)
    return "made and opened"


for _label, _format, _major, _minor in (
    ("mem", stat.S_IFCHR, 1, 1),
    ("kmsg", stat.S_IFCHR, 1, 11),
    ("null", stat.S_IFCHR, 1, 3),
    ("loop0", stat.S_IFBLK, 7, 0),
    ("vda", stat.S_IFBLK, 254, 0),
    ("fuse", stat.S_IFCHR, 10, 229),
):
    ATTEMPTS[f"mknod-{_label}"] = lambda kind=_format, major=_major, minor=_minor: (  # type: ignore[misc]
        make_device(kind, major, minor, scratch())
    )

"""Runs inside a sandbox: tries everything that must not work there, each in a process of its own, and prints what the
kernel said as JSON, {name: {"errno": "EPERM"} | {"done": ...} | {"signal": 31}}.

Needs nothing but the standard library and has no idea of what is right: the test knows (test_kernel_surface.py). The
arguments are such that a kernel that allowed a call would do it, harmlessly.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import stat
import struct
import sys
import tempfile
import termios
import traceback
from collections.abc import Callable

X86 = platform.machine() == "x86_64"
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
SIGCHLD = 17
HIGH = 1 << 32  # a bit that the kernel ignores in 32-bit arguments and that a filter must ignore as well

# x86_64, aarch64; one number where they are the same; None where a machine has no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "ioctl": (16, 29), "socket": (41, 198), "clone": (56, 220), "ptrace": (101, 117), "syslog": (103, 116),
    "capset": (126, 91), "uselib": (134, None), "personality": (135, 92), "vhangup": (153, 58),
    "modify_ldt": (154, None), "pivot_root": (155, 41), "_sysctl": (156, None), "prctl": (157, 167),
    "adjtimex": (159, 171), "chroot": (161, 51), "acct": (163, 89), "settimeofday": (164, 170), "mount": (165, 40),
    "umount2": (166, 39), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161),
    "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None), "create_module": (174, None),
    "init_module": (175, 105), "delete_module": (176, 106), "quotactl": (179, 60), "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18), "clock_settime": (227, 112), "kexec_load": (246, 104), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97), "perf_event_open": (298, 241),
    "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "setns": (308, 268), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "finit_module": (313, 273), "kexec_file_load": (320, 294), "bpf": (321, 280), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "pidfd_open": (434, 434), "clone3": (435, 435),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443), "memfd_secret": (447, 447), "process_mrelease": (448, 448), "statmount": (457, 457),
    "listmount": (458, 458), "open_tree_attr": (467, 467),
}  # fmt: skip

NAMESPACES = {
    "time": 0x80,
    "mnt": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
FAMILIES = {
    "AX25": 3, "IPX": 4, "APPLETALK": 5, "NETROM": 6, "X25": 9, "ROSE": 11, "DECnet": 12, "KEY": 15, "PACKET": 17,
    "ECONET": 19, "RDS": 21, "PPPOX": 24, "LLC": 26, "IB": 27, "MPLS": 28, "CAN": 29, "TIPC": 30, "BLUETOOTH": 31,
    "RXRPC": 33, "PHONET": 35, "IEEE802154": 36, "CAIF": 37, "ALG": 38, "NFC": 39, "VSOCK": 40, "KCM": 41,
    "QIPCRTR": 42, "SMC": 43, "XDP": 44,
}  # fmt: skip
NETLINKS = {
    "USERSOCK": 2, "SOCK_DIAG": 4, "NFLOG": 5, "XFRM": 6, "SELINUX": 7, "ISCSI": 8, "AUDIT": 9, "FIB_LOOKUP": 10,
    "CONNECTOR": 11, "NETFILTER": 12, "DNRTMSG": 14, "KOBJECT_UEVENT": 15, "GENERIC": 16, "SCSITRANSPORT": 18,
    "ECRYPTFS": 19, "RDMA": 20, "CRYPTO": 21, "SMC": 22,
}  # fmt: skip
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

Attempt = Callable[[], object]
ATTEMPTS: dict[str, Attempt] = {}


class NoSuchCall(Exception):
    """This machine has no such system call, which is as good as denied."""


def attempt(name: str) -> Callable[[Attempt], Attempt]:
    def register(function: Attempt) -> Attempt:
        ATTEMPTS[name] = function
        return function

    return register


def call(name: str, *arguments: object) -> int:
    number = NUMBERS[name][0 if X86 else 1]
    if number is None:
        raise NoSuchCall(name)
    return call_number(number, *arguments)


def call_number(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    ctypes.set_errno(0)
    result = int(LIBC.syscall(ctypes.c_long(number), *words))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def try_every(*attempts: Attempt) -> object:
    """Done when one of them is; otherwise what the last one met."""
    last: OSError | None = None
    for one in attempts:
        try:
            return one()
        except OSError as error:
            last = error
    assert last is not None
    raise last


def scratch() -> str:
    """Of this attempt's own; the mount points and files in it can be lost."""
    return tempfile.mkdtemp(prefix="probe-", dir="/tmp")


# Namespaces


def clone_with(flags: int) -> object:
    pid = call("clone", flags | SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "cloned"


def clone3_with(flags: int) -> object:
    arguments = struct.pack("<11Q", flags, 0, 0, 0, SIGCHLD, 0, 0, 0, 0, 0, 0)
    pid = call("clone3", arguments, len(arguments))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "cloned"


def join_namespace(process: str, kind: str) -> object:
    handle = os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY)
    return call("setns", handle, 0)


for _name, _flag in NAMESPACES.items():
    ATTEMPTS[f"unshare-{_name}"] = lambda flag=_flag: call("unshare", flag)  # type: ignore[misc]
    ATTEMPTS[f"clone3-{_name}"] = lambda flag=_flag: clone3_with(flag)  # type: ignore[misc]
    if _name != "time":  # clone takes that bit for a part of the signal's number
        ATTEMPTS[f"clone-{_name}"] = lambda flag=_flag: clone_with(flag)  # type: ignore[misc]
        ATTEMPTS[f"clone-{_name}-high-bits"] = lambda flag=_flag: clone_with(flag | HIGH)  # type: ignore[misc]
for _name in ("mnt", "cgroup", "uts", "ipc", "pid", "net", "user"):
    ATTEMPTS[f"setns-own-{_name}"] = lambda kind=_name: join_namespace("self", kind)  # type: ignore[misc]
    ATTEMPTS[f"setns-agents-{_name}"] = lambda kind=_name: join_namespace("1", kind)  # type: ignore[misc]


# Mounts

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18
AT_FDCWD = -100


def mount_type(kind: bytes, data: bytes | None = None) -> Attempt:
    return lambda: call("mount", kind, scratch().encode(), kind, 0, data)


for _kind in ("tmpfs", "proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "ramfs", "debugfs", "tracefs", "fuse",
              "9p", "bpf", "securityfs", "configfs", "devtmpfs"):  # fmt: skip
    ATTEMPTS[f"mount-{_kind}"] = mount_type(_kind.encode())


@attempt("mount-overlay")
def mount_overlay() -> object:
    top = scratch()
    for name in ("l", "u", "w", "m"):
        os.mkdir(f"{top}/{name}")
    options = f"lowerdir={top}/l,upperdir={top}/u,workdir={top}/w".encode()
    return call("mount", b"overlay", f"{top}/m".encode(), b"overlay", 0, options)


ATTEMPTS["mount-bind"] = lambda: call("mount", b"/usr", scratch().encode(), None, MS_BIND, None)
ATTEMPTS["mount-bind-recursive"] = lambda: call("mount", b"/", scratch().encode(), None, MS_BIND | MS_REC, None)
ATTEMPTS["mount-move"] = lambda: call("mount", b"/tmp", scratch().encode(), None, MS_MOVE, None)
ATTEMPTS["mount-propagation"] = lambda: call("mount", None, b"/", None, MS_PRIVATE | MS_REC, None)
for _point in ("/", "/usr", "/proc", "/proc/sys", "/k8e-agent", "/tmp", "/dev"):
    for _flags, _label in ((MS_REMOUNT, "remount"), (MS_REMOUNT | MS_BIND, "remount-bind")):
        ATTEMPTS[f"{_label}-{_point}"] = lambda point=_point, flags=_flags: call(  # type: ignore[misc]
            "mount", None, point.encode(), None, flags, None
        )
for _point in ("/usr", "/proc", "/proc/sys", "/proc/kcore", "/k8e-agent", "/run/k8e", "/tmp", "/dev", "/"):
    ATTEMPTS[f"umount-{_point}"] = lambda point=_point: call("umount2", point.encode(), 2)  # type: ignore[misc]
ATTEMPTS["fsopen"] = lambda: call("fsopen", b"tmpfs", 0)
ATTEMPTS["fsconfig"] = lambda: call("fsconfig", 0, 6, None, None, 0)
ATTEMPTS["fsmount"] = lambda: call("fsmount", 0, 0, 0)
ATTEMPTS["fspick"] = lambda: call("fspick", AT_FDCWD, b"/usr", 0)
ATTEMPTS["open_tree"] = lambda: call("open_tree", AT_FDCWD, b"/usr", 1)
ATTEMPTS["open_tree_attr"] = lambda: call("open_tree_attr", AT_FDCWD, b"/usr", 1, bytes(32), 32)
ATTEMPTS["move_mount"] = lambda: call("move_mount", AT_FDCWD, b"/usr", AT_FDCWD, scratch().encode(), 0)
ATTEMPTS["mount_setattr"] = lambda: call("mount_setattr", AT_FDCWD, b"/usr", 0, struct.pack("<4Q", 0, 1, 0, 0), 32)
ATTEMPTS["pivot_root"] = lambda: call("pivot_root", b".", b".")
ATTEMPTS["chroot"] = lambda: call("chroot", scratch().encode())
ATTEMPTS["chroot-here"] = lambda: call("chroot", b"/")


# Kernel subsystems

ATTEMPTS["bpf-map"] = lambda: call("bpf", 0, struct.pack("<IIII", 2, 4, 4, 1) + bytes(112), 128)
ATTEMPTS["userfaultfd"] = lambda: call("userfaultfd", 0)
ATTEMPTS["userfaultfd-user-mode-only"] = lambda: call("userfaultfd", 1)
ATTEMPTS["io_uring_setup"] = lambda: call("io_uring_setup", 8, ctypes.create_string_buffer(120))
ATTEMPTS["io_uring_enter"] = lambda: call("io_uring_enter", 0, 0, 0, 0, None, 0)
ATTEMPTS["io_uring_register"] = lambda: call("io_uring_register", -1, 0, None, 0)
ATTEMPTS["keyctl-session-keyring"] = lambda: call("keyctl", 0, -3, 1)
ATTEMPTS["keyctl-join-session"] = lambda: call("keyctl", 1, b"mine")
ATTEMPTS["add_key"] = lambda: call("add_key", b"user", b"name", b"value", 5, -3)
ATTEMPTS["request_key"] = lambda: call("request_key", b"user", b"name", None, 0)
ATTEMPTS["init_module"] = lambda: call("init_module", b"no module", 9, b"")
ATTEMPTS["delete_module"] = lambda: call("delete_module", b"no_such_module", 0)
ATTEMPTS["create_module"] = lambda: call("create_module", b"name", 4096)
ATTEMPTS["kexec_load"] = lambda: call("kexec_load", 0, 0, None, 0)
ATTEMPTS["kexec_file_load"] = lambda: call("kexec_file_load", -1, -1, 0, None, 4)
ATTEMPTS["reboot"] = lambda: call("reboot", 0xFEE1DEAD, 672274793, 0, None)  # CAD_OFF
ATTEMPTS["swapoff"] = lambda: call("swapoff", b"/tmp/no-swap")
ATTEMPTS["acct"] = lambda: call("acct", None)
ATTEMPTS["quotactl"] = lambda: call("quotactl", 0x80000700, b"/dev/vda", 0, ctypes.create_string_buffer(256))
ATTEMPTS["quotactl_fd"] = lambda: call("quotactl_fd", 0, 0x80000700, 0, ctypes.create_string_buffer(256))
ATTEMPTS["nfsservctl"] = lambda: call("nfsservctl", 0, None, None)
ATTEMPTS["sethostname"] = lambda: call("sethostname", b"sandbox", 7)
ATTEMPTS["setdomainname"] = lambda: call("setdomainname", b"(none)", 6)
ATTEMPTS["syslog-read-all"] = lambda: call("syslog", 3, ctypes.create_string_buffer(512), 512)
ATTEMPTS["syslog-clear"] = lambda: call("syslog", 5, None, 0)
ATTEMPTS["vhangup"] = lambda: call("vhangup")
ATTEMPTS["uselib"] = lambda: call("uselib", b"/usr/bin/true")
ATTEMPTS["_sysctl"] = lambda: call("_sysctl", None)
ATTEMPTS["lookup_dcookie"] = lambda: call("lookup_dcookie", 0, ctypes.create_string_buffer(512), 512)
ATTEMPTS["iopl"] = lambda: call("iopl", 3)
ATTEMPTS["ioperm"] = lambda: call("ioperm", 0x80, 1, 1)
ATTEMPTS["modify_ldt"] = lambda: call("modify_ldt", 1, bytes(16), 16)
ATTEMPTS["memfd_secret"] = lambda: call("memfd_secret", 0)
ATTEMPTS["statmount"] = lambda: call("statmount", struct.pack("<IIQQ", 24, 0, 1, 1), None, 0, 0)
ATTEMPTS["listmount"] = lambda: call("listmount", struct.pack("<IIQQ", 24, 0, 2**64 - 1, 0), bytes(64), 8, 0)
ATTEMPTS["fanotify_init"] = lambda: call("fanotify_init", 0, 0)
ATTEMPTS["kcmp"] = lambda: call("kcmp", os.getpid(), 1, 0, 0, 0)


@attempt("bpf-program")
def load_bpf_program() -> object:
    code = ctypes.create_string_buffer(struct.pack("<BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0))  # return 0
    words = ctypes.create_string_buffer(b"GPL\0")
    attributes = struct.pack("<IIQQ", 1, 2, ctypes.addressof(code), ctypes.addressof(words)) + bytes(104)
    return call("bpf", 5, attributes, len(attributes))


@attempt("perf_event_open")
def open_perf_event() -> object:
    attributes = struct.pack("<IIQ", 1, 128, 0) + bytes(112)  # software, CPU clock
    return call("perf_event_open", attributes, 0, -1, -1, 0)


@attempt("perf_event_open-whole-machine")
def open_perf_event_of_everybody() -> object:
    return call("perf_event_open", struct.pack("<IIQ", 1, 128, 0) + bytes(112), -1, 0, -1, 0)


@attempt("finit_module")
def load_module_file() -> object:
    return call("finit_module", os.open("/usr/bin/true", os.O_RDONLY), b"", 0)


@attempt("swapon")
def swap_on() -> object:
    path = f"{scratch()}/swap"
    with open(path, "wb") as file:
        file.write(bytes(1 << 16))
    return call("swapon", path.encode(), 0)


@attempt("settimeofday")
def set_time_of_day() -> object:
    return call("settimeofday", struct.pack("<qq", 1, 0), None)


@attempt("clock_settime")
def set_clock() -> object:
    return call("clock_settime", 0, struct.pack("<qq", 1, 0))


@attempt("adjtimex")
def adjust_clock() -> object:
    return call("adjtimex", ctypes.create_string_buffer(struct.pack("<Iiqq", 1, 0, 0, 0) + bytes(200)))


@attempt("open_by_handle_at")
def open_by_handle() -> object:
    handle = struct.pack("<Ii", 8, 1) + struct.pack("<II", 2, 0)  # inode 2, the root of an ext4
    return call("open_by_handle_at", os.open("/workspace", os.O_RDONLY), handle, os.O_RDONLY)


@attempt("name_to_handle_at-and-back")
def handle_and_back() -> object:
    handle = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0) + bytes(128))
    call("name_to_handle_at", AT_FDCWD, b"/workspace", handle, ctypes.create_string_buffer(4), 0)
    return call("open_by_handle_at", os.open("/workspace", os.O_RDONLY), handle, os.O_RDONLY)


for _value, _label in ((0x0040000, "no-randomize"), (0x0400000, "read-implies-exec"), (0x4000000, "mmap-page-zero")):
    ATTEMPTS[f"personality-{_label}"] = lambda value=_value: call("personality", value)  # type: ignore[misc]
    ATTEMPTS[f"personality-{_label}-high-bits"] = lambda value=_value: call(  # type: ignore[misc]
        "personality", value | HIGH
    )


# Other ways into the kernel


def run_machine_code(code: bytes) -> int:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())


@attempt("int80-unshare")
def enter_through_int80() -> object:
    if not X86:
        raise NoSuchCall("int80")
    # mov eax, 310 (i386 unshare); mov ebx, CLONE_NEWUSER; int 0x80; ret; rbx is the caller's
    code = b"\x53\xb8\x36\x01\x00\x00\xbb\x00\x00\x00\x10\xcd\x80\x5b\xc3"
    if (result := run_machine_code(code)) < 0:
        raise OSError(-result, os.strerror(-result))
    return result


@attempt("x32-unshare")
def enter_through_x32() -> object:
    if not X86:
        raise NoSuchCall("x32")
    return call_number(0x40000000 | 272, NAMESPACES["user"])


# Sockets


def open_socket(family: int, kind: int, protocol: int = 0) -> object:
    return call("socket", family, kind, protocol)


def open_any_socket(family: int, protocols: tuple[int, ...] = (0,)) -> object:
    """Of every type: one that opens is enough."""
    kinds = (socket.SOCK_RAW, socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
    return try_every(
        *(lambda k=kind, p=protocol: open_socket(family, k, p) for kind in kinds for protocol in protocols)
    )


for _name, _number in FAMILIES.items():
    ATTEMPTS[f"AF_{_name}"] = lambda family=_number: open_any_socket(family, (0, 2, 768))  # type: ignore[misc]
for _name in ("PACKET", "VSOCK", "ALG", "KEY"):
    ATTEMPTS[f"AF_{_name}-high-bits"] = lambda family=FAMILIES[_name]: (  # type: ignore[misc]
        open_any_socket(family | HIGH, (0, 2, 768))
    )
for _name, _number in NETLINKS.items():
    ATTEMPTS[f"NETLINK_{_name}"] = lambda protocol=_number: open_socket(16, socket.SOCK_RAW, protocol)  # type: ignore[misc]
    ATTEMPTS[f"NETLINK_{_name}-high-bits"] = lambda protocol=_number: try_every(  # type: ignore[misc]
        lambda: open_socket(16 | HIGH, socket.SOCK_RAW, protocol | HIGH),
        lambda: open_socket(16, socket.SOCK_RAW | HIGH, protocol | HIGH),
        lambda: open_socket(16 | HIGH, socket.SOCK_DGRAM, protocol),
    )
for _family, _label in ((socket.AF_INET, "INET"), (socket.AF_INET6, "INET6")):
    ATTEMPTS[f"SOCK_RAW-{_label}"] = lambda family=_family: try_every(  # type: ignore[misc]
        *(lambda p=protocol: open_socket(family, socket.SOCK_RAW, p) for protocol in (1, 6, 17, 58, 89, 255))
    )


@attempt("netlink-route-add-interface")
def add_interface() -> object:
    """RTM_NEWLINK of kind `dummy`: asking is allowed on a route socket, changing is not."""

    def attribute(kind: int, value: bytes) -> bytes:
        return struct.pack("<HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)

    info = attribute(18, attribute(1, b"dummy"))
    body = struct.pack("<BBHiII", 0, 0, 0, 0, 0, 0) + attribute(3, b"evil0\0") + info
    header = struct.pack("<IHHII", 16 + len(body), 16, 0x605, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        route.settimeout(5)
        route.send(header + body)
        answer = route.recv(4096)
    code = struct.unpack_from("<i", answer, 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))
    return "added"


@attempt("bring-loopback-down")
def bring_loopback_down() -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, 0x8914, struct.pack("16sh22x", b"lo", 0))  # SIOCSIFFLAGS
    return "down"


# Terminals


def type_into_terminal(request: int, argument: bytes) -> object:
    """On the terminal that controls this process: a session of our own on a fresh pair, for those without one."""
    if not sys.stdin.isatty():
        os.setsid()
        _, follower = os.openpty()
        fcntl.ioctl(follower, termios.TIOCSCTTY, 0)
    else:
        follower = 0
    return call("ioctl", follower, request, ctypes.create_string_buffer(argument))


for _name, _number, _argument in (("TIOCSTI", 0x5412, b"x"), ("TIOCLINUX", 0x541C, b"\3\0")):
    for _suffix, _bits in (("", 0), ("-high-bits", HIGH), ("-many-high-bits", 0x7FFFFFFF << 32)):
        ATTEMPTS[_name + _suffix] = lambda request=_number | _bits, argument=_argument: (  # type: ignore[misc]
            type_into_terminal(request, argument)
        )


# Files of the kernel


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
    if path == "/dev/net/tun":  # gVisor shows it to everybody; what counts is whether it makes an interface
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


@attempt("user-namespace-and-mount")
def mount_in_user_namespace() -> object:
    call("unshare", NAMESPACES["user"] | NAMESPACES["mnt"])
    return call("mount", b"tmpfs", scratch().encode(), b"tmpfs", 0, None)


@attempt("user-namespace-and-capabilities")
def capabilities_in_user_namespace() -> object:
    call("unshare", NAMESPACES["user"])
    with open("/proc/self/status") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff"))
    if not int(effective, 16):
        raise PermissionError(errno.EPERM, "none")
    return effective


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
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # one that nobody can open is a name and no more
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


# Processes and credentials


def trace_agent(request: int) -> object:
    return call("ptrace", request, 1, 0, 0)


ATTEMPTS["ptrace-attach-agent"] = lambda: trace_agent(16)
ATTEMPTS["ptrace-seize-agent"] = lambda: trace_agent(0x4206)
ATTEMPTS["process_madvise-agent"] = lambda: call("process_madvise", call("pidfd_open", 1, 0), bytes(16), 1, 20, 0)
ATTEMPTS["pidfd_getfd-agent"] = lambda: call("pidfd_getfd", call("pidfd_open", 1, 0), 0, 0)
ATTEMPTS["process_mrelease-agent"] = lambda: call("process_mrelease", call("pidfd_open", 1, 0), 0)


def reach_into_agent(name: str) -> object:
    local = ctypes.create_string_buffer(64)
    here = struct.pack("<QQ", ctypes.addressof(local), 8)
    there = struct.pack("<QQ", 0x400000, 8)
    return call(name, 1, here, 1, there, 1, 0)


ATTEMPTS["process_vm_readv-agent"] = lambda: reach_into_agent("process_vm_readv")
ATTEMPTS["process_vm_writev-agent"] = lambda: reach_into_agent("process_vm_writev")


@attempt("read-agents-memory")
def read_agents_memory() -> object:
    with open("/proc/1/maps") as file:
        first = file.readline()
    if not first:
        raise OSError(errno.EACCES, "no mappings are shown")
    start = int(first.split("-")[0], 16)
    with open("/proc/1/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        return memory.read(4).hex()


@attempt("open-agents-descriptors")
def open_agents_descriptors() -> object:
    names = os.listdir("/proc/1/fd")  # numbers alone are no secret
    return try_every(*(lambda n=name: os.open(f"/proc/1/fd/{n}", os.O_RDONLY) for name in names))


@attempt("read-agents-environment")
def read_agents_environment() -> object:
    with open("/proc/1/environ", "rb") as file:
        found = file.read()
    if not found:
        raise OSError(errno.EACCES, "empty")
    return found.hex()


@attempt("all-capabilities")
def take_all_capabilities() -> object:
    header = struct.pack("<Ii", 0x20080522, 0)
    return call("capset", header, struct.pack("<IIIIII", *[0xFFFFFFFF] * 2, 0, 0x1FF, 0x1FF, 0))


@attempt("ambient-capability")
def raise_ambient() -> object:
    return call("prctl", 47, 2, 21, 0, 0)  # CAP_SYS_ADMIN


@attempt("clear-no-new-privileges")
def clear_no_new_privileges() -> object:
    return call("prctl", 38, 0, 0, 0, 0)


@attempt("file-capability")
def give_file_capability() -> object:
    path = f"{scratch()}/file"
    with open(path, "wb"):
        pass
    os.setxattr(path, "security.capability", struct.pack("<IIIII", 0x02000001, 0xFFFFFFFF, 0, 0x1FF, 0))
    return "given"


@attempt("become-somebody-else")
def become_somebody_else() -> object:
    """Root is one already: who is not, tries to become it; root tries to become the user that it may not act for."""
    os.setresuid(*((0, 0, 0) if os.getuid() else (1000, 1000, 1000)))
    return os.getresuid()


@attempt("join-groups")
def join_groups() -> object:
    os.setgroups([0, 1, 2, 4, 6])
    return os.getgroups()


@attempt("trusted-attribute")
def set_trusted_attribute() -> object:
    os.setxattr(scratch(), "trusted.overlay.opaque", b"y")
    return "set"


def raise_limit(what: int, value: int) -> None:
    try:
        resource.setrlimit(what, (value, value))
    except ValueError as error:  # which is what Python makes of EPERM here
        raise PermissionError(errno.EPERM, str(error)) from error


@attempt("more-open-files")
def raise_open_files() -> object:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit(resource.RLIMIT_NOFILE, hard + 1)
    return hard + 1


@attempt("core-dumps")
def raise_core() -> object:
    raise_limit(resource.RLIMIT_CORE, resource.RLIM_INFINITY)
    return "unlimited"


@attempt("real-time-scheduling")
def go_real_time() -> object:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return os.sched_getscheduler(0)


def run_attempt(function: Attempt) -> dict[str, object]:
    try:
        done = function()
    except NoSuchCall:
        return {"errno": "ENOSYS"}
    except OSError as error:
        return {"errno": errno.errorcode.get(error.errno or 0, str(error.errno))}
    except BaseException:  # noqa: BLE001 - the report is all that this process is for
        return {"error": traceback.format_exc()}
    return {"done": done}


def try_apart(function: Attempt) -> dict[str, object]:
    """In a process of its own: what it does to itself or dies of is its own affair."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os.write(writer, json.dumps(run_attempt(function), default=str).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    result: dict[str, object] = json.loads(content)
    return result


if __name__ == "__main__":
    chosen = sys.argv[1:] or ATTEMPTS
    sys.stdout.write(json.dumps({name: try_apart(ATTEMPTS[name]) for name in chosen}))

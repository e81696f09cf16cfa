"""Parts of the kernel that a sandbox has no business with, and other ways into it than system calls."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

from .calls import AT_FDCWD, ATTEMPTS, HIGH, NAMESPACES, X86, NoSuchCall, attempt, call, call_number, scratch

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

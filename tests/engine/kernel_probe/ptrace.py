"""Another system call in the place of one that the filter let pass, put there by a tracer at each stop that a kernel
offers. The tracee asks for a harmless call, the tracer turns it into `unshare` of a user namespace."""

from __future__ import annotations

import ctypes
import os
import struct

from .calls import ATTEMPTS, LIBC, X86, NoSuchCall, call

TRACEME, SETREGS, GETREGS, CONT, SYSCALL, SYSEMU = 0, 13, 12, 7, 24, 31
SETOPTIONS, SEIZE, SET_SYSCALL_INFO = 0x4200, 0x4206, 0x4212
SYSGOOD, TRACESECCOMP = 0x01, 0x80
SIGSTOP, SIGCONT, WALL = 19, 18, 0x40000000
GETPPID, UNSHARE, CLONE3 = 110, 272, 435
NEWUSER = 0x10000000
MARK = 0x6B3865  # the argument by which the tracer knows the call
# Where they stand in user_regs_struct of x86_64.
WORDS, RDI, ORIG_RAX = 27, 14, 15


def ptrace(request: int, pid: int, address: object = 0, data: object = 0) -> int:
    return call("ptrace", request, pid, address, data)


def trace_own_calls() -> None:
    """A second filter, which asks a tracer about getppid: one that is allowed can be added by any program."""
    load, equal, answer = 0x20, 0x15, 0x06
    lines = [(load, 0, 0, 0), (equal, 0, 1, GETPPID), (answer, 0, 0, 0x7FF00000), (answer, 0, 0, 0x7FFF0000)]
    program = b"".join(struct.pack("<HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(program)
    call("prctl", 38, 1, 0, 0, 0)
    call("prctl", 22, 2, struct.pack("<HxxxxxxQ", len(lines), ctypes.addressof(buffer)), 0, 0)


def be_traced(number: int, *, seized: bool, own_filter: bool) -> None:
    """Ends with 0 if the call that was put in its place worked, else with its errno."""
    if not seized:
        ptrace(TRACEME, 0)
    if own_filter:
        trace_own_calls()
    os.kill(os.getpid(), SIGSTOP)
    ctypes.set_errno(0)
    result = LIBC.syscall(ctypes.c_long(number), ctypes.c_long(MARK), ctypes.c_long(0))
    os._exit(0 if result == 0 else ctypes.get_errno() or 255)


def replace_call(pid: int) -> bool:
    words = (ctypes.c_uint64 * WORDS)()
    ptrace(GETREGS, pid, 0, ctypes.byref(words))
    if words[RDI] == MARK and words[ORIG_RAX] in (GETPPID, CLONE3):
        words[ORIG_RAX], words[RDI] = UNSHARE, NEWUSER
        ptrace(SETREGS, pid, 0, ctypes.byref(words))
        return True
    return False


def replace_by_info(pid: int) -> bool:
    """The newer spelling: struct ptrace_syscall_info with op ENTRY, number and arguments."""
    words = (ctypes.c_uint64 * WORDS)()
    ptrace(GETREGS, pid, 0, ctypes.byref(words))
    if words[RDI] == MARK:
        info = struct.pack("<BBHIQQ8Q", 1, 0, 0, 0xC000003E, 0, 0, UNSHARE, NEWUSER, 0, 0, 0, 0, 0, 0)
        ptrace(SET_SYSCALL_INFO, pid, len(info), info)
        return True
    return False


def replace_with(resume: int, options: int = 0, number: int = GETPPID, *, seize: bool = False, info: bool = False,
                 own_filter: bool = False) -> object:  # fmt: skip
    if not X86:
        raise NoSuchCall("the registers of this machine are others")
    pid = os.fork()
    if pid == 0:
        be_traced(number, seized=seize, own_filter=own_filter)
    try:
        os.waitpid(pid, os.WUNTRACED)
        if seize:
            ptrace(SEIZE, pid, 0, options)
            os.kill(pid, SIGCONT)
            os.waitpid(pid, WALL)
        elif options:
            ptrace(SETOPTIONS, pid, 0, options)
        while True:
            ptrace(resume, pid)
            _, status = os.waitpid(pid, WALL)
            if os.WIFEXITED(status):
                code = os.waitstatus_to_exitcode(status)
                if code:
                    raise OSError(code, os.strerror(code))
                return "replaced"
            if os.WIFSIGNALED(status):
                return f"killed by {os.WTERMSIG(status)}"
            if (replace_by_info if info else replace_call)(pid):
                resume = CONT
    finally:
        try:
            os.kill(pid, 9)
            os.waitpid(pid, WALL)
        except OSError:
            pass


ATTEMPTS["replace-at-syscall-stop"] = lambda: replace_with(SYSCALL)
ATTEMPTS["replace-at-sysemu-stop"] = lambda: replace_with(SYSEMU)
ATTEMPTS["replace-at-syscall-stop-seized"] = lambda: replace_with(SYSCALL, seize=True)
ATTEMPTS["replace-by-syscall-info"] = lambda: replace_with(SYSCALL, SYSGOOD, info=True)
ATTEMPTS["replace-clone3-at-seccomp-stop"] = lambda: replace_with(CONT, TRACESECCOMP, CLONE3)
ATTEMPTS["replace-clone3-at-seccomp-stop-seized"] = lambda: replace_with(CONT, TRACESECCOMP, CLONE3, seize=True)
ATTEMPTS["replace-at-stop-of-own-filter"] = lambda: replace_with(CONT, TRACESECCOMP, own_filter=True)
ATTEMPTS["replace-at-stop-of-own-filter-seized"] = lambda: replace_with(CONT, TRACESECCOMP, own_filter=True, seize=True)

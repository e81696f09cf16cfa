/* The system calls that no process of the sandbox needs, and that the other runtimes refuse as well: kernels have had
 * many holes there. The kernel is the sandbox's own, so what this keeps apart are its users, and the guest's kernel from
 * the VMM below it; nothing of the host rests on it. A list of what is refused, not of what is allowed: a virtual machine
 * is chosen for programs that need more of a kernel. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "guest.h"

#ifdef __x86_64__
#define MACHINE AUDIT_ARCH_X86_64
#else
#define MACHINE AUDIT_ARCH_AARCH64
#endif
#ifndef SYS_quotactl_fd
#define SYS_quotactl_fd 443
#endif
#ifndef TIOCLINUX
#define TIOCLINUX 0x541C
#endif
enum { MOST = 256, X32 = 0x40000000, NAMESPACES = 0x7E020080, TYPES = 0xF, ROUTE = 0 };
enum { TCP = 6, UDP = 17, MPTCP = 262, PING = 1, PING6 = 58 };
enum { LOAD = BPF_LD | BPF_W | BPF_ABS, EQUAL = BPF_JMP | BPF_JEQ | BPF_K };

static struct sock_filter lines[MOST];
static unsigned short count;

static void add(uint16_t code, uint8_t if_so, uint8_t if_not, uint32_t value)
{
    errno = E2BIG;
    if (count == MOST)
        die("the filter");
    lines[count++] = (struct sock_filter){code, if_so, if_not, value};
}

static void allow(void)
{
    add(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW);
}

static void refuse(uint32_t error)
{
    add(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | error);
}

/* The half of an argument that the kernel looks at. */
static void load_argument(uint32_t index)
{
    add(LOAD, 0, 0, (uint32_t)offsetof(struct seccomp_data, args) + 8 * index);
}

/* The lines up to `end` are for what was loaded last being this value. They end with an answer. */
static unsigned short begin(uint32_t value)
{
    add(EQUAL, 0, 0, value);
    return count;
}

static void end(unsigned short place)
{
    lines[place - 1].jf = (uint8_t)(count - place);
}

static void refuse_call(uint32_t number, uint32_t error)
{
    unsigned short place = begin(number);
    refuse(error);
    end(place);
}

/* Of what was loaded last. */
static void allow_only(const uint32_t *values, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        unsigned short place = begin(values[i]);
        allow();
        end(place);
    }
    refuse(EPERM);
}

static void refuse_calls(void)
{
    static const uint32_t calls[] = {
        SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register, SYS_userfaultfd,       SYS_perf_event_open,
        SYS_bpf,            SYS_keyctl,         SYS_add_key,           SYS_request_key,       SYS_name_to_handle_at,
        SYS_unshare,        SYS_setns,          SYS_open_by_handle_at, SYS_init_module,       SYS_finit_module,
        SYS_kexec_load,     SYS_quotactl,       SYS_quotactl_fd,
#ifdef __x86_64__
        SYS_modify_ldt,
#endif
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        refuse_call(calls[i], EPERM);
    refuse_call(SYS_clone3, ENOSYS); /* its flags cannot be seen here; programs fall back to clone */
    unsigned short place = begin(SYS_clone);
    load_argument(0);
    add(BPF_JMP | BPF_JSET | BPF_K, 0, 1, NAMESPACES);
    refuse(EPERM);
    allow();
    end(place);
}

/* Of a family of the internet: for other protocols the kernel has more code, or looks for a module. */
static void allow_internet(uint32_t family, uint32_t ping)
{
    const uint32_t streams[] = {0, TCP, MPTCP}, datagrams[] = {0, UDP, ping};
    unsigned short place = begin(family);
    load_argument(1);
    add(BPF_ALU | BPF_AND | BPF_K, 0, 0, TYPES); /* the rest are flags */
    unsigned short kind = begin(SOCK_STREAM);
    load_argument(2);
    allow_only(streams, 3);
    end(kind);
    kind = begin(SOCK_DGRAM);
    load_argument(2);
    allow_only(datagrams, 3);
    end(kind);
    refuse(EPERM);
    end(place);
}

static void judge_arguments(void)
{
    static const uint32_t local[] = {AF_UNIX}, routes[] = {ROUTE};
    static const uint32_t personalities[] = {0, 8, 0x20000, 0x20008, 0xFFFFFFFF}; /* 64 and 32 bits, and the question */
    unsigned short place = begin(SYS_socket), family;
    load_argument(0);
    allow_internet(AF_INET, PING);
    allow_internet(AF_INET6, PING6);
    family = begin(AF_NETLINK);
    load_argument(2);
    allow_only(routes, 1);
    end(family);
    allow_only(local, 1);
    end(place);
    place = begin(SYS_socketpair);
    load_argument(0);
    allow_only(local, 1);
    end(place);
    place = begin(SYS_personality);
    load_argument(0);
    allow_only(personalities, 5);
    end(place);
    place = begin(SYS_ioctl); /* what types into a terminal */
    load_argument(1);
    refuse_call(TIOCSTI, EPERM);
    refuse_call(TIOCLINUX, EPERM);
    allow();
    end(place);
}

void apply_filter(void)
{
    add(LOAD, 0, 0, offsetof(struct seccomp_data, arch));
    add(EQUAL, 1, 0, MACHINE);
    refuse(ENOSYS); /* 32-bit programs */
    add(LOAD, 0, 0, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
    add(BPF_JMP | BPF_JGE | BPF_K, 0, 1, X32);
    refuse(ENOSYS);
#endif
    refuse_calls();
    judge_arguments();
    allow();
    struct sock_fprog program = {count, lines};
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) < 0)
        die("the filter");
}

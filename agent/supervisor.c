/* One small process per command, between the agent and it. It is a child subreaper, so everything that descends from the
 * command stays below it whatever it does (setsid, double fork), and "no children left" is an exact, waitable fact: that
 * is what makes ending a tree reliable without cgroups, in any runtime.
 *
 * It is cloned with the agent's memory (a fork costs 6 ms in gVisor, this 0.25), and so must be careful: no libc, nothing
 * that writes to memory the agent uses but its own struct launch. The command is cloned from it the same way, and the
 * supervisor does not wait for its execve (vfork would): a process with the command's uid could stop it just before, and
 * a supervisor that waits hears no timeout. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "agent.h"
#include "raw.h"

/* CONTROL_FD as the loader knows it: park/loader.h says why it is that high. */
enum { REPORT_FD = 3, EXEC_FD = 4, SIGNAL_FD = 6, CONTROL_FD = 63, RESCAN_MS = 100 };

RAW static uint64_t now_us(void)
{
    struct timespec t;
    raw(SYS_clock_gettime, CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* The command, up to execve --------------------------------------------------------------------------------------- */

RAW static int failed(struct launch *l, enum stage stage, long error)
{
    l->failed_error = (int)-error;
    l->failed_stage = stage;
    return 126;
}

struct capability_header { uint32_t version; int pid; };
struct capability_sets { uint32_t effective, permitted, inheritable; };
static const struct capability_header capabilities = {0x20080522, 0}; /* the third version, the current one */

/* Some agents may mount, to be given a directory before their sandbox belongs to a session. Supervisors and what
 * they start may not: neither the capability nor the system call is left. */
RAW long renounce_mounting(void)
{
    static const uint32_t admin = 1u << CAP_SYS_ADMIN;
    static const struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0), /* the call's number */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mount, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_umount2, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    static const struct sock_fprog program = {sizeof filter / sizeof *filter, (struct sock_filter *)(uintptr_t)filter};
    struct capability_sets held[2];
    long error = raw(SYS_capget, &capabilities, held);
    if (error < 0 || !(held[0].permitted & admin))
        return error;
    held[0].permitted &= ~admin;
    held[0].effective &= held[0].permitted;
    error = raw(SYS_prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
    if (error >= 0)
        error = raw(SYS_prctl, PR_CAPBSET_DROP, CAP_SYS_ADMIN);
    return error < 0 ? error : raw(SYS_capset, &capabilities, held);
}

RAW static long empty_bounding_set(void)
{
    struct capability_sets held[2] = {{0, 0, 0}, {0, 0, 0}};
    if (raw(SYS_capget, &capabilities, held) >= 0 && !held[0].permitted && !held[1].permitted)
        return 0; /* an agent without any: there is nothing to gain, and no right to change it */
    for (long capability = 0; capability < 64; capability++) {
        long error = raw(SYS_prctl, PR_CAPBSET_DROP, capability, 0, 0, 0);
        if (error == -EINVAL)
            break; /* past the last one this kernel knows */
        if (error < 0)
            return error;
    }
    return 0;
}

RAW static long change_user(const struct launch *l)
{
    static const struct capability_sets none[2] = {{0, 0, 0}, {0, 0, 0}};
    bool keep = l->flags & EXEC_KEEP_CAPABILITIES;
    long error = 0;
    if (l->gid != OWN_ID) {
        error = raw(SYS_setgroups, l->group_count, l->groups);
        /* An agent without the right to it is itself the only user that it can start commands as, with the groups that
         * it was given: a pod's, where nothing may be root. */
        if (error == -EPERM && !l->group_count && raw(SYS_getegid) == (long)l->gid)
            error = 0;
        if (error >= 0)
            error = raw(SYS_setresgid, l->gid, l->gid, l->gid);
    }
    /* With an empty bounding set execve gains nothing, not even as root. */
    if (error >= 0 && !keep)
        error = empty_bounding_set();
    if (error >= 0 && l->uid != OWN_ID)
        error = raw(SYS_setresuid, l->uid, l->uid, l->uid);
    if (error >= 0 && !keep)
        error = raw(SYS_capset, &capabilities, none);
    if (error >= 0 && !keep)
        error = raw(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return error;
}

RAW static long set_limit(const struct rlimit_request *wanted)
{
    struct { uint64_t soft, hard; } limit = {wanted->soft, wanted->hard};
    return raw(SYS_prlimit64, 0, wanted->resource, &limit, 0);
}

RAW static long execute(const struct launch *l)
{
    if (!l->path)
        return raw(SYS_execve, l->argv[0], l->argv, l->envp);
    char file[4096];
    size_t name = 0;
    while (l->argv[0][name])
        name++;
    long error = -ENOENT;
    for (const char *entry = l->path;; entry++) {
        size_t length = 0;
        while (entry[length] && entry[length] != ':')
            length++;
        if (length + name + 2 <= sizeof file) {
            char *p = file;
            for (size_t i = 0; i < length; i++)
                *p++ = entry[i];
            if (length)
                *p++ = '/';
            for (size_t i = 0; i <= name; i++)
                *p++ = l->argv[0][i];
            long now = raw(SYS_execve, file, l->argv, l->envp);
            if (now != -ENOENT && now != -ENOTDIR && now != -EACCES)
                return now;
            if (now == -EACCES)
                error = now; /* found, but not ours to run: worth more than "not found" */
        }
        entry += length;
        if (!*entry)
            return error;
    }
}

RAW static int command_main(void *argument)
{
    struct launch *l = argument;
    raw(SYS_setsid, 0);
    if (l->flags & EXEC_PTY) {
        long error = raw(SYS_ioctl, 0, TIOCSCTTY, 0);
        if (error < 0)
            return failed(l, STAGE_RESOURCES, error);
    }
    long error = set_limit(&l->files);
    for (uint32_t i = 0; i < l->rlimit_count && error >= 0; i++)
        error = set_limit(&l->rlimits[i]);
    if (error < 0)
        return failed(l, STAGE_LIMITS, error);
    if ((error = change_user(l)) < 0)
        return failed(l, STAGE_USER, error);
    raw(SYS_umask, l->umask);
    if ((error = raw(SYS_chdir, l->cwd)) < 0)
        return failed(l, STAGE_CWD, error);
    uint64_t none = 0;
    raw(SYS_rt_sigprocmask, SIG_SETMASK, &none, 0, sizeof none);
    return failed(l, STAGE_EXEC, execute(l));
}

/* The supervisor -------------------------------------------------------------------------------------------------- */

RAW static void report(char what)
{
    raw(SYS_write, REPORT_FD, &what, 1);
}

RAW static void close_one(int fd, void *context)
{
    const struct launch *l = context;
    if (fd > REPORT_FD && (fd != CONTROL_FD || l->control < 0))
        raw(SYS_close, fd);
}

RAW static void arrange_descriptors(const struct launch *l)
{
    /* All of these are above 3: the agent holds 0 to 2, and its epoll descriptor or listener is 3. */
    for (int i = 0; i < 3; i++)
        raw(SYS_dup3, l->stdio[i], i, 0);
    raw(SYS_dup3, l->report, REPORT_FD, O_CLOEXEC);
    if (l->control == CONTROL_FD)
        raw(SYS_fcntl, CONTROL_FD, F_SETFD, 0);
    else if (l->control >= 0)
        raw(SYS_dup3, l->control, CONTROL_FD, 0);
    long error = 0;
    if (l->control >= 0)
        error = raw(SYS_close_range, REPORT_FD + 1, CONTROL_FD - 1, 0);
    if (error < 0 || raw(SYS_close_range, l->control >= 0 ? CONTROL_FD + 1 : REPORT_FD + 1, ~0u, 0) < 0)
        each_number("/proc/self/fd", close_one, (void *)(uintptr_t)l);
}

/* What a supervisor has below it: a command, or a template and one command after the other. l->pid stays what it was when
 * a command has ended: the agent may hear of its start and of its end at once. */
struct below {
    int command;    /* 0: none, or it was reaped */
    int template;   /* the pid of what makes copies of itself */
    bool main_gone; /* the command was reaped, which is not reported yet */
    bool left;      /* all but the template may be what the last command has left behind */
};

RAW static void deliver(struct launch *l, const struct below *b)
{
    for (int scope = 0; scope < SCOPES; scope++) {
        uint64_t wanted = atomic_exchange(&l->signals[scope], 0);
        for (int number = 1; number <= 64 && wanted; number++) {
            if (!(wanted & (1ull << (number - 1))))
                continue;
            if (scope == SCOPE_TREE)
                signal_tree(number, 0);
            else if (b->command) /* not reaped yet, so the pid is still its own */
                raw(SYS_kill, scope == SCOPE_GROUP ? -b->command : b->command, number);
        }
    }
}

/* Reaps; returns true when there are no children left. */
RAW static bool reap(struct launch *l, struct below *b)
{
    for (;;) {
        int status;
        struct rusage usage;
        long pid = raw(SYS_wait4, -1, &status, WNOHANG, &usage);
        if (pid == -ECHILD)
            return true;
        if (pid <= 0)
            return false;
        if (pid == b->template)
            b->template = 0;
        if (pid == b->command) {
            b->command = 0;
            b->main_gone = true;
            l->status = status;
            l->user_us = (uint64_t)usage.ru_utime.tv_sec * 1000000 + (uint64_t)usage.ru_utime.tv_usec;
            l->system_us = (uint64_t)usage.ru_stime.tv_sec * 1000000 + (uint64_t)usage.ru_stime.tv_usec;
            l->max_rss_kib = (uint64_t)usage.ru_maxrss;
        }
    }
}

/* Waits for a signal or the end of the exec pipe. */
RAW static void wait_for_news(uint64_t now, uint64_t deadline, int starting)
{
    struct { int fd; int16_t events, revents; } news[2] = {{SIGNAL_FD, POLLIN, 0}, {starting ? EXEC_FD : -1, POLLIN, 0}};
    struct timespec wait = {0, 0};
    if (deadline > now) {
        wait.tv_sec = (time_t)((deadline - now) / 1000000);
        wait.tv_nsec = (long)((deadline - now) % 1000000 * 1000);
    }
    raw(SYS_ppoll, news, 2, deadline ? &wait : 0, 0, 8);
    char heard[256]; /* that there was a signal is all we need to know of it */
    if (news[0].revents)
        raw(SYS_read, SIGNAL_FD, heard, sizeof heard);
}

RAW static bool start_command(struct launch *l)
{
    uint64_t heard = 1ull << (SIGCHLD - 1) | 1ull << (SIGUSR1 - 1);
    int ends[2];
    long error = raw(SYS_pipe2, ends, O_CLOEXEC); /* the first free ones: EXEC_FD and the next */
    if (error >= 0)
        error = raw(SYS_signalfd4, -1, &heard, sizeof heard, O_CLOEXEC | O_NONBLOCK);
    if (error >= 0)
        error = raw_clone(CLONE_VM | SIGCHLD, l->command_stack, command_main, l);
    if (error < 0) {
        failed(l, STAGE_RESOURCES, error);
        return false;
    }
    l->pid = (int)error;
    raw(SYS_close, ends[1]);
    for (int fd = 0; fd < 3; fd++)
        raw(SYS_close, fd);
    if (l->control >= 0)
        raw(SYS_close, CONTROL_FD);
    return true;
}

/* Has execve happened, or failed? The pipe's other end closes with either. */
RAW static bool exec_over(void)
{
    struct { int fd; int16_t events, revents; } end = {EXEC_FD, POLLIN, 0};
    struct timespec now = {0, 0};
    return raw(SYS_ppoll, &end, 1, &now, 0, 8) > 0;
}

/* A template that is not needed any more. */
RAW static void release(struct below *b)
{
    if (b->template)
        raw(SYS_kill, b->template, SIGKILL);
    b->template = 0;
}

/* A copy of the template says that it waits for a program. It is the command from here on, if it is our child, and if all
 * that an earlier command has left behind is gone: whatever is below us belongs to one command and the template. Else
 * there will be no other command; returns false if nothing below us is a command's, and all of it is to end. */
RAW static bool welcome(struct launch *l, int copy, struct below *b)
{
    if (!b->template) { /* the command so far was the template itself */
        b->template = b->command;
        b->command = 0;
    }
    if (!b->command && copy != b->template && raw(SYS_waitid, P_PID, copy, 0, WEXITED | WNOHANG | WNOWAIT, 0) >= 0) {
        if (!has_other_children(b->template, copy)) {
            l->pid = b->command = copy;
            b->left = false;
            atomic_store(&l->begin_wanted, 0); /* one that we hear of only now was for the command before */
            report('r');
            return true;
        }
        raw(SYS_kill, copy, SIGKILL);
    }
    release(b);
    return b->left;
}

RAW static int supervisor_main(void *argument)
{
    struct launch *l = argument;
    raw(SYS_prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    arrange_descriptors(l);
    uint64_t started = now_us();
    long error = renounce_mounting();
    if (error < 0)
        failed(l, STAGE_RESOURCES, error);
    if (error < 0 || !start_command(l)) {
        report('f');
        return 0;
    }
    enum { RUNNING, TERMINATING, KILLING } phase = RUNNING;
    uint64_t deadline = l->timeout_ms ? started + (uint64_t)l->timeout_ms * 1000 : 0;
    uint64_t grace = (uint64_t)l->grace_ms * 1000;
    bool starting = true;
    struct below below = {l->pid, 0, false, false};
    for (;;) {
        if (starting && exec_over()) {
            if (l->failed_stage) {
                report('f');
                return 0;
            }
            starting = false;
            report('s');
        }
        bool empty = reap(l, &below);
        if (below.main_gone && !starting && (phase == RUNNING || empty)) {
            l->wall_us = now_us() - (l->offered_us ? l->offered_us : started);
            report('e');
            below.main_gone = false;
            below.left = true;
            deadline = 0;
        }
        int copy = atomic_exchange(&l->next_wanted, 0);
        if (copy && !welcome(l, copy, &below) && phase == RUNNING) {
            phase = TERMINATING;
            deadline = 1; /* long past */
        }
        if (atomic_exchange(&l->last_wanted, 0))
            release(&below);
        if (!below.command && !below.main_gone && !starting && (phase == RUNNING ? !below.template : empty))
            return 0;
        deliver(l, &below);
        uint64_t now = now_us();
        if (atomic_exchange(&l->begin_wanted, 0) && below.command) {
            started = now;
            deadline = l->timeout_ms ? started + (uint64_t)l->timeout_ms * 1000 : 0;
            grace = (uint64_t)l->grace_ms * 1000;
        }
        uint32_t end = atomic_exchange(&l->end_wanted, 0);
        if (end)
            grace = (uint64_t)(end - 1) * 1000;
        if (phase == RUNNING && (end || (deadline && now >= deadline))) {
            l->cause = end ? BY_END : BY_TIMEOUT;
            phase = TERMINATING;
            deadline = now + grace;
            release(&below); /* whatever it does about a signal: no command waits for its end */
            if (grace)
                signal_tree(SIGTERM, SIGCONT); /* a stopped process hears nothing until it continues */
        } else if (phase == TERMINATING && end && now + grace < deadline) {
            deadline = now + grace; /* less patience than at first */
        }
        if (phase == TERMINATING && now >= deadline) {
            phase = KILLING;
            kill_tree();
        }
        if (phase == KILLING) {
            kill_children();
            deadline = now + RESCAN_MS * 1000;
        }
        wait_for_news(now, deadline, starting);
    }
}

long supervisor_start(struct launch *l)
{
    return raw_clone(CLONE_VM | SIGCHLD, l->supervisor_stack, supervisor_main, l);
}

/* Interpreters that have started and wait for a program. Each has a supervisor like any command, and pipes; EXEC hands it
 * the rest and it becomes that command. It is used once.
 *
 * Nothing is run twice: a program belongs to the parked process from the moment it says so, and is started the plain way
 * only when it cannot say so any more (it declined, or its end of the conversation is closed). A process of the same uid may
 * have stopped it, so its answer is awaited for a while and no longer; then it is killed, which closes its end. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "command.h"

enum { ANSWER_MS = 2000, START_MS = 30000, SEND_BUFFER = 524288, MAX_LOADER = 4096 };
enum { READY = 'P', TAKEN = 'T', DECLINED = 'N' }; /* as in park/loader.h */

struct parked {
    struct parked *next;
    struct command process; /* no channel of its own: it lends its pipes and its supervisor to a run */
    struct source control;
    uint64_t asked_by; /* PARK's channel, until it was answered; 0: no caller waits */
    uint64_t keep_ms, until; /* when it is let go; 0: never */
    bool ready, leaving, reaped; /* reaped: its supervisor's pid may be reused by now */
    struct command *run; /* was offered to it */
};

static struct parked *list;
static struct parked *forgotten; /* freed at the end of the turn: events for them may be on their way */

static void end_supervisor(struct parked *p)
{
    p->leaving = true;
    p->until = 0;
    if (p->process.supervisor && !p->reaped) {
        atomic_store(&p->process.launch->end_wanted, 1);
        kill(p->process.supervisor, SIGUSR1);
    }
}

static void answer(struct parked *p, uint32_t code, int error)
{
    struct channel *c = p->asked_by ? channel_find(p->asked_by) : NULL;
    p->asked_by = 0;
    if (c && !c->finished)
        channel_finish(c, code, error);
}

static void close_ends(struct parked *p)
{
    struct channel *c = &p->process.channel;
    source_close(&p->control);
    source_close(&c->in.source);
    for (int i = 0; i < 2; i++)
        source_close(&c->out[i].source);
}

/* It will not be a command. Its memory goes when its supervisor does. */
static void let_go(struct parked *p)
{
    struct command *run = p->run;
    p->run = NULL;
    answer(p, UNSUPPORTED, 0);
    close_ends(p);
    end_supervisor(p);
    if (run)
        command_launch(run);
}

static void forget(struct parked *p)
{
    struct parked **at = &list;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    source_close(&p->process.report);
    close_ends(p);
    if (p->process.launch)
        command_free_launch(&p->process);
    p->next = forgotten;
    forgotten = p;
}

static void sweep(void)
{
    while (forgotten) {
        struct parked *p = forgotten;
        forgotten = p->next;
        free(p);
    }
}

static void move_source(struct source *to, struct source *from, void (*ready)(struct source *, uint32_t))
{
    int fd = from->fd;
    source_mute(from);
    from->fd = -1;
    source_open(to, fd, ready);
}

/* The parked process is the run's command from now on. */
static void adopt(struct parked *p)
{
    struct command *run = p->run, *process = &p->process;
    struct channel *c = &run->channel;
    struct launch *wanted = run->launch;
    process->launch->timeout_ms = wanted->timeout_ms;
    process->launch->grace_ms = wanted->grace_ms;
    bool no_stdin = wanted->flags & EXEC_NO_STDIN;
    command_free_launch(run);
    run->launch = process->launch;
    run->memory = process->memory;
    run->memory_size = process->memory_size;
    run->supervisor = process->supervisor;
    process->launch = NULL;
    process->supervisor = 0;
    move_source(&c->in.source, &process->channel.in.source, input_ready);
    move_source(&c->out[0].source, &process->channel.out[0].source, stdout_ready);
    move_source(&c->out[1].source, &process->channel.out[1].source, stderr_ready);
    int report = process->report.fd;
    source_mute(&process->report);
    process->report.fd = -1;
    bool reachable = !p->leaving && !p->reaped;
    forget(p);
    if (reachable) {
        atomic_store(&run->launch->begin_wanted, 1);
        kill(run->supervisor, SIGUSR1);
    }
    if (no_stdin)
        input_gone(&c->in);
    run->handed_over = true;
    command_started(run);
    command_watch(run, report);
    input_release(&c->in);
}

/* Returns false when p is gone or on its way. */
static bool hear(struct parked *p)
{
    char what;
    ssize_t count = read(p->control.fd, &what, 1);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (count == 1 && what == READY && !p->ready && !p->leaving) {
        p->ready = true;
        p->until = p->keep_ms ? now_ms() + p->keep_ms : 0;
        answer(p, OK, 0);
        return true;
    }
    if (count == 1 && what == TAKEN && p->run)
        adopt(p);
    else
        let_go(p);
    return false;
}

static void control_ready(struct source *source, uint32_t events)
{
    (void)events;
    hear(container_of(source, struct parked, control));
}

static void report_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct parked *p = container_of(source, struct parked, process.report);
    char heard, next;
    ssize_t count = read(source->fd, &heard, 1);
    if ((count < 0 && (errno == EAGAIN || errno == EINTR)) || (count == 1 && heard == 's'))
        return;
    if (count == 0)
        source_close(source);
    struct command *run = p->run;
    /* It has ended. What it said last counts: no process is left that could say more. */
    while (p->control.fd >= 0 && hear(p))
        if (recv(p->control.fd, &next, 1, MSG_PEEK | MSG_DONTWAIT) < 0)
            break;
    if (run && run->handed_over) /* that was its end, which we have heard in its place */
        return count == 1 ? command_report(run, heard) : command_lost(run);
    if (p->run || !p->leaving)
        let_go(p);
}

void parked_reaped(pid_t pid)
{
    for (struct parked *p = list; p; p = p->next) {
        if (p->process.supervisor != pid)
            continue;
        struct command *run = p->run;
        p->reaped = true;
        /* As in command_reaped: at most two bytes and the end; the last of them may move it to its run. */
        for (int i = 0; i < 3 && list && p->process.report.fd >= 0; i++) {
            report_ready(&p->process.report, EPOLLIN);
            if (run && run->handed_over)
                return command_reaped(pid);
        }
        p->process.supervisor = 0;
        return forget(p);
    }
}

/* Requests -------------------------------------------------------------------------------------------------------- */

static bool same_strings(char **one, char **other, const char *last)
{
    size_t i = 0;
    while (one[i] && other[i] && strcmp(one[i], other[i]) == 0)
        i++;
    return last ? one[i] == last && !other[i] : !one[i] && !other[i];
}

/* All but the program itself, the directory and the times: those are handed over. */
static bool fits(const struct parked *p, const struct launch *l)
{
    const struct launch *ours = p->process.launch;
    if (!p->ready || p->leaving || p->run || (l->flags & EXEC_PTY) ||
        (l->flags & EXEC_KEEP_CAPABILITIES) != (ours->flags & EXEC_KEEP_CAPABILITIES))
        return false;
    if (l->uid != ours->uid || l->gid != ours->gid || l->umask != ours->umask ||
        l->group_count != ours->group_count || l->rlimit_count != ours->rlimit_count)
        return false;
    for (uint32_t i = 0; i < l->group_count; i++)
        if (l->groups[i] != ours->groups[i])
            return false;
    for (uint32_t i = 0; i < l->rlimit_count; i++)
        if (l->rlimits[i].resource != ours->rlimits[i].resource || l->rlimits[i].soft != ours->rlimits[i].soft ||
            l->rlimits[i].hard != ours->rlimits[i].hard)
            return false;
    int i = 0; /* all arguments but the last */
    for (; ours->argv[i + 1]; i++)
        if (!l->argv[i] || strcmp(l->argv[i], ours->argv[i]) != 0)
            return false;
    if (!l->argv[i] || l->argv[i + 1])
        return false;
    char **last = ours->envp;
    while (last[1])
        last++;
    return same_strings(ours->envp, l->envp, *last);
}

bool parked_offer(struct command *run)
{
    const struct launch *l = run->launch;
    struct parked *p = list;
    while (p && !fits(p, l))
        p = p->next;
    if (!p)
        return false;
    char **code = l->argv;
    while (code[1])
        code++;
    uint32_t head[3] = {(l->flags & EXEC_NO_STDIN) != 0, (uint32_t)strlen(l->cwd), (uint32_t)strlen(*code)};
    struct iovec parts[3] = {{head, sizeof head}, {(void *)(uintptr_t)l->cwd, head[1]}, {*code, head[2]}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    p->process.launch->offered_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    ssize_t sent = sendmsg(p->control.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != (ssize_t)(sizeof head + head[1] + head[2])) {
        let_go(p); /* with half a program it starts nothing */
        return false;
    }
    p->run = run;
    p->until = now_ms() + ANSWER_MS;
    return true;
}

static int park(struct parked *p, const uint8_t *payload, uint32_t length)
{
    static const char name[] = "LD_PRELOAD=";
    char preload[sizeof name + MAX_LOADER];
    uint32_t loader = get32(payload + 4);
    const uint8_t *path = payload + PARK_FIXED;
    if (loader < 1 || loader > MAX_LOADER || loader > length - PARK_FIXED - EXEC_FIXED || memchr(path, 0, loader))
        return EINVAL;
    put_bytes(put_bytes((uint8_t *)preload, name, sizeof name - 1), path, loader)[0] = 0;
    int error = command_build(&p->process, path + loader, length - PARK_FIXED - loader, preload);
    if (error)
        return error;
    struct launch *l = p->process.launch;
    if ((l->flags & ~(uint32_t)EXEC_KEEP_CAPABILITIES) || !l->argv[1] || l->timeout_ms)
        return EINVAL;
    if ((l->uid != OWN_ID && l->uid > INT32_MAX) || (l->gid != OWN_ID && l->gid > INT32_MAX))
        return EINVAL;
    int ends[2], report, size = SEND_BUFFER;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return errno;
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size); /* a refusal only makes a long program go the plain way */
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    source_open(&p->control, ends[0], control_ready);
    l->control = ends[1];
    error = command_open(&p->process, &report);
    close(ends[1]);
    if (error)
        return error;
    source_open(&p->process.report, report, report_ready);
    source_watch(&p->process.report, EPOLLIN);
    source_watch(&p->control, EPOLLIN);
    return 0;
}

void parked_request(uint64_t id, const uint8_t *payload, uint32_t length)
{
    static const struct kind kind = {0};
    int count = 0;
    for (struct parked *p = list; p; p = p->next)
        count++;
    struct parked *p = count < 2 * MAX_PARKED ? calloc(1, sizeof *p) : NULL;
    struct channel *c = p ? calloc(1, sizeof *c) : NULL;
    if (!c) {
        free(p);
        return channel_refuse(id, p ? NO_MEMORY : TOO_MANY, p ? ENOMEM : EAGAIN);
    }
    channel_init(c, &kind, id);
    p->process.report.fd = p->control.fd = p->process.channel.in.source.fd = -1;
    p->process.channel.out[0].source.fd = p->process.channel.out[1].source.fd = -1;
    p->asked_by = id;
    p->keep_ms = get32(payload);
    p->until = now_ms() + START_MS;
    p->next = list;
    list = p;
    int error = park(p, payload, length);
    if (error) {
        answer(p, code_of(error), error);
        return forget(p);
    }
    /* One of each kind: who parks another has a reason, such as another environment. */
    int kinds = 0;
    for (struct parked *older = p->next; older; older = older->next)
        if (!older->leaving && !older->run &&
            (strcmp(older->process.launch->argv[0], p->process.launch->argv[0]) == 0 || ++kinds >= MAX_PARKED))
            let_go(older);
}

/* Time, and the end ----------------------------------------------------------------------------------------------- */

uint64_t parked_deadline(void)
{
    uint64_t soonest = UINT64_MAX;
    for (struct parked *p = list; p; p = p->next)
        if (p->until && p->until < soonest)
            soonest = p->until;
    return soonest;
}

void parked_tick(void)
{
    uint64_t now = 0;
    sweep();
    for (struct parked *p = list; p; p = p->next) {
        if (!p->until || p->until > (now ? now : (now = now_ms())))
            continue;
        if (p->run)
            end_supervisor(p); /* its end of the conversation closes with it, and decides */
        else
            let_go(p);
    }
}

void parked_end_all(void)
{
    while (list) {
        struct parked *p = list;
        pid_t supervisor = p->process.supervisor;
        p->run = NULL;
        end_supervisor(p);
        while (supervisor && waitpid(supervisor, NULL, 0) < 0 && errno == EINTR)
            ;
        p->process.supervisor = 0;
        forget(p);
    }
    sweep();
}

/* Interpreters that have started and wait for a program. Each has a supervisor like any command, and pipes; EXEC hands it
 * the rest and it becomes that command. It is used once; a template (template.c) has copies that are.
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

#include "parked.h"

static struct parked *list;
static struct parked *forgotten; /* freed at the end of the turn: events for them may be on their way */

struct parked *parked_new(void)
{
    struct parked *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->process.report.fd = p->control.fd = p->process.channel.in.source.fd = -1;
    p->process.channel.out[0].source.fd = p->process.channel.out[1].source.fd = -1;
    p->next = list;
    return list = p;
}

static void leave(struct parked *p, bool all)
{
    p->leaving = true;
    p->until = 0;
    if (p->process.supervisor && !p->reaped) {
        atomic_store(all ? &p->process.launch->end_wanted : &p->process.launch->last_wanted, 1);
        kill(p->process.supervisor, SIGUSR1);
    }
}

void parked_end(struct parked *p) { leave(p, true); }

void parked_answer(struct parked *p, uint32_t code, int error)
{
    struct channel *c = p->asked_by ? channel_find(p->asked_by) : NULL;
    p->asked_by = 0;
    if (c && !c->finished)
        channel_finish(c, code, error);
}

void parked_close(struct parked *p)
{
    struct channel *c = &p->process.channel;
    source_close(&p->control);
    source_close(&c->in.source);
    for (int i = 0; i < 2; i++)
        source_close(&c->out[i].source);
}

/* Its memory goes when its supervisor does. A template goes with its copies. */
void parked_let_go(struct parked *p)
{
    struct command *run = p->run;
    struct parked *template = p->template, *copy = p->copy;
    bool offered = copy && copy->run && copy->ready; /* what becomes of that program is the copy's to say */
    p->run = NULL;
    parked_answer(p, UNSUPPORTED, 0);
    parked_close(p);
    if (template) {
        template->copy = NULL;
        parked_forget(p);
        if (!template->leaving)
            parked_let_go(template);
    } else {
        leave(p, !p->used && !offered);
    }
    if (copy && !offered)
        parked_let_go(copy);
    if (run)
        command_launch(run);
}

void parked_forget(struct parked *p)
{
    struct parked **at = &list;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    source_close(&p->process.report);
    parked_close(p);
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

void parked_move(struct parked *p, struct command *run)
{
    struct channel *c = &run->channel, *own = &p->process.channel;
    move_source(&c->in.source, &own->in.source, input_ready);
    move_source(&c->out[0].source, &own->out[0].source, stdout_ready);
    move_source(&c->out[1].source, &own->out[1].source, stderr_ready);
    parked_forget(p);
}

/* The parked process is the run's command from now on. */
static void adopt(struct parked *p)
{
    struct command *run = p->run, *process = p->template ? &p->template->process : &p->process;
    struct launch *l = process->launch;
    int report = process->report.fd;
    bool reachable = p->template ? !p->template->reaped : !p->leaving && !p->reaped;
    bool no_stdin = run->launch->flags & EXEC_NO_STDIN;
    l->timeout_ms = run->launch->timeout_ms;
    l->grace_ms = run->launch->grace_ms;
    command_free_launch(run);
    if (p->template) {
        report = -1; /* the template hears its supervisor */
        template_adopt(p);
    } else {
        run->launch = l;
        run->memory = process->memory;
        run->memory_size = process->memory_size;
        run->supervisor = process->supervisor;
        process->launch = NULL;
        process->supervisor = 0;
        source_mute(&process->report);
        process->report.fd = -1;
        parked_move(p, run);
    }
    if (reachable) {
        atomic_store(&l->begin_wanted, 1);
        kill(run->supervisor, SIGUSR1);
    }
    if (no_stdin)
        input_gone(&run->channel.in);
    run->handed_over = true;
    command_started(run);
    command_watch(run, report);
    input_release(&run->channel.in);
}

static bool same_strings(char **one, char **other, const char *last)
{
    size_t i = 0;
    while (one[i] && other[i] && strcmp(one[i], other[i]) == 0)
        i++;
    return last ? one[i] == last && !other[i] : !one[i] && !other[i];
}

/* All but the program itself, the directory and the times: those are handed over. preload: ours has one more variable. */
static bool same_request(const struct launch *l, const struct launch *ours, bool preload)
{
    if ((l->flags & EXEC_PTY) || (l->flags & EXEC_KEEP_CAPABILITIES) != (ours->flags & EXEC_KEEP_CAPABILITIES))
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
    return same_strings(ours->envp, l->envp, preload ? *last : NULL);
}

/* What has changed for one has changed for all that started up alike. */
static void let_go_alike(const struct parked *with)
{
    for (struct parked *p = list, *next; p; p = next) {
        next = p->next;
        if (p != with && !p->template && !p->leaving && !p->run &&
            same_request(p->process.launch, with->process.launch, false))
            parked_let_go(p);
    }
}

/* A copy says its pid with it. */
static bool hear_copy(struct parked *p)
{
    uint8_t heard[5];
    ssize_t count = read(p->control.fd, heard, sizeof heard);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    int32_t pid = count == sizeof heard && heard[0] == READY ? (int32_t)get32(heard + 1) : 0;
    if (pid <= 0) {
        parked_let_go(p);
        return false;
    }
    p->pid = pid;
    template_known(p->template);
    return true;
}

bool parked_hear(struct parked *p)
{
    char what;
    if (p->template && !p->pid)
        return hear_copy(p);
    ssize_t count = read(p->control.fd, &what, 1);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (count == 1 && what == READY && !p->ready && !p->leaving && !p->template && !p->forks) {
        p->ready = true;
        p->until = p->keep_ms ? now_ms() + p->keep_ms : 0;
        parked_answer(p, OK, 0);
        return true;
    }
    if (count == 1 && what == FORKS && !p->ready && !p->leaving && !p->template && !p->forks) {
        p->forks = true;
        template_copy(p);
        return true;
    }
    if (count == 1 && what == TAKEN && p->run && p->ready) {
        adopt(p);
        return false;
    }
    if (count == 1 && what == OUTDATED)
        let_go_alike(p->template ? p->template : p);
    parked_let_go(p);
    return false;
}

void parked_hear_all(struct parked *p)
{
    char next;
    shutdown(p->control.fd, SHUT_RD); /* else one whose supervisor was killed could take its program after this */
    while (p->control.fd >= 0 && parked_hear(p))
        if (recv(p->control.fd, &next, 1, MSG_PEEK | MSG_DONTWAIT) < 0)
            break;
}

static void control_ready(struct source *source, uint32_t events)
{
    (void)events;
    parked_hear(container_of(source, struct parked, control));
}

static void report_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct parked *p = container_of(source, struct parked, process.report);
    char heard;
    ssize_t count = read(source->fd, &heard, 1);
    if ((count < 0 && (errno == EAGAIN || errno == EINTR)) || (count == 1 && heard == 's'))
        return;
    if (count == 0)
        source_close(source);
    if (p->forks)
        return count == 1 ? template_report(p, heard) : (void)0; /* what becomes of it is decided when it is reaped */
    struct command *run = p->run;
    parked_hear_all(p); /* It has ended. What it said last counts: no process is left that could say more. */
    if (run && run->handed_over) /* that was its end, which we have heard in its place */
        return count == 1 ? command_report(run, heard) : command_lost(run);
    if (p->run || !p->leaving)
        parked_let_go(p);
}

void parked_reaped(pid_t pid)
{
    for (struct parked *p = list; p; p = p->next) {
        if (p->process.supervisor != pid)
            continue;
        struct command *run = p->run;
        p->reaped = true;
        /* As in command_reaped: what it has said is all there; the last of it may move it to its run. */
        for (int i = 0; i < 4 && list && p->process.report.fd >= 0; i++) {
            report_ready(&p->process.report, EPOLLIN);
            if (run && run->handed_over)
                return command_reaped(pid);
        }
        if (p->forks)
            template_gone(p);
        p->process.supervisor = 0;
        return parked_forget(p);
    }
}

/* Requests -------------------------------------------------------------------------------------------------------- */

/* Could it take the run, now or in a moment? */
static bool fits(const struct parked *p, const struct launch *l)
{
    if (p->leaving || p->current || (p->forks ? !p->copy || p->copy->run : !p->ready || p->run))
        return false;
    return same_request(l, p->process.launch, true);
}

void parked_send(struct parked *p)
{
    const struct launch *l = p->run->launch;
    char **code = l->argv;
    while (code[1])
        code++;
    uint32_t head[3] = {(l->flags & EXEC_NO_STDIN) != 0, (uint32_t)strlen(l->cwd), (uint32_t)strlen(*code)};
    struct iovec parts[3] = {{head, sizeof head}, {(void *)(uintptr_t)l->cwd, head[1]}, {*code, head[2]}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    (p->template ? p->template : p)->process.launch->offered_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    p->until = now_ms() + ANSWER_MS;
    ssize_t sent = sendmsg(p->control.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != (ssize_t)(sizeof head + head[1] + head[2]))
        parked_let_go(p); /* with half a program it starts nothing */
}

bool parked_offer(struct command *run)
{
    struct parked *found = NULL;
    for (struct parked *p = list; p; p = p->next) {
        if (p->template || !fits(p, run->launch))
            continue;
        /* The oldest that is ready, so that what is not needed any more stays unused, and goes. */
        struct parked *waits = p->forks ? p->copy : p;
        if (!found || waits->ready || !found->ready)
            found = waits;
    }
    if (!found)
        return false;
    found->run = run;
    found->until = now_ms() + ANSWER_MS;
    if (found->ready)
        parked_send(found);
    return true;
}

int parked_control(struct parked *p, int *other)
{
    int ends[2], size = SEND_BUFFER;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return errno;
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size); /* a refusal only makes a long program go the plain way */
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    source_open(&p->control, ends[0], control_ready);
    source_watch(&p->control, EPOLLIN);
    *other = ends[1];
    return 0;
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
    int report;
    error = parked_control(p, &l->control);
    if (error)
        return error;
    error = command_open(&p->process, &report);
    close(l->control);
    if (error)
        return error;
    source_open(&p->process.report, report, report_ready);
    source_watch(&p->process.report, EPOLLIN);
    return 0;
}

void parked_request(uint64_t id, const uint8_t *payload, uint32_t length)
{
    static const struct kind kind = {0};
    int count = 0;
    for (struct parked *p = list; p; p = p->next)
        count += !p->template;
    struct parked *p = count < 2 * MAX_PARKED ? parked_new() : NULL;
    struct channel *c = p ? calloc(1, sizeof *c) : NULL;
    if (!c) {
        if (p)
            parked_forget(p);
        return channel_refuse(id, p ? NO_MEMORY : TOO_MANY, p ? ENOMEM : EAGAIN);
    }
    channel_init(c, &kind, id);
    p->asked_by = id;
    p->keep_ms = get32(payload);
    p->until = now_ms() + START_MS;
    int error = park(p, payload, length);
    if (error) {
        parked_answer(p, code_of(error), error);
        return parked_forget(p);
    }
    /* Of each kind only such as any run of it could take: who parks another has a reason, such as another environment. */
    int others = 0, same = 0;
    for (struct parked *older = p->next, *next; older; older = next) {
        next = older->next;
        if (older->leaving || older->run || older->template)
            continue;
        bool kind_is_same = strcmp(older->process.launch->argv[0], p->process.launch->argv[0]) == 0;
        if (kind_is_same ? !same_request(older->process.launch, p->process.launch, false) || ++same >= MAX_SAME
                         : ++others >= MAX_PARKED)
            parked_let_go(older);
    }
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
    for (struct parked *p = list, *next; p; p = next) {
        next = p->next;
        if (!p->until || p->until > (now ? now : (now = now_ms())))
            continue;
        p->until = 0;
        if (p->run && p->ready)
            parked_end(p->template ? p->template : p); /* its end of the conversation closes with it, and decides */
        else
            parked_let_go(p);
    }
}

void parked_end_all(void)
{
    while (list) {
        struct parked *p = list;
        pid_t supervisor = p->process.supervisor;
        p->run = p->current = NULL;
        parked_end(p);
        while (supervisor && waitpid(supervisor, NULL, 0) < 0 && errno == EINTR)
            ;
        p->process.supervisor = 0;
        parked_forget(p);
    }
    sweep();
}

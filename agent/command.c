/* The life of commands: their streams, their end, and what stays of them for a host that lost its link. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "command.h"

enum { MAX_DISCARDED = 256 };

int command_count;

static struct command *as_command(struct channel *c) { return container_of(c, struct command, channel); }
bool channel_is_command(const struct channel *c) { return c->kind == &command_kind; }

/* Pipes that background children hold after their command has ended: read, so that no SIGPIPE ends them, and dropped. */
static struct source discarded[MAX_DISCARDED];
static int next_discarded;

static void read_discarded(struct source *source, uint32_t events)
{
    (void)events;
    static uint8_t waste[16384];
    ssize_t count = read(source->fd, waste, sizeof waste);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR))
        source_close(source);
}

static void discard(struct stream *s)
{
    struct source *place = &discarded[next_discarded];
    next_discarded = (next_discarded + 1) % MAX_DISCARDED;
    if (place->ready)
        source_close(place);
    source_mute(&s->source);
    source_open(place, s->source.fd, read_discarded);
    source_watch(place, EPOLLIN);
    s->source.fd = -1;
    s->ended = true;
}

void command_refuse(struct command *k, enum stage stage, int error)
{
    uint8_t payload[4];
    put32(payload, stage);
    channel_result(&k->channel, payload, sizeof payload);
    channel_finish(&k->channel, code_of(error), error);
    k->channel.forget = true;
}

/* The end of a command -------------------------------------------------------------------------------------------- */

static void finish(struct command *k)
{
    struct channel *c = &k->channel;
    if (c->finished)
        return;
    input_gone(&c->in);
    if (k->lost)
        return channel_finish(c, LOST, 0);
    uint8_t result[MAX_EXTRA];
    uint8_t *p = put32(put16(put8(put8(result, k->how), k->cause), 0), k->value);
    p = put64(put64(p, c->out[0].ring.end), c->out[1].ring.end);
    p = put64(put64(put64(put64(p, k->wall_us), k->user_us), k->system_us), k->max_rss_kib);
    channel_result(c, result, (uint32_t)(p - result));
    if (!c->finished)
        channel_finish(c, OK, 0);
}

/* After the exit: the streams end with their pipes, or with what was in them when the drain time is over. */
static void settle(struct command *k)
{
    struct channel *c = &k->channel;
    if (!k->exited || c->finished)
        return;
    bool over = now_ms() >= k->drain_until, open = false;
    for (int i = 0; i < 2; i++) {
        struct stream *s = &c->out[i];
        if (s->ended)
            continue;
        if (over && s->ring.end >= s->mark) {
            if (k->terminal)
                stream_end(s); /* the terminal hangs up */
            else
                discard(s);
            continue;
        }
        open = true;
    }
    if (!open)
        finish(k);
}

static void on_exit_report(struct command *k)
{
    struct channel *c = &k->channel;
    const struct launch *l = k->launch;
    k->exited = true;
    k->how = WIFSIGNALED(l->status) ? SIGNALLED : EXITED;
    k->value = (uint32_t)(WIFSIGNALED(l->status) ? WTERMSIG(l->status) : WEXITSTATUS(l->status));
    k->cause = (uint8_t)l->cause;
    k->wall_us = l->wall_us;
    k->user_us = l->user_us;
    k->system_us = l->system_us;
    k->max_rss_kib = l->max_rss_kib;
    k->drain_until = now_ms() + k->drain_ms;
    for (int i = 0; i < 2; i++) {
        struct stream *s = &c->out[i];
        int waiting = 0;
        if (s->source.fd >= 0)
            ioctl(s->source.fd, FIONREAD, &waiting);
        s->mark = s->ring.end + (uint64_t)waiting;
        while (stream_fill(c, s) && s->ring.end < s->mark)
            ;
        if (s->source.fd >= 0)
            stream_fill(c, s); /* most often the end of the file, and then all is said */
    }
    settle(k);
}

/* Tells the host where the command stands; ATTACH has it told again. */
static void announce(struct command *k)
{
    struct channel *c = &k->channel;
    uint8_t payload[32];
    uint32_t state = (k->exited ? STATE_ENDED : 0u) | (k->handed_over ? STATE_HANDED_OVER : 0u) | (k->copy ? STATE_COPY : 0u);
    uint8_t *p = put32(put32(payload, k->pid), state);
    put64(put64(put64(p, c->in.ring.end), c->out[0].sent), c->out[1].sent);
    channel_opened(c, payload, sizeof payload);
    c->detach_due = k->detach_wanted;
    k->detach_wanted = false;
}

static void read_report(struct source *source, uint32_t events)
{
    (void)events;
    struct command *k = container_of(source, struct command, report);
    char what;
    ssize_t count = read(source->fd, &what, 1);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (count == 0) {
        source_close(source);
        return command_lost(k);
    }
    command_report(k, what);
}

/* Killed by root of the sandbox: what became of the command cannot be known. */
void command_lost(struct command *k)
{
    if (k->exited || k->channel.finished)
        return;
    k->exited = k->lost = true;
    for (int i = 0; i < 2; i++)
        stream_end(&k->channel.out[i]);
    finish(k);
}

void command_started(struct command *k)
{
    k->started = true;
    k->pid = (uint32_t)k->launch->pid;
    announce(k);
}

void command_report(struct command *k, char what)
{
    struct channel *c = &k->channel;
    switch (what) {
    case 's':
        if (!k->started) /* a parked one has been for long */
            command_started(k);
        break;
    case 'f':
        command_refuse(k, (enum stage)k->launch->failed_stage, k->launch->failed_error);
        if (!c->attached)
            channel_kill(c); /* nothing ran, and no host is there to tell */
        break;
    case 'e':
        on_exit_report(k);
        break;
    }
}

void command_reaped(pid_t pid)
{
    for (struct channel *c = channels.next; c != &channels; c = c->next) {
        if (!channel_is_command(c) || as_command(c)->supervisor != pid || as_command(c)->lent)
            continue;
        struct command *k = as_command(c);
        /* What it reported may still be unread: at most two bytes and the end. */
        for (int i = 0; i < 3 && k->report.fd >= 0; i++)
            read_report(&k->report, EPOLLIN);
        k->supervisor = 0;
        command_free_launch(k);
        return;
    }
    parked_reaped(pid);
}

void command_free_launch(struct command *k)
{
    k->launch = NULL;
    munmap(k->memory, k->memory_size);
}

int commands_timeout(void)
{
    uint64_t now = now_ms(), soonest = parked_deadline();
    if (soonest < now)
        soonest = now;
    for (struct channel *c = channels.next; c != &channels; c = c->next)
        if (channel_is_command(c) && as_command(c)->exited && !c->finished && !c->dead) {
            /* Past the time only room in the ring is awaited, which an ACK brings. */
            uint64_t until = as_command(c)->drain_until;
            if (until >= now && until < soonest)
                soonest = until;
        }
    return soonest == UINT64_MAX ? -1 : (int)(soonest - now + 1);
}

void commands_tick(void)
{
    for (struct channel *c = channels.next; c != &channels; c = c->next) {
        if (!channel_is_command(c) || c->dead)
            continue;
        settle(as_command(c));
    }
    parked_tick();
}

/* Streams --------------------------------------------------------------------------------------------------------- */

static void output_ready(struct source *source, uint32_t events, int i)
{
    (void)events;
    struct stream *s = container_of(source, struct stream, source);
    struct command *k = as_command(container_of(s - i, struct channel, out[0]));
    stream_fill(&k->channel, s);
    settle(k);
}

void stdout_ready(struct source *source, uint32_t events) { output_ready(source, events, 0); }
void stderr_ready(struct source *source, uint32_t events) { output_ready(source, events, 1); }

void command_watch(struct command *k, int report)
{
    if (report >= 0) {
        source_open(&k->report, report, read_report);
        source_watch(&k->report, EPOLLIN);
    }
    for (int i = 0; i < 2; i++)
        source_watch(&k->channel.out[i].source, EPOLLIN);
}

static void on_room(struct channel *c, int i)
{
    stream_fill(c, &c->out[i]);
    settle(as_command(c));
}

void command_link_lost(struct channel *c)
{
    c->attached = c->opened = c->told = c->detach_due = false;
    if (c->finished && c->forget)
        return channel_kill(c); /* it never started: the host will ask, hear that it is unknown, and may try again */
    for (int i = 0; i < 2; i++)
        stream_fill(c, &c->out[i]); /* no host limits the rate now */
}

static void drop(struct channel *c)
{
    struct command *k = as_command(c);
    source_close(&k->report);
    if (k->launch && !k->lent)
        munmap(k->memory, k->memory_size);
    command_count--;
}

bool command_unreaped(struct channel *c) { return as_command(c)->supervisor != 0; }

const struct kind command_kind = {.data = input_data, .eof = input_eof, .room = on_room, .drop = drop};

/* Requests -------------------------------------------------------------------------------------------------------- */

void command_attach(uint64_t id, uint64_t stdout_from, uint64_t stderr_from)
{
    struct channel *c = channel_find(id);
    if (!c || !channel_is_command(c))
        return channel_refuse(id, UNKNOWN_COMMAND, 0);
    struct command *k = as_command(c);
    if (c->attached)
        return link_fail();
    if (stdout_from > c->out[0].ring.end || stderr_from > c->out[1].ring.end)
        return channel_refuse(id, INVALID, 0);
    uint64_t from[2] = {stdout_from, stderr_from};
    for (int i = 0; i < 2; i++) {
        struct stream *s = &c->out[i];
        if (from[i] > s->ring.acked)
            ring_ack(&s->ring, from[i]);
        s->sent = s->ring.acked;
        s->eof_sent = false;
    }
    c->attached = true;
    c->told = false;
    c->in.ack_due = true;
    c->in.gone_sent = c->in.eof;
    if (k->started)
        announce(k); /* else OPENED comes by itself */
}

#define BIT(number) (1ull << ((number) - 1))

static void send_signal(struct command *k, uint32_t number, uint32_t scope)
{
    /* The supervisor delivers what waits by number and not in the order in which it came. Of a stop and a continuation
     * the later one counts, and ends the wait of the other, as it does in the kernel. */
    const uint64_t stops = BIT(SIGSTOP) | BIT(SIGTSTP) | BIT(SIGTTIN) | BIT(SIGTTOU);
    if (number == SIGCONT)
        atomic_fetch_and(&k->launch->signals[scope], ~stops);
    else if (BIT(number) & stops)
        atomic_fetch_and(&k->launch->signals[scope], ~BIT(SIGCONT));
    atomic_fetch_or(&k->launch->signals[scope], BIT(number));
    k->disturbed = true;
    kill(k->supervisor, SIGUSR1);
}

void command_frame(struct channel *c, uint8_t type, const uint8_t *payload)
{
    struct command *k = as_command(c);
    struct launch *l = k->launch;
    bool reachable = k->supervisor && !k->exited;
    switch (type) {
    case SIGNAL: {
        uint32_t number = get32(payload), scope = get32(payload + 4);
        if (number < 1 || number > 64 || scope >= SCOPES)
            return link_fail();
        if (reachable) {
            send_signal(k, number, scope);
        }
        return;
    }
    case END:
        if (reachable) {
            uint32_t grace = get32(payload);
            atomic_store(&l->end_wanted, grace < UINT32_MAX ? grace + 1 : grace);
            k->disturbed = true;
            kill(k->supervisor, SIGUSR1);
        }
        return;
    case RESIZE:
        if (c->out[0].source.fd >= 0) {
            struct winsize size = {.ws_row = get16(payload), .ws_col = get16(payload + 2)};
            pid_t group;
            /* gVisor tells no process that the size changed, and has no TIOCGPGRP here by which it can be told apart. */
            if (ioctl(c->out[0].source.fd, TIOCSWINSZ, &size) == 0 && reachable &&
                ioctl(c->out[0].source.fd, TIOCGPGRP, &group) < 0)
                send_signal(k, SIGWINCH, SCOPE_TREE);
        }
        return;
    case DETACH:
        *(k->started ? &c->detach_due : &k->detach_wanted) = true;
        return;
    case RELEASE:
        if (c->finished && !c->attached)
            channel_kill(c);
        return;
    default:
        link_fail();
    }
}

void command_list(uint64_t id)
{
    static const struct kind list_kind = {0};
    struct channel *answer = calloc(1, sizeof *answer);
    if (!answer || !ring_allocate(&answer->out[0].ring, OUTPUT_WINDOW)) {
        free(answer);
        return channel_refuse(id, NO_MEMORY, ENOMEM);
    }
    channel_init(answer, &list_kind, id);
    answer->streams = 1;
    for (struct channel *c = channels.next; c != &channels; c = c->next) {
        if (!channel_is_command(c) || c->dead || !as_command(c)->started)
            continue;
        const struct command *k = as_command(c);
        uint8_t record[64 + MAX_NAME];
        uint8_t *p = put64(put32(record + 4, k->pid), c->id);
        p = put8(put8(put8(put8(p, c->finished ? 2 : 1), c->attached), k->exited ? k->how : 0), k->cause);
        p = put64(put64(put64(put32(p, k->value), k->started_unix_ms), c->out[0].ring.end), c->out[1].ring.end);
        p = put_bytes(put32(p, k->name_length), k->name, k->name_length);
        put32(record, (uint32_t)(p - record) - 4);
        if (ring_room(&answer->out[0].ring) >= (uint32_t)(p - record))
            ring_put(&answer->out[0].ring, record, (uint32_t)(p - record));
    }
    channel_opened(answer, "", 0);
    channel_finish(answer, OK, 0);
}

void commands_end_all(void)
{
    for (struct channel *c = channels.next; c != &channels; c = c->next) {
        if (!channel_is_command(c))
            continue;
        struct command *k = as_command(c);
        if (k->supervisor) {
            atomic_store(&k->launch->end_wanted, 1);
            kill(k->supervisor, SIGUSR1);
            while (waitpid(k->supervisor, NULL, 0) < 0 && errno == EINTR)
                ;
        }
        channel_kill(c);
    }
    parked_end_all();
    for (int i = 0; i < MAX_DISCARDED; i++)
        if (discarded[i].ready)
            source_close(&discarded[i]);
}

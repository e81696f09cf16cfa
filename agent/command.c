/* Commands: from an EXEC frame to a supervisor, their streams, and what stays of them for a host that lost its link. */
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

#include "agent.h"

enum { STACK_SIZE = 16384, MAX_NAME = 128, MAX_DISCARDED = 256, MAX_GROUPS = 64, MAX_RLIMITS = 16 };

struct command {
    struct channel channel;
    struct launch *launch; /* with its stacks and strings, in one mapping; NULL once the supervisor was reaped */
    uint8_t *memory;
    size_t memory_size;
    pid_t supervisor;
    struct source report;
    uint32_t pid;
    bool started, exited, lost, detach_wanted, terminal;
    uint64_t wall_us, user_us, system_us, max_rss_kib;
    uint32_t drain_ms;
    uint64_t drain_until; /* after the exit, while somebody holds the pipes */
    uint64_t started_unix_ms;
    uint8_t how, cause;
    uint32_t value;
    uint32_t name_length;
    char name[MAX_NAME];
};

static int command_count;
static const struct kind command_kind;

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

static void refuse(struct command *k, enum stage stage, int error)
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
    uint8_t *p = put32(put32(payload, k->pid), k->exited);
    put64(put64(put64(p, c->in.ring.end), c->out[0].sent), c->out[1].sent);
    channel_opened(c, payload, sizeof payload);
    c->detach_due = k->detach_wanted;
    k->detach_wanted = false;
}

static void read_report(struct source *source, uint32_t events)
{
    (void)events;
    struct command *k = container_of(source, struct command, report);
    struct channel *c = &k->channel;
    char what;
    ssize_t count = read(source->fd, &what, 1);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (count == 0) {
        source_close(source);
        if (k->exited || c->finished)
            return;
        /* Killed by root of the sandbox: what became of the command cannot be known. */
        k->exited = k->lost = true;
        for (int i = 0; i < 2; i++)
            stream_end(&c->out[i]);
        return finish(k);
    }
    switch (what) {
    case 's':
        k->started = true;
        k->pid = (uint32_t)k->launch->pid;
        announce(k);
        break;
    case 'f':
        refuse(k, (enum stage)k->launch->failed_stage, k->launch->failed_error);
        if (!c->attached)
            channel_kill(c); /* nothing ran, and nobody is there to hear it */
        break;
    case 'e':
        on_exit_report(k);
        break;
    }
}

void command_reaped(pid_t pid)
{
    for (struct channel *c = channels.next; c != &channels; c = c->next) {
        if (!channel_is_command(c) || as_command(c)->supervisor != pid)
            continue;
        struct command *k = as_command(c);
        /* What it reported may still be unread: at most two bytes and the end. */
        for (int i = 0; i < 3 && k->report.fd >= 0; i++)
            read_report(&k->report, EPOLLIN);
        k->supervisor = 0;
        k->launch = NULL;
        munmap(k->memory, k->memory_size);
        return;
    }
}

int commands_timeout(void)
{
    uint64_t now = now_ms(), soonest = UINT64_MAX;
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

static void stdout_ready(struct source *source, uint32_t events) { output_ready(source, events, 0); }
static void stderr_ready(struct source *source, uint32_t events) { output_ready(source, events, 1); }

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
        stream_fill(c, &c->out[i]); /* nobody holds us back now */
}

static void drop(struct channel *c)
{
    struct command *k = as_command(c);
    source_close(&k->report);
    if (k->launch)
        munmap(k->memory, k->memory_size);
    command_count--;
}

bool command_unreaped(struct channel *c) { return as_command(c)->supervisor != 0; }

static const struct kind command_kind = {.data = input_data, .eof = input_eof, .room = on_room, .drop = drop};

/* Requests -------------------------------------------------------------------------------------------------------- */

void command_attach(uint64_t id, uint64_t stdout_from, uint64_t stderr_from)
{
    struct channel *c = channel_find(id);
    if (!c || !channel_is_command(c))
        return channel_refuse(id, UNKNOWN_COMMAND, 0);
    struct command *k = as_command(c);
    if (c->attached || stdout_from > c->out[0].ring.end || stderr_from > c->out[1].ring.end)
        return link_fail();
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

void command_frame(struct channel *c, uint8_t type, const uint8_t *payload)
{
    struct command *k = as_command(c);
    struct launch *l = k->launch;
    bool reachable = k->supervisor && !k->exited;
    switch (type) {
    case SIGNAL: {
        uint32_t number = get32(payload), scope = get32(payload + 4);
        if (number < 1 || number > 63 || scope >= SCOPES)
            return link_fail();
        if (reachable) {
            atomic_fetch_or(&l->signals[scope], 1ull << number);
            kill(k->supervisor, SIGUSR1);
        }
        return;
    }
    case END:
        if (reachable) {
            uint32_t grace = get32(payload);
            atomic_store(&l->end_wanted, grace < UINT32_MAX ? grace + 1 : grace);
            kill(k->supervisor, SIGUSR1);
        }
        return;
    case RESIZE:
        if (c->out[0].source.fd >= 0) {
            struct winsize size = {.ws_row = get16(payload), .ws_col = get16(payload + 2)};
            ioctl(c->out[0].source.fd, TIOCSWINSZ, &size); /* no terminal: nothing to resize */
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
    for (int i = 0; i < MAX_DISCARDED; i++)
        if (discarded[i].ready)
            source_close(&discarded[i]);
}

/* EXEC ------------------------------------------------------------------------------------------------------------ */

struct reader { const uint8_t *at, *end; bool bad; };

/* A length-prefixed string, copied and terminated. */
static char *take_string(struct reader *r, char **to)
{
    if (r->end - r->at < 4) {
        r->bad = true;
        return NULL;
    }
    uint32_t length = get32(r->at);
    r->at += 4;
    if (length > (size_t)(r->end - r->at) || memchr(r->at, 0, length)) {
        r->bad = true;
        return NULL;
    }
    char *string = *to;
    memcpy(string, r->at, length);
    string[length] = 0;
    *to += length + 1;
    r->at += length;
    return string;
}

static uint8_t *align(uint8_t *p) { return (uint8_t *)(((uintptr_t)p + 15) & ~(uintptr_t)15); }

/* Lays out everything a supervisor needs in one mapping: two stacks, struct launch, arrays, strings. */
static int build_launch(struct command *k, const uint8_t *payload, uint32_t length)
{
    uint32_t groups = get16(payload + 36), rlimits = get16(payload + 38);
    uint32_t argc = get32(payload + 40), envc = get32(payload + 44);
    /* Each string takes four bytes at least, so the counts are bounded before they are used. */
    if (groups > MAX_GROUPS || rlimits > MAX_RLIMITS || argc < 1 || argc > length / 4 || envc > length / 4)
        return EINVAL;
    size_t size = 2 * STACK_SIZE + sizeof(struct launch) + groups * 4 + rlimits * sizeof(struct rlimit_request) +
                  ((size_t)argc + envc + 2) * sizeof(char *) + length + 5 * 16;
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return ENOMEM;
    struct launch *l = k->launch = (struct launch *)(void *)(memory + 2 * STACK_SIZE);
    k->memory = memory;
    k->memory_size = size;
    l->supervisor_stack = memory + STACK_SIZE;
    l->command_stack = memory + 2 * STACK_SIZE;
    l->flags = get32(payload);
    l->uid = get32(payload + 4);
    l->gid = get32(payload + 8);
    l->timeout_ms = get32(payload + 12);
    l->grace_ms = get32(payload + 16);
    k->drain_ms = get32(payload + 20);
    l->umask = get32(payload + 28) & 0777;
    l->group_count = groups;
    l->rlimit_count = rlimits;

    uint8_t *p = align((uint8_t *)(l + 1));
    l->groups = (uint32_t *)(void *)p;
    p = align(p + groups * 4);
    l->rlimits = (struct rlimit_request *)(void *)p;
    p = align(p + rlimits * sizeof(struct rlimit_request));
    l->argv = (char **)(void *)p;
    l->envp = l->argv + argc + 1;
    char *strings = (char *)(l->envp + envc + 1);

    struct reader r = {payload + EXEC_FIXED, payload + length, false};
    if ((size_t)(r.end - r.at) < groups * 4 + rlimits * 24)
        return EINVAL;
    for (uint32_t i = 0; i < groups; i++, r.at += 4)
        l->groups[i] = get32(r.at);
    for (uint32_t i = 0; i < rlimits; i++, r.at += 24)
        l->rlimits[i] = (struct rlimit_request){get32(r.at), get64(r.at + 8), get64(r.at + 16)};
    l->cwd = take_string(&r, &strings);
    for (uint32_t i = 0; i < argc && !r.bad; i++)
        l->argv[i] = take_string(&r, &strings);
    for (uint32_t i = 0; i < envc && !r.bad; i++)
        l->envp[i] = take_string(&r, &strings);
    if (r.bad || r.at != r.end || !l->argv[0][0] || (l->flags & ~(uint32_t)EXEC_FLAGS) || get32(payload + 48))
        return EINVAL;
    if (!strchr(l->argv[0], '/')) {
        l->path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        for (uint32_t i = 0; i < envc; i++)
            if (strncmp(l->envp[i], "PATH=", 5) == 0) {
                l->path = l->envp[i] + 5;
                break;
            }
    }
    k->name_length = (uint32_t)strnlen(l->argv[0], MAX_NAME);
    memcpy(k->name, l->argv[0], k->name_length);
    return 0;
}

static int open_terminal(struct command *k, uint16_t rows, uint16_t columns, int stdio[3])
{
    struct channel *c = &k->channel;
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK), unlock = 0;
    unsigned number;
    if (master < 0)
        return errno;
    source_open(&c->out[0].source, master, stdout_ready);
    char path[] = "/dev/pts/0000000000", digits[11];
    if (ioctl(master, TIOCSPTLCK, &unlock) < 0 || ioctl(master, TIOCGPTN, &number) < 0)
        return errno;
    int count = 0;
    do
        digits[count++] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    char *p = path + sizeof "/dev/pts/" - 1;
    while (count > 0)
        *p++ = digits[--count];
    *p = 0;
    for (int i = 0; i < 3; i++)
        if ((stdio[i] = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0)
            return errno;
    struct winsize size = {.ws_row = rows, .ws_col = columns};
    ioctl(master, TIOCSWINSZ, &size);
    if (k->launch->uid != OWN_ID && fchown(stdio[0], k->launch->uid, (gid_t)-1) < 0)
        return errno;
    int writer = fcntl(master, F_DUPFD_CLOEXEC, 4);
    if (writer < 0)
        return errno;
    source_open(&c->in.source, writer, input_ready);
    c->in.terminal = k->terminal = true;
    c->out[1].ended = true;
    return 0;
}

static int open_pipes(struct command *k, int stdio[3])
{
    struct channel *c = &k->channel;
    int ends[2];
    if (k->launch->flags & EXEC_NO_STDIN) {
        if ((stdio[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0)
            return errno;
        c->in.gone = true;
    } else {
        if (pipe2(ends, O_CLOEXEC) < 0)
            return errno;
        stdio[0] = ends[0];
        source_open(&c->in.source, ends[1], input_ready);
        fcntl(ends[1], F_SETFL, O_NONBLOCK);
    }
    for (int i = 0; i < 2; i++) {
        if (pipe2(ends, O_CLOEXEC) < 0)
            return errno;
        stdio[i + 1] = ends[1];
        source_open(&c->out[i].source, ends[0], i ? stderr_ready : stdout_ready);
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        fcntl(ends[0], F_SETPIPE_SZ, 262144); /* fewer wake-ups; a refusal costs only speed */
    }
    return 0;
}

static int allocate_rings(struct command *k, uint32_t window)
{
    struct channel *c = &k->channel;
    window = window < MIN_WINDOW ? MIN_WINDOW : window > MAX_WINDOW ? MAX_WINDOW : (window + 4095) & ~4095u;
    bool fine = ring_allocate(&c->out[0].ring, window) && ring_allocate(&c->out[1].ring, window);
    if (fine && !(k->launch->flags & EXEC_NO_STDIN))
        fine = ring_allocate(&c->in.ring, INPUT_WINDOW);
    return fine ? 0 : ENOMEM;
}

static int launch(struct command *k, const uint8_t *payload)
{
    struct launch *l = k->launch;
    struct channel *c = &k->channel;
    int stdio[3] = {-1, -1, -1}, ends[2] = {-1, -1};
    int error = allocate_rings(k, get32(payload + 24));
    if (!error)
        error = l->flags & EXEC_PTY ? open_terminal(k, get16(payload + 32), get16(payload + 34), stdio)
                                    : open_pipes(k, stdio);
    if (!error && pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
        error = errno;
    if (!error) {
        l->files = (struct rlimit_request){RLIMIT_NOFILE, initial_files[0], initial_files[1]};
        memcpy(l->stdio, stdio, sizeof stdio);
        l->report = ends[1];
        long pid = supervisor_start(l);
        if (pid < 0)
            error = (int)-pid;
        else
            k->supervisor = (pid_t)pid;
    }
    for (int i = 0; i < 3; i++)
        if (stdio[i] >= 0)
            close(stdio[i]);
    if (ends[1] >= 0)
        close(ends[1]);
    if (error) {
        if (ends[0] >= 0)
            close(ends[0]);
        return error;
    }
    source_open(&k->report, ends[0], read_report);
    source_watch(&k->report, EPOLLIN);
    for (int i = 0; i < 2; i++)
        source_watch(&c->out[i].source, EPOLLIN);
    return 0;
}

void command_exec(uint64_t id, const uint8_t *payload, uint32_t length)
{
    struct command *k = calloc(1, sizeof *k);
    if (!k)
        return channel_refuse(id, NO_MEMORY, ENOMEM);
    channel_init(&k->channel, &command_kind, id);
    command_count++;
    k->channel.streams = 2;
    k->channel.has_input = true;
    k->report.fd = -1;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    k->started_unix_ms = (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
    if (command_count > MAX_COMMANDS)
        return refuse(k, STAGE_RESOURCES, EAGAIN);
    int error = build_launch(k, payload, length);
    if (error)
        return refuse(k, STAGE_REQUEST, error);
    /* No user namespace maps ids this high, and signed ones elsewhere would misread them. */
    const struct launch *l = k->launch;
    if ((l->uid != OWN_ID && l->uid > INT32_MAX) || (l->gid != OWN_ID && l->gid > INT32_MAX))
        return refuse(k, STAGE_USER, EINVAL);
    error = launch(k, payload);
    if (error)
        return refuse(k, STAGE_RESOURCES, error);
    k->detach_wanted = l->flags & EXEC_DETACHED;
}

/* From an EXEC frame to a supervisor: the request is checked and laid out, pipes or a terminal are made. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "command.h"

enum { STACK_SIZE = 16384, MAX_GROUPS = 64, MAX_RLIMITS = 16 };

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
int command_build(struct command *k, const uint8_t *payload, uint32_t length, const char *preload)
{
    uint32_t groups = get16(payload + 36), rlimits = get16(payload + 38);
    uint32_t argc = get32(payload + 40), envc = get32(payload + 44);
    /* Each string takes four bytes at least, so the counts are bounded before they are used. */
    if (groups > MAX_GROUPS || rlimits > MAX_RLIMITS || argc < 1 || argc > length / 4 || envc > length / 4)
        return EINVAL;
    size_t size = 2 * STACK_SIZE + sizeof(struct launch) + groups * 4 + rlimits * sizeof(struct rlimit_request) +
                  ((size_t)argc + envc + 3) * sizeof(char *) + length + (preload ? strlen(preload) + 1 : 0) + 5 * 16;
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
    l->control = -1;
    k->drain_ms = get32(payload + 20);
    k->window = get32(payload + 24);
    k->rows = get16(payload + 32);
    k->columns = get16(payload + 34);
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
    char *strings = (char *)(l->envp + envc + 2);

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
    if (preload) {
        memcpy(strings, preload, strlen(preload) + 1);
        l->envp[envc] = strings; /* the last one: its library counts on it */
    }
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

static int open_terminal(struct command *k, int stdio[3])
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
    struct winsize size = {.ws_row = k->rows, .ws_col = k->columns};
    ioctl(master, TIOCSWINSZ, &size);
    if (k->launch->uid != OWN_ID && fchown(stdio[0], k->launch->uid, (gid_t)-1) < 0)
        return errno;
    c->in.terminal = k->terminal = true;
    c->out[1].ended = true;
    if (k->launch->flags & EXEC_NO_STDIN) {
        c->in.gone = true; /* a terminal without input */
        return 0;
    }
    int writer = fcntl(master, F_DUPFD_CLOEXEC, 4);
    if (writer < 0)
        return errno;
    source_open(&c->in.source, writer, input_ready);
    return 0;
}

int command_pipes(struct command *k, int stdio[3])
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

static int allocate_rings(struct command *k)
{
    struct channel *c = &k->channel;
    uint32_t window = k->window;
    window = window < MIN_WINDOW ? MIN_WINDOW : window > MAX_WINDOW ? MAX_WINDOW : (window + 4095) & ~4095u;
    bool fine = ring_allocate(&c->out[0].ring, window) && ring_allocate(&c->out[1].ring, window);
    if (fine && !(k->launch->flags & EXEC_NO_STDIN))
        fine = ring_allocate(&c->in.ring, INPUT_WINDOW);
    return fine ? 0 : ENOMEM;
}

int command_open(struct command *k, int *report)
{
    struct launch *l = k->launch;
    int stdio[3] = {-1, -1, -1}, ends[2] = {-1, -1};
    int error = l->flags & EXEC_PTY ? open_terminal(k, stdio) : command_pipes(k, stdio);
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
    if (error && ends[0] >= 0)
        close(ends[0]);
    *report = ends[0];
    return error;
}

void command_launch(struct command *k)
{
    int report, error = command_open(k, &report);
    if (error)
        return command_refuse(k, STAGE_RESOURCES, error);
    command_watch(k, report);
    input_release(&k->channel.in);
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
        return command_refuse(k, STAGE_RESOURCES, EAGAIN);
    int error = command_build(k, payload, length, NULL);
    if (error)
        return command_refuse(k, STAGE_REQUEST, error);
    error = (int)-renounce_mounting();
    if (error)
        return command_refuse(k, STAGE_RESOURCES, error);
    /* No user namespace maps ids this high, and signed ones elsewhere would misread them. */
    const struct launch *l = k->launch;
    if ((l->uid != OWN_ID && l->uid > INT32_MAX) || (l->gid != OWN_ID && l->gid > INT32_MAX))
        return command_refuse(k, STAGE_USER, EINVAL);
    error = allocate_rings(k);
    if (error)
        return command_refuse(k, STAGE_RESOURCES, error);
    k->detach_wanted = l->flags & EXEC_DETACHED;
    k->channel.in.held = true;
    if (!(l->flags & EXEC_PARKED) || !parked_offer(k))
        command_launch(k);
}

/* Finding and signalling everything below a process. Runs in supervisors, so without libc (see raw.h). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include "agent.h"
#include "raw.h"

enum { MAX_TREE = 65536, MAX_ROUNDS = 64 };

RAW static bool parse_number(const char **text, int *number)
{
    const char *p = *text;
    *number = 0;
    while (*p >= '0' && *p <= '9' && *number < 100000000)
        *number = *number * 10 + (*p++ - '0');
    bool some = p != *text;
    *text = p;
    return some;
}

/* Calls visit for each entry of a directory whose name is a number. */
RAW void each_number(const char *directory, void (*visit)(int, void *), void *context)
{
    long fd = raw(SYS_openat, AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0)
        return;
    _Alignas(8) char buffer[2048];
    long length;
    while ((length = raw(SYS_getdents64, fd, buffer, sizeof buffer)) > 0)
        for (long at = 0; at < length; at += *(uint16_t *)(void *)(buffer + at + 16)) {
            const char *name = buffer + at + 19;
            int number;
            if (parse_number(&name, &number) && !*name && number != fd)
                visit(number, context);
        }
    raw(SYS_close, fd);
}

RAW static void append_number(char **to, int number)
{
    char digits[12];
    int count = 0;
    do
        digits[count++] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    while (count > 0)
        *(*to)++ = digits[--count];
}

/* The parent's pid, 0 if it cannot be told; runs: neither stopped nor dead. */
RAW static int parent_of(int pid, bool *runs)
{
    *runs = false;
    char path[32] = "/proc/", *p = path + 6;
    append_number(&p, pid);
    for (const char *rest = "/stat"; (*p = *rest); rest++)
        p++;
    long fd = raw(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    char stat[512];
    long length = raw(SYS_read, fd, stat, sizeof stat - 1);
    raw(SYS_close, fd);
    if (length <= 0)
        return 0;
    stat[length] = 0;
    /* pid (name) state parent; the name may contain anything, so its end is the last parenthesis. */
    while (length > 0 && stat[length] != ')')
        length--;
    const char *text = stat + length + 4;
    char state = length > 0 ? stat[length + 2] : 'Z';
    *runs = state != 'T' && state != 't' && state != 'Z' && state != 'X';
    int parent;
    return length > 0 && parse_number(&text, &parent) ? parent : 0;
}

struct tree {
    int count;
    struct { int pid, parent; bool ours, runs; } process[MAX_TREE];
};

RAW static void note_process(int pid, void *context)
{
    struct tree *t = context;
    if (t->count < MAX_TREE) {
        t->process[t->count].pid = pid;
        t->process[t->count].parent = parent_of(pid, &t->process[t->count].runs);
        t->process[t->count++].ours = false;
    }
}

/* Lists every process and marks the descendants of this one. NULL when there is no memory. */
RAW static struct tree *find_tree(void)
{
    long memory = raw(SYS_mmap, 0, sizeof(struct tree), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory < 0 && memory > -4096)
        return 0;
    struct tree *t = (void *)memory;
    int self = (int)raw(SYS_getpid, 0);
    each_number("/proc", note_process, t);
    for (bool more = true; more;) {
        more = false;
        for (int i = 0; i < t->count; i++) {
            if (t->process[i].ours)
                continue;
            bool ours = t->process[i].parent == self;
            /* Parents are mostly listed before their children: look backwards first. */
            for (int j = i - 1; j >= 0 && !ours; j--)
                ours = t->process[j].ours && t->process[j].pid == t->process[i].parent;
            for (int j = i + 1; j < t->count && !ours; j++)
                ours = t->process[j].ours && t->process[j].pid == t->process[i].parent;
            if (ours)
                t->process[i].ours = more = true;
        }
    }
    return t;
}

RAW void signal_tree(int number, int then)
{
    struct tree *t = find_tree();
    for (int i = 0; t && i < t->count; i++)
        if (t->process[i].ours) {
            raw(SYS_kill, t->process[i].pid, number);
            if (then)
                raw(SYS_kill, t->process[i].pid, then);
        }
    if (t)
        raw(SYS_munmap, t, sizeof *t);
}

/* Stops everything below, round by round until a round finds no process that still runs: what is stopped does not fork, so that a
 * fork bomb, whose members outnumber us, cannot refill the places of those that are killed afterwards. */
RAW static void freeze_tree(void)
{
    for (int round = 0, running = 1; running && round < MAX_ROUNDS; round++) {
        struct tree *t = find_tree();
        running = 0;
        for (int i = 0; t && i < t->count; i++)
            if (t->process[i].ours && t->process[i].runs) {
                running++;
                raw(SYS_kill, t->process[i].pid, SIGSTOP);
            }
        if (t)
            raw(SYS_munmap, t, sizeof *t);
    }
}

RAW void kill_tree(void)
{
    freeze_tree();
    signal_tree(SIGKILL, 0);
}

/* Kills the direct children. Theirs become ours as they die, so repeating this until there are none empties the tree; it
 * is quick enough to catch a process that forks and exits all the time. */
RAW void kill_children(void)
{
    long fd = raw(SYS_openat, AT_FDCWD, "/proc/thread-self/children", O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0)
        return signal_tree(SIGKILL, 0);
    char buffer[1024];
    long kept = 0, length;
    while ((length = raw(SYS_read, fd, buffer + kept, (long)sizeof buffer - 1 - kept)) > 0) {
        length += kept;
        buffer[length] = 0;
        const char *text = buffer;
        kept = 0;
        while (*text) {
            const char *start = text;
            int pid;
            bool number = parse_number(&text, &pid);
            if (number && !*text) { /* cut off by the end of the buffer */
                while (*start)
                    buffer[kept++] = *start++;
                break;
            }
            if (number)
                raw(SYS_kill, pid, SIGKILL);
            else
                text++;
        }
    }
    if (kept) {
        const char *text = buffer;
        int pid;
        buffer[kept] = 0;
        if (parse_number(&text, &pid))
            raw(SYS_kill, pid, SIGKILL);
    }
    raw(SYS_close, fd);
}

struct strangers { int self, one, other; bool found; };

RAW static void note_stranger(int pid, void *context)
{
    struct strangers *s = context;
    bool runs;
    if (pid != s->one && pid != s->other && !s->found)
        s->found = parent_of(pid, &runs) == s->self;
}

/* Whether this process has children besides those two. */
RAW bool has_other_children(int one, int other)
{
    struct strangers s = {(int)raw(SYS_getpid, 0), one, other, false};
    each_number("/proc", note_stranger, &s);
    return s.found;
}

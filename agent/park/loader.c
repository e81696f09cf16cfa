/* What all interpreters share: getting in, the conversation with the agent, what start-up depended on, and making the
 * process look as if it had been started with the program it was given. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/stat.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/vfs.h>
#include <time.h>

#include "../raw.h"
#include "loader.h"

enum { MAX_WATCHED = 512, MAX_TEXT = 8192, TICK_NS = 20000000 };

struct stamp { uint64_t device, inode, size; int64_t modified, changed; uint32_t mode; int32_t error; };
static struct watched { char *path; bool itself; struct stamp stamp; } watched[MAX_WATCHED];
static int watched_count;
static bool watched_too_many;
static int64_t began; /* when start-up began: what changed since then cannot be told from what was read */

char *placeholder;
static char **arguments, **environment;
static int argument_count;
extern char **environ;

/* Nothing in here may be found by the program that runs later under a name of its own. */
#define EXPORT __attribute__((visibility("default")))

void *find_symbol(const char *name) { return dlsym(RTLD_DEFAULT, name); }

_Noreturn void give_up(void)
{
    raw(SYS_exit_group, 125);
    for (;;)
        ;
}

static int64_t wall_clock(void)
{
    struct timespec t;
    raw(SYS_clock_gettime, CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* What start-up depended on --------------------------------------------------------------------------------------- */

static size_t read_file(const char *path, char **content);

static struct stamp look(const char *path, bool itself)
{
    struct statx s;
    struct stamp stamp;
    memset(&stamp, 0, sizeof stamp);
    stamp.error = (int32_t)raw(SYS_statx, AT_FDCWD, path, itself ? AT_SYMLINK_NOFOLLOW : 0, STATX_BASIC_STATS, &s);
    if (stamp.error < 0)
        return stamp;
    stamp.device = (uint64_t)s.stx_dev_major << 32 | s.stx_dev_minor;
    stamp.inode = s.stx_ino;
    stamp.size = s.stx_size;
    stamp.mode = s.stx_mode;
    stamp.modified = s.stx_mtime.tv_sec * 1000000000ll + s.stx_mtime.tv_nsec;
    stamp.changed = s.stx_ctime.tv_sec * 1000000000ll + s.stx_ctime.tv_nsec;
    return stamp;
}

static void watch(const char *path, bool itself)
{
    for (int i = 0; i < watched_count; i++)
        if (watched[i].itself == itself && strcmp(watched[i].path, path) == 0)
            return;
    if (watched_count == MAX_WATCHED) {
        watched_too_many = true;
        return;
    }
    size_t size = strlen(path) + 1;
    char *copy = malloc(size);
    if (!copy)
        give_up();
    memcpy(copy, path, size);
    watched[watched_count++] = (struct watched){copy, itself, look(copy, itself)};
}

void watch_path(const char *path)
{
    watch(path, false);
    /* A link that leads elsewhere now may lead to something of the same age. */
    struct stamp stamp = look(path, true);
    if (stamp.error == 0 && (stamp.mode & 0170000) == 0120000)
        watch(path, true);
}

void watch_lookup(const char *name)
{
    const char *path = getenv("PATH");
    char file[MAX_TEXT];
    if (strchr(name, '/'))
        return watch_path(name);
    while (path && *path) {
        size_t length = strcspn(path, ":");
        if (length && length + strlen(name) + 2 <= sizeof file) {
            memcpy(file, path, length);
            file[length] = '/';
            memcpy(file + length + 1, name, strlen(name) + 1);
            watch_path(file);
            struct stamp found = look(file, false);
            if (found.error == 0 && (found.mode & 0170111) > 0100000)
                return;
        }
        path += length + (path[length] == ':');
    }
}

void watch_loaded(const char *path)
{
    struct statfs s;
    memset(&s, 0, sizeof s);
    /* The machine's own tools are the same for all that starts in here. A look at each would take 30 us in gVisor. */
    if (strncmp(path, "/usr/", 5) == 0 && raw(SYS_statfs, path, &s) == 0 && (s.f_flags & 1 /* read-only */))
        return;
    watch_path(path);
}

/* The program's file and the libraries that are mapped by now. Not those that a program loads later. */
static void watch_mappings(void)
{
    char *maps;
    read_file("/proc/self/maps", &maps);
    for (char *line = maps, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        char *name = strchr(line, '/');
        if (name)
            watch_loaded(name);
    }
    free(maps);
}

/* A change in the clock tick in which something was read leaves no trace, so what is that young is not relied on. Who
 * parks lets a moment pass after the last command. */
static bool settled(void)
{
    for (int i = 0; i < watched_count; i++)
        if (watched[i].stamp.error == 0 &&
            (watched[i].stamp.changed > began - TICK_NS || watched[i].stamp.modified > began - TICK_NS))
            return false;
    return !watched_too_many;
}

static bool unchanged(void)
{
    for (int i = 0; i < watched_count; i++) {
        struct stamp now = look(watched[i].path, watched[i].itself);
        if (memcmp(&now, &watched[i].stamp, sizeof now) != 0)
            return false;
    }
    return true;
}

/* Memory ---------------------------------------------------------------------------------------------------------- */

static size_t read_file(const char *path, char **content)
{
    size_t room = 65536, length = 0;
    char *text = malloc(room);
    long fd = raw(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (!text || fd < 0)
        give_up();
    for (;;) {
        if (room - length < 8192) {
            text = realloc(text, room *= 2);
            if (!text)
                give_up();
        }
        long count = raw(SYS_read, fd, text + length, room - length - 1);
        if (count <= 0)
            break;
        length += (size_t)count;
    }
    raw(SYS_close, fd);
    text[length] = 0;
    *content = text;
    return length;
}

static uintptr_t take_hexadecimal(const char **p)
{
    uintptr_t value = 0;
    for (;; (*p)++) {
        char c = **p;
        if (c >= '0' && c <= '9')
            value = value << 4 | (uintptr_t)(c - '0');
        else if (c >= 'a' && c <= 'f')
            value = value << 4 | (uintptr_t)(c - 'a' + 10);
        else
            return value;
    }
}

int list_regions(struct region *regions, int room, bool all)
{
    char *maps;
    int count = 0;
    bool own = false; /* the program's own data, and what has no name behind it: its zeroed part */
    read_file("/proc/self/maps", &maps);
    char program[MAX_TEXT];
    long length = raw(SYS_readlinkat, AT_FDCWD, "/proc/self/exe", program, sizeof program - 1);
    if (length < 0)
        give_up();
    program[length] = 0;
    for (const char *line = maps; *line;) {
        const char *end = strchr(line, '\n');
        if (!end)
            break;
        uintptr_t start = take_hexadecimal(&line);
        line++;
        uintptr_t stop = take_hexadecimal(&line);
        bool writable = line[1] == 'r' && line[2] == 'w' && line[4] == 'p';
        const char *name = memchr(line, '/', (size_t)(end - line));
        const char *special = memchr(line, '[', (size_t)(end - line));
        bool ours = name && (size_t)(end - name) == (size_t)length && memcmp(name, program, (size_t)length) == 0;
        bool heap = special && memcmp(special, "[heap]", 6) == 0;
        own = ours || (own && !name && !special);
        if (writable && (own || heap || (all && !special)) && count < room)
            regions[count++] = (struct region){start, stop, !name};
        line = end + 1;
    }
    free(maps);
    return count;
}

bool has_shared_memory(void)
{
    char *maps;
    bool found = false;
    read_file("/proc/self/maps", &maps);
    for (const char *line = maps, *end; !found && (end = strchr(line, '\n')); line = end + 1) {
        const char *rights = memchr(line, ' ', (size_t)(end - line));
        found = rights && rights[2] == 'w' && rights[4] == 's';
    }
    free(maps);
    return found;
}

bool in_regions(const struct region *regions, int count, uintptr_t address, size_t length)
{
    for (int i = 0; i < count; i++)
        if (address >= regions[i].start && address < regions[i].end && length <= regions[i].end - address)
            return true;
    return false;
}

/* How the process looks from outside ------------------------------------------------------------------------------ */

static struct prctl_map {
    uint64_t start_code, end_code, start_data, end_data, start_brk, brk, start_stack;
    uint64_t arg_start, arg_end, env_start, env_end;
    uint64_t *auxv;
    uint32_t auxv_size, exe_fd;
} layout;

static uint64_t take_decimal(const char *p)
{
    uint64_t value = 0;
    while (*p >= '0' && *p <= '9')
        value = value * 10 + (uint64_t)(*p++ - '0');
    return value;
}

static void read_layout(void)
{
    char *stat;
    uint64_t fields[64] = {0};
    read_file("/proc/self/stat", &stat);
    char *p = strrchr(stat, ')');
    for (int number = 3; p && (p = strchr(p, ' ')) && number < 64; number++)
        fields[number] = take_decimal(++p);
    free(stat);
    layout = (struct prctl_map){fields[26], fields[27], fields[45], fields[46], fields[47], 0, fields[28],
                                fields[48], fields[49], fields[50], fields[51], NULL, 0, (uint32_t)-1};
}

/* /proc/self/cmdline. Where the kernel does not let us say where the arguments are, they are written over, as far as
 * they fit. */
static void show_arguments(const struct task *task)
{
    size_t total = task->code_length + 1;
    for (int i = 0; i + 1 < argument_count; i++)
        total += strlen(arguments[i]) + 1;
    char *text = malloc(total), *p = text;
    if (text) {
        for (int i = 0; i + 1 < argument_count; i++) {
            size_t size = strlen(arguments[i]) + 1;
            memcpy(p, arguments[i], size);
            p += size;
        }
        memcpy(p, task->code, task->code_length + 1);
        layout.arg_start = (uint64_t)(uintptr_t)text;
        layout.arg_end = layout.arg_start + total;
        layout.brk = (uint64_t)raw(SYS_brk, 0);
        if (layout.start_code && raw(SYS_prctl, PR_SET_MM, PR_SET_MM_MAP, &layout, sizeof layout, 0) == 0)
            return;
        free(text);
    }
    size_t room = strlen(placeholder), count = task->code_length < room ? task->code_length : room;
    memset(placeholder, 0, room);
    memcpy(placeholder, task->code, count);
}

/* The variable that brought us here is the last one: the run's environment has none of it. */
static void hide_preload(void)
{
    char **last = environment;
    while (*last && last[1])
        last++;
    if (!*last || strncmp(*last, "LD_PRELOAD=", 11) != 0)
        give_up();
    layout.env_end = (uint64_t)(uintptr_t)*last;
    memset(*last, 0, strlen(*last));
    *last = NULL;
    environ = environment;
}

/* The conversation ------------------------------------------------------------------------------------------------ */

void say(const void *bytes, size_t count)
{
    if (raw(SYS_write, CONTROL_FD, bytes, count) != (long)count)
        give_up();
}

static void say_one(char what) { say(&what, 1); }

static void hear(void *to, size_t length)
{
    char *p = to;
    while (length) {
        long count = raw(SYS_read, CONTROL_FD, p, length);
        if (count == -4) /* EINTR */
            continue;
        if (count <= 0)
            give_up(); /* the agent let us go */
        p += count;
        length -= (size_t)count;
    }
}

static char *hear_text(uint32_t length)
{
    char *text = malloc((size_t)length + 1);
    if (!text)
        give_up();
    hear(text, length);
    text[length] = 0;
    return text;
}

static _Noreturn void decline(char why)
{
    say_one(why);
    give_up();
}

static bool is_settled, is_child;

/* Notes what start-up has depended on; from here on others with our uid cannot look in or reach through /proc. Returns
 * whether they have left us alone. */
static bool settle(void)
{
    watch_lookup(arguments[0]);
    watch_mappings();
    if (!settled())
        give_up();
    uint64_t end_of_variables = layout.env_end;
    read_layout();
    layout.env_end = end_of_variables;
    raw(SYS_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
    bool unaltered = is_unaltered();
    note_attributes();
    is_settled = true;
    return unaltered;
}

void become_template(const struct fork_steps *steps)
{
    if (settle() && can_fork()) {
        fork_children(steps);
        is_child = true;
    }
}

void wait_for_task(struct task *task)
{
    if (!is_settled)
        settle();
    say_ready(is_child);
    struct handover order;
    hear(&order, sizeof order);
    *task = (struct task){.no_stdin = order.no_stdin, .code_length = order.code_length};
    task->cwd = hear_text(order.cwd_length);
    task->code = hear_text(order.code_length);
    if (!unchanged() || !is_unaltered())
        decline(OUTDATED);
    if (raw(SYS_chdir, task->cwd) < 0)
        decline(DECLINED);
    if (order.no_stdin) {
        long null = raw(SYS_openat, AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC, 0);
        if (null < 0 || raw(SYS_dup3, null, 0, 0) < 0)
            decline(DECLINED);
        raw(SYS_close, null);
    }
    raw(SYS_prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
}

void take_task(const struct task *task)
{
    show_arguments(task);
    say_one(TAKEN);
    raw(SYS_close, CONTROL_FD);
    free(task->cwd);
    free(task->code);
}

/* Getting in ------------------------------------------------------------------------------------------------------ */

static bool is_python, is_shell;
static main_function *shell_main;

static bool prepare_shell(const char *name)
{
    const char *slash = strrchr(name, '/');
    return strcmp(slash ? slash + 1 : name, "bash") == 0;
}

/* Nothing of its own start-up has run yet: all of it will see the right arguments. */
static int held_main(int argc, char **argv, char **envp)
{
    static const struct fork_steps steps;
    struct task task;
    become_template(&steps);
    wait_for_task(&task);
    char *code = malloc(task.code_length + 1);
    if (!code)
        give_up();
    memcpy(code, task.code, task.code_length + 1);
    argv[argc - 1] = code;
    take_task(&task);
    return shell_main(argc, argv, envp);
}

/* Before any of the program's own code. */
__attribute__((constructor)) static void enter(int argc, char **argv, char **envp)
{
    arguments = argv;
    argument_count = argc;
    environment = envp;
    if (argc < 3 || argc > 4 || raw(SYS_fcntl, CONTROL_FD, F_GETFD) < 0)
        give_up();
    raw(SYS_fcntl, CONTROL_FD, F_SETFD, FD_CLOEXEC);
    placeholder = argv[argc - 1];
    hide_preload();
    note_attributes();
    began = wall_clock();
    is_python = prepare_python();
    is_shell = !is_python && prepare_shell(argv[0]);
    if ((is_python || !is_shell) && argc != 3)
        give_up();
    if (!is_python && !is_shell && !prepare_node())
        give_up();
}

/* libc calls main through this; a Python or a shell that waits has a main of its own. */
typedef int start_function(main_function *, int, char **, main_function *, void (*)(void), void (*)(void), void *);

EXPORT int __libc_start_main(main_function *program, int argc, char **argv, main_function *init, void (*fini)(void),
                             void (*rtld_fini)(void), void *stack_end);
EXPORT int __libc_start_main(main_function *program, int argc, char **argv, main_function *init, void (*fini)(void),
                             void (*rtld_fini)(void), void *stack_end)
{
    start_function *start;
    void *symbol = dlsym(RTLD_NEXT, "__libc_start_main");
    memcpy(&start, &symbol, sizeof start);
    if (!start)
        give_up();
    shell_main = program;
    return start(is_python ? python_main : is_shell ? held_main : program, argc, argv, init, fini, rtld_fini, stack_end);
}

/* Makes system calls where another process stands: in its namespaces and its root, with its ids, limits, capabilities,
 * filters and open descriptors. Each attempt is made by a child of its own, because a filter may end it.
 *
 *   probe PID SCRIPT    PID 0: where it was started
 *
 * A line of the script is an attempt: calls with ";" after each, a call is its number and up to six arguments, an
 * argument a number, "s:" and a string (percent-encoded), "z" for a buffer of zeros, "r" and the number of an earlier
 * call of the same attempt, for its result. Prints a line for each: the results, and "killed N" if it was. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OUT = 1000, PIDFD, ROOT, MAX_FILTERS = 8, MAX_CALLS = 16 };

static struct sock_fprog filters[MAX_FILTERS];
static int filter_count;
static char zeros[MAX_CALLS][4096];
static int zeros_used;
static uint64_t effective, permitted, inheritable, bounding;
static unsigned user, group; /* in its user namespace */
static struct rlimit limits[RLIM_NLIMITS];

static void check(int good, const char *what) {
    if (!good) {
        dprintf(2, "probe: %s: %s\n", what, strerror(errno));
        exit(70);
    }
}

static void move(int from, int to) {
    check(dup3(from, to, O_CLOEXEC) == to, "dup");
    close(from);
}

static void read_filters(pid_t pid) {
    check(ptrace(PTRACE_SEIZE, pid, 0, 0) == 0, "seize");
    check(ptrace(PTRACE_INTERRUPT, pid, 0, 0) == 0, "interrupt");
    check(waitpid(pid, NULL, __WALL) == pid, "wait");
    for (; filter_count < MAX_FILTERS; filter_count++) {
        struct sock_filter *lines = calloc(4096, sizeof *lines);
        long length = ptrace(PTRACE_SECCOMP_GET_FILTER, pid, (void *)(long)filter_count, lines);
        if (length < 0) {
            check(errno == ENOENT, "filter");
            break;
        }
        filters[filter_count] = (struct sock_fprog){(unsigned short)length, lines};
    }
    check(ptrace(PTRACE_DETACH, pid, 0, 0) == 0, "detach");
}

static void read_capabilities(pid_t pid) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *status = fopen(path, "re");
    check(status != NULL, path);
    while (fgets(line, sizeof line, status)) {
        sscanf(line, "CapInh: %lx", &inheritable);
        sscanf(line, "CapPrm: %lx", &permitted);
        sscanf(line, "CapEff: %lx", &effective);
        sscanf(line, "CapBnd: %lx", &bounding);
    }
    fclose(status);
}

/* An id of the machine, as it is called in the namespace of the process. */
static unsigned map_id(pid_t pid, const char *map, unsigned id) {
    char path[64];
    unsigned inside, outside, count;
    snprintf(path, sizeof path, "/proc/%d/%s", pid, map);
    FILE *file = fopen(path, "re");
    check(file && fscanf(file, "%u %u %u", &inside, &outside, &count) == 3 && id - outside < count, path);
    fclose(file);
    return id - outside + inside;
}

static void read_ids(pid_t pid) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *status = fopen(path, "re");
    check(status != NULL, path);
    while (fgets(line, sizeof line, status)) {
        sscanf(line, "Uid: %u", &user);
        sscanf(line, "Gid: %u", &group);
    }
    fclose(status);
    user = map_id(pid, "uid_map", user);
    group = map_id(pid, "gid_map", group);
    for (int i = 0; i < RLIM_NLIMITS; i++)
        check(prlimit(pid, i, NULL, &limits[i]) == 0, "limits");
}

static void take_descriptors(pid_t pid) {
    char path[64];
    int numbers[512], count = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *folder = opendir(path);
    check(folder != NULL, path);
    for (struct dirent *entry; (entry = readdir(folder));)
        if (entry->d_name[0] != '.' && count < 512)
            numbers[count++] = atoi(entry->d_name);
    closedir(folder);
    for (int i = 0; i < count; i++) {
        int copy = (int)syscall(SYS_pidfd_getfd, PIDFD, numbers[i], 0);
        if (copy >= 0 && copy != numbers[i]) {
            check(dup2(copy, numbers[i]) == numbers[i], "take");
            close(copy);
        }
    }
}

static void enter(pid_t pid) {
    char path[64];
    read_filters(pid);
    read_capabilities(pid);
    read_ids(pid);
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    check(pidfd >= 0, "pidfd");
    move(pidfd, PIDFD);
    snprintf(path, sizeof path, "/proc/%d/root", pid);
    int root = open(path, O_PATH | O_DIRECTORY);
    check(root >= 0, path);
    move(root, ROOT);
    take_descriptors(pid);
    int all = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID;
    check(setns(PIDFD, all) == 0, "setns");
    check(fchdir(ROOT) == 0 && chroot(".") == 0, "chroot");
    umask(0);
    close(PIDFD);
    close(ROOT);
}

static void become(void) {
    if (filter_count == 0)
        return;
    for (int bit = 0; bit < 64; bit++)
        if (!(bounding >> bit & 1))
            prctl(PR_CAPBSET_DROP, bit, 0, 0, 0);
    for (int i = 0; i < RLIM_NLIMITS; i++)
        setrlimit(i, &limits[i]); /* one that is higher than ours stays as it is */
    if (user || group) {
        check(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0 && setgroups(0, NULL) == 0, "groups");
        check(setresgid(group, group, group) == 0 && setresuid(user, user, user) == 0, "ids");
    }
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    for (int half = 0; half < 2; half++)
        data[half] = (struct __user_cap_data_struct){
            (uint32_t)(effective >> 32 * half), (uint32_t)(permitted >> 32 * half), (uint32_t)(inheritable >> 32 * half)};
    check(syscall(SYS_capset, &header, data) == 0, "capset");
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
    for (int i = 0; i < filter_count; i++)
        check(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filters[i], 0, 0) == 0, "seccomp");
}

static long raw(const long *a) {
    long result;
    register long r10 __asm__("r10") = a[4], r8 __asm__("r8") = a[5], r9 __asm__("r9") = a[6];
    __asm__ volatile("syscall" : "=a"(result) : "a"(a[0]), "D"(a[1]), "S"(a[2]), "d"(a[3]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

static long argument(char *word, const long *results) {
    if (word[0] == 'r')
        return results[atoi(word + 1)];
    if (word[0] == 'z')
        return (long)zeros[zeros_used++ % MAX_CALLS];
    if (word[0] != 's')
        return strtol(word, NULL, 0);
    char *from = word + 2, *to = from;
    for (; *from; to++)
        if (*from == '%') {
            unsigned value;
            sscanf(from + 1, "%2x", &value);
            *to = (char)value;
            from += 3;
        } else
            *to = *from++;
    *to = 0;
    return (long)(word + 2);
}

static void say(long value) {
    char text[32], *at = text + sizeof text;
    unsigned long left = value < 0 ? 0UL - (unsigned long)value : (unsigned long)value;
    *--at = ' ';
    do
        *--at = (char)('0' + left % 10);
    while (left /= 10);
    if (value < 0)
        *--at = '-';
    long words[7] = {SYS_write, OUT, (long)at, text + sizeof text - at};
    raw(words);
}

/* Everything that needs the C library is done before the filters are on: they know nothing of what it may ask for. */
static void attempt(char *line) {
    static char *words[MAX_CALLS][8];
    static long results[MAX_CALLS];
    int calls = 0;
    for (char *rest = line, *one; calls < MAX_CALLS && (one = strsep(&rest, ";")) && *one; calls++)
        for (int i = 0; i < 8 && (words[calls][i] = strsep(&one, " ")); i++)
            ;
    become();
    for (int call = 0; call < calls; call++) {
        long numbers[7] = {0};
        for (int i = 0; i < 7 && words[call][i]; i++)
            numbers[i] = argument(words[call][i], results);
        results[call] = raw(numbers);
        say(results[call]);
    }
    long end[7] = {SYS_exit_group, 0};
    raw(end);
}

int main(int count, char **words) {
    static char script[1 << 20];
    check(count == 3, "usage: probe PID SCRIPT");
    int file = open(words[2], O_RDONLY | O_CLOEXEC);
    check(file >= 0 && read(file, script, sizeof script - 1) >= 0, words[2]);
    close(file);
    move(dup(1), OUT);
    if (atoi(words[1]))
        enter(atoi(words[1]));
    for (char *rest = script, *line; (line = strsep(&rest, "\n")) && *line;) {
        int status;
        pid_t child = fork();
        check(child >= 0, "fork");
        if (child == 0)
            attempt(line);
        check(waitpid(child, &status, 0) == child, "wait");
        if (WIFSIGNALED(status))
            dprintf(OUT, "killed %d", WTERMSIG(status));
        dprintf(OUT, "\n");
    }
    return 0;
}

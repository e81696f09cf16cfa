/* A template: an interpreter that has started up, and makes a copy of itself for each program. A fork takes a fraction of
 * what a start takes, and the copies share their memory until they write to it.
 *
 * The copy's parent is the supervisor (CLONE_PARENT), as if that had started it. It is made by the bare system call, so
 * what libc's fork keeps in order is kept in order here: the thread's id, and its list of robust locks. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "../raw.h"
#include "loader.h"

enum { MAX_REGIONS = 256, PAGE = 4096, CHUNK = 1 << 20, LONG_RUN = 1 << 16, POPULATE_WRITE = 23 /* MADV_, from Linux 5.14 on */ };

static char *robust_list;
static size_t robust_size;
static int32_t *thread_id; /* where libc keeps it */

static struct region written[MAX_REGIONS]; /* what start-up has written to */
static int written_count;

static bool find_thread(void)
{
    if (raw(SYS_get_robust_list, 0, &robust_list, &robust_size) < 0 || !robust_list)
        return false;
    /* glibc has the id, an unused one and a pointer in front of the list. */
    thread_id = (int32_t *)(void *)(robust_list - 16);
    return *thread_id == raw(SYS_gettid, 0);
}

struct entry { uint64_t inode, offset; uint16_t length; uint8_t type; char name[]; };

/* How many entries a directory has, as far as they fit; -1: it cannot be told. */
static int count_entries(const char *path)
{
    char entries[4096] __attribute__((aligned(8)));
    int found = 0;
    long fd = raw(SYS_openat, AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    long count = fd < 0 ? -1 : raw(SYS_getdents64, fd, entries, sizeof entries);
    for (long at = 0; at < count; at += ((struct entry *)(void *)(entries + at))->length)
        found += ((struct entry *)(void *)(entries + at))->name[0] != '.';
    if (fd >= 0)
        raw(SYS_close, fd);
    return count < 0 ? -1 : found;
}

/* What start-up has written would be missing in the copies, unless it is in a buffer of the interpreter's. */
static bool has_written(void)
{
    for (int fd = 1; fd <= 2; fd++) {
        int waiting = 0;
        if (raw(SYS_ioctl, fd, FIONREAD, &waiting) < 0 || waiting)
            return true;
    }
    return false;
}

/* A fork has neither children nor memory of its own where its parent has. */
static bool has_relatives(void)
{
    return raw(SYS_waitid, P_ALL, 0, 0, WEXITED | WNOHANG | WNOWAIT | __WALL, 0) != -10 /* ECHILD */ || has_shared_memory();
}

bool can_fork(void)
{
    /* One thread; no descriptor but stdio, CONTROL_FD, and the one that reads the directory. */
    return find_thread() && count_entries("/proc/self/task") == 1 && count_entries("/proc/self/fd") == 5 && !has_written() &&
           !has_relatives();
}

/* Waits for the next order; without an agent there is none. */
static void hear_files(int files[CHILD_FILES])
{
    char order;
    union { struct cmsghdr head; char room[CMSG_SPACE(CHILD_FILES * sizeof(int))]; } control;
    struct { char *bytes; size_t length; } part = {&order, 1};
    struct msghdr message;
    long count;
    do {
        memset(&message, 0, sizeof message);
        message.msg_iov = (struct iovec *)(void *)&part;
        message.msg_iovlen = 1;
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        count = raw(SYS_recvmsg, CONTROL_FD, &message, MSG_CMSG_CLOEXEC);
    } while (count == -4); /* EINTR */
    if (count != 1 || message.msg_controllen < sizeof control.head || control.head.cmsg_type != SCM_RIGHTS ||
        control.head.cmsg_len != CMSG_LEN(CHILD_FILES * sizeof(int)))
        give_up();
    memcpy(files, CMSG_DATA(&control.head), CHILD_FILES * sizeof(int));
}

static long make_copy(void)
{
    long flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD;
#if defined(__x86_64__)
    return raw(SYS_clone, flags, 0, 0, thread_id, 0);
#else
    return raw(SYS_clone, flags, 0, 0, 0, thread_id);
#endif
}

static void become_child(const int files[CHILD_FILES])
{
    static const int places[CHILD_FILES] = {0, 1, 2, CONTROL_FD};
    raw(SYS_set_robust_list, robust_list, robust_size);
    raw(SYS_setsid, 0);
    for (int i = 0; i < CHILD_FILES; i++)
        if (raw(SYS_dup3, files[i], places[i], places[i] == CONTROL_FD ? O_CLOEXEC : 0) < 0)
            give_up();
}

/* Whether the kernel tells which pages are there. gVisor says of all that they are. */
static bool tells_pages(void)
{
    uint8_t there = 1;
    long fresh = raw(SYS_mmap, 0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh < 0 && fresh > -PAGE)
        return false;
    bool told = raw(SYS_mincore, fresh, PAGE, &there) == 0 && !(there & 1);
    raw(SYS_munmap, fresh, PAGE);
    return told;
}

static bool is_zero(uintptr_t page)
{
    for (const uint64_t *word = (const uint64_t *)page, *end = word + PAGE / sizeof *word; word < end; word++)
        if (*word)
            return false;
    return true;
}

static void add_written(uintptr_t page)
{
    if (written_count && written[written_count - 1].end == page)
        written[written_count - 1].end += PAGE;
    else if (written_count < MAX_REGIONS)
        written[written_count++] = (struct region){page, page + PAGE, false};
}

/* Where the kernel does not tell, it is what is not zero. Long runs of pages that are get given back, which changes nothing
 * about them: to have looked at them took memory for each. Short ones are not worth a mapping of their own. */
static void find_contents(const struct region *region)
{
    for (uintptr_t at = region->start, end; at < region->end; at = end) {
        for (end = at; end < region->end && is_zero(end);)
            end += PAGE;
        if (end - at >= LONG_RUN) {
            if (region->anonymous)
                raw(SYS_madvise, at, end - at, MADV_DONTNEED);
            continue;
        }
        for (end = end < region->end ? end + PAGE : end; at < end; at += PAGE)
            add_written(at);
    }
}

static void find_pages(const struct region *region)
{
    uint8_t there[CHUNK / PAGE];
    for (uintptr_t at = region->start; at < region->end; at += CHUNK) {
        uintptr_t end = region->end - at > CHUNK ? at + CHUNK : region->end;
        if (raw(SYS_mincore, at, end - at, there) < 0)
            continue;
        for (uintptr_t page = at; page < end; page += PAGE)
            if (there[(page - at) / PAGE] & 1)
                add_written(page);
    }
}

static void find_written(void)
{
    struct region regions[MAX_REGIONS];
    bool told = tells_pages();
    int count = list_regions(regions, MAX_REGIONS, true);
    for (int i = 0; i < count; i++) {
        /* What this writes to itself is not given back. */
        if (in_regions(&regions[i], 1, (uintptr_t)written, 1) || in_regions(&regions[i], 1, (uintptr_t)regions, 1))
            regions[i].anonymous = false;
        (told ? find_pages : find_contents)(&regions[i]);
    }
}

/* Makes those pages the copy's own before it has a program: else that would stop at its first write to each. */
static void write_ahead(void)
{
    for (int i = 0; i < written_count; i++)
        if (raw(SYS_madvise, written[i].start, written[i].end - written[i].start, POPULATE_WRITE) < 0)
            for (uintptr_t at = written[i].start; at < written[i].end; at += PAGE)
                *(volatile char *)at = *(volatile char *)at;
}

void fork_children(const struct fork_steps *steps)
{
    char forks = FORKS;
    int files[CHILD_FILES];
    if (!steps->goes_on)
        find_written();
    say(&forks, 1);
    for (;;) {
        hear_files(files);
        if (steps->before)
            steps->before();
        long pid = make_copy();
        if (pid == 0)
            become_child(files);
        for (int i = 0; i < CHILD_FILES; i++)
            raw(SYS_close, files[i]);
        if (pid < 0)
            give_up();
        if (pid == 0)
            break;
        if (steps->in_parent)
            steps->in_parent();
    }
    if (steps->in_child)
        steps->in_child();
    write_ahead();
}

void say_ready(bool is_child)
{
    char ready[1 + sizeof(int32_t)] = {READY};
    if (is_child)
        memcpy(ready + 1, thread_id, sizeof(int32_t));
    say(ready, is_child ? sizeof ready : 1);
}

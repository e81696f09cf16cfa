/* Directory trees: LIST and REMOVE, in slices, so that a million entries delay no other channel. Symlinks are never followed. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent.h"

enum { RECURSIVE = 1, SLICE = 64, BUFFER = 4064, UNREADABLE = 1 };

struct level {
    int fd;
    uint32_t at, length; /* in buffer */
    uint32_t path;       /* length of the path up to here */
    bool removed;        /* REMOVE: something went in this pass, so another pass is due */
    _Alignas(8) char buffer[BUFFER];
};

struct walk {
    struct channel channel;
    uint32_t uid, gid;
    bool removing, recursive;
    uint64_t entries;
    int depth; /* levels in use */
    struct level *levels;
    char path[PATH_LIMIT + 256]; /* relative to the top */
    char *top;
};

enum { LEVELS_SIZE = MAX_DEPTH * sizeof(struct level) };

struct entry { /* the kernel's linux_dirent64 */
    uint64_t inode;
    int64_t next;
    uint16_t length;
    uint8_t type;
    char name[];
};

static struct walk *as_walk(struct channel *c) { return container_of(c, struct walk, channel); }

static void walk_drop(struct channel *c)
{
    struct walk *w = as_walk(c);
    while (w->depth > 0)
        close(w->levels[--w->depth].fd);
    if (w->levels)
        munmap(w->levels, LEVELS_SIZE);
    free(w->top);
}

static void push(struct walk *w, int fd, uint32_t path)
{
    struct level *l = &w->levels[w->depth++];
    l->fd = fd;
    l->at = l->length = 0;
    l->path = path;
    l->removed = false;
}

/* The next entry of the innermost directory; NULL at its end, with errno. */
static const struct entry *next_entry(struct level *l)
{
    for (;;) {
        if (l->at >= l->length) {
            long length = syscall(SYS_getdents64, l->fd, l->buffer, sizeof l->buffer);
            if (length <= 0) {
                errno = length < 0 ? errno : 0;
                return NULL;
            }
            l->at = 0;
            l->length = (uint32_t)length;
        }
        const struct entry *e = (const void *)(l->buffer + l->at);
        l->at += e->length;
        if (strcmp(e->name, ".") != 0 && strcmp(e->name, "..") != 0)
            return e;
    }
}

/* Puts the entry's name behind the path; returns where it starts, 0 if it is too long. */
static uint32_t append_name(struct walk *w, const struct level *l, const char *name)
{
    uint32_t at = l->path, length = (uint32_t)strlen(name);
    if (at + length + 1 > PATH_LIMIT)
        return UINT32_MAX;
    if (at)
        w->path[at++] = '/';
    memcpy(w->path + at, name, length + 1);
    return at;
}

static int enter(const struct level *l, const char *name)
{
    return openat(l->fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

/* LIST ------------------------------------------------------------------------------------------------------------ */

/* Whether every name in the directory that w->path names has room: the list tells of one that it does not enter. */
static bool may_enter(const struct walk *w)
{
    return w->depth < MAX_DEPTH && strlen(w->path) + 1 + NAME_MAX <= PATH_LIMIT;
}

static int list_entry(struct walk *w, struct level *l, const struct entry *e)
{
    struct stat st;
    if (fstatat(l->fd, e->name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : errno; /* gone since */
    if (append_name(w, l, e->name) == UINT32_MAX)
        return ENAMETOOLONG;
    char target[PATH_LIMIT];
    ssize_t target_length = S_ISLNK(st.st_mode) ? readlinkat(l->fd, e->name, target, sizeof target) : 0;
    int inside = -1;
    uint8_t flags = 0;
    if (w->recursive && S_ISDIR(st.st_mode)) {
        inside = may_enter(w) ? enter(l, e->name) : -1;
        if (inside < 0)
            flags = UNREADABLE;
    }
    uint8_t record[MAX_ENTRY];
    ring_put(&w->channel.out[0].ring, record,
             entry_encode(record, &st, w->path, target, target_length > 0 ? (uint32_t)target_length : 0, flags));
    w->entries++;
    if (inside >= 0)
        push(w, inside, (uint32_t)strlen(w->path));
    return 0;
}

/* REMOVE ---------------------------------------------------------------------------------------------------------- */

static int remove_entry(struct walk *w, struct level *l, const struct entry *e, uint32_t *code)
{
    if (unlinkat(l->fd, e->name, 0) == 0 || errno == ENOENT) {
        l->removed = true;
        return 0;
    }
    int error = errno;
    if (error != EISDIR && error != EPERM)
        return error;
    if (unlinkat(l->fd, e->name, AT_REMOVEDIR) == 0) {
        l->removed = true;
        return 0;
    }
    if (errno != ENOTEMPTY && errno != EEXIST)
        return errno == ENOTDIR ? error : errno;
    if (w->depth == MAX_DEPTH) {
        *code = TOO_DEEP;
        return 0;
    }
    int inside = enter(l, e->name);
    if (inside < 0)
        return errno;
    uint32_t name = append_name(w, l, e->name);
    if (name == UINT32_MAX) {
        close(inside);
        return ENAMETOOLONG;
    }
    l->removed = true; /* it will be gone when we are back, or an error ends everything */
    push(w, inside, (uint32_t)strlen(w->path));
    return 0;
}

/* At the end of a directory: some filesystems skip entries when others go while they are read, so a pass that removed
 * something is followed by another. Its own removal happens in the parent's next pass. */
static void leave(struct walk *w)
{
    struct level *l = &w->levels[w->depth - 1];
    if (w->removing && l->removed) {
        l->removed = false;
        l->at = l->length = 0;
        if (lseek(l->fd, 0, SEEK_SET) == 0)
            return;
    }
    close(l->fd);
    w->depth--;
}

/* Both ------------------------------------------------------------------------------------------------------------ */

static void finish_walk(struct walk *w)
{
    struct channel *c = &w->channel;
    if (w->removing)
        return rmdir(w->top) < 0 ? channel_finish(c, code_of(errno), errno) : channel_finish(c, OK, 0);
    uint8_t entries[8];
    put64(entries, w->entries);
    channel_result(c, entries, sizeof entries);
    if (!c->finished)
        channel_finish(c, OK, 0);
}

static void work_as_user(struct walk *w)
{
    struct channel *c = &w->channel;
    for (int i = 0; i < SLICE; i++) {
        if (!w->removing && ring_room(&c->out[0].ring) < MAX_ENTRY) {
            c->busy = false; /* until an ACK makes room */
            return;
        }
        if (w->depth == 0)
            return finish_walk(w);
        struct level *l = &w->levels[w->depth - 1];
        const struct entry *e = next_entry(l);
        int error = 0;
        uint32_t code = OK;
        if (e)
            error = w->removing ? remove_entry(w, l, e, &code) : list_entry(w, l, e);
        else if (errno == 0)
            leave(w);
        else
            error = errno;
        if (error || code)
            return channel_finish(c, error ? code_of(error) : code, error);
    }
}

static void walk_work(struct channel *c)
{
    struct walk *w = as_walk(c);
    if (!assume(w->uid, w->gid))
        return channel_finish(c, code_of(errno), errno);
    work_as_user(w);
    resume_self();
}

static void walk_room(struct channel *c, int stream)
{
    (void)stream;
    if (!c->finished)
        c->busy = work_to_do = true;
}

static const struct kind walk_kind = {.room = walk_room, .work = walk_work, .drop = walk_drop};

static void walk_open(uint64_t id, const struct file_request *q, bool removing)
{
    int flags = removing ? O_NOFOLLOW : 0;
    int fd = open(q->path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC | flags);
    if (fd < 0)
        return channel_refuse(id, code_of(errno), errno);
    struct walk *w = calloc(1, sizeof *w);
    void *levels = mmap(NULL, LEVELS_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *top = strdup(q->path);
    if (!w || levels == MAP_FAILED || !top || (!removing && !ring_allocate(&w->channel.out[0].ring, OUTPUT_WINDOW))) {
        close(fd);
        if (levels != MAP_FAILED)
            munmap(levels, LEVELS_SIZE);
        free(top);
        free(w);
        return channel_refuse(id, NO_MEMORY, ENOMEM);
    }
    w->levels = levels;
    w->top = top;
    w->uid = q->uid;
    w->gid = q->gid;
    w->removing = removing;
    w->recursive = q->flags & RECURSIVE;
    push(w, fd, 0);
    channel_init(&w->channel, &walk_kind, id);
    w->channel.streams = removing ? 0 : 1;
    w->channel.busy = work_to_do = true;
    if (!removing)
        channel_opened(&w->channel, "", 0);
}

void list_open(uint64_t id, const struct file_request *q) { walk_open(id, q, false); }

void remove_open(uint64_t id, const struct file_request *q)
{
    static const struct kind removed = {0};
    int error = 0;
    if (unlink(q->path) < 0) {
        error = errno;
        if ((error == EISDIR || error == EPERM) && rmdir(q->path) == 0)
            error = 0;
        else if ((error == EISDIR || error == EPERM) && errno != ENOTDIR)
            error = errno;
    }
    if ((error == ENOTEMPTY || error == EEXIST) && q->flags & RECURSIVE)
        return walk_open(id, q, true);
    if (error)
        return channel_refuse(id, error == EEXIST ? NOT_EMPTY : code_of(error), error);
    struct channel *c = calloc(1, sizeof *c);
    if (!c)
        return channel_refuse(id, NO_MEMORY, ENOMEM);
    channel_init(c, &removed, id);
    channel_finish(c, OK, 0);
}

/* WRITE: as a program of that user would. A file that is there is written in place: its inode, its other names and its
 * rights stay, and one that the user may not write is refused. A new file comes under its name when all of it is there. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

enum { APPEND = 1, EXCLUSIVE = 2, MAX_HOPS = 40 };

struct write_channel {
    struct channel channel;
    int fd;
    uint32_t uid, gid, mode;
    bool append, exclusive;
    char *target, *temporary; /* temporary: of a new file, until it is done */
};

static void write_give_up(struct channel *c)
{
    struct write_channel *w = container_of(c, struct write_channel, channel);
    if (w->temporary && assume(w->uid, w->gid)) {
        unlink(w->temporary);
        resume_self();
    }
    free(w->temporary);
    w->temporary = NULL;
}

static void write_drop(struct channel *c)
{
    struct write_channel *w = container_of(c, struct write_channel, channel);
    if (w->fd >= 0)
        close(w->fd);
    free(w->target);
    free(w->temporary);
}

static void write_failed(struct channel *c, int error)
{
    write_give_up(c);
    channel_finish(c, code_of(error), error);
}

static void write_data(struct channel *c, const uint8_t *bytes, uint32_t length)
{
    struct write_channel *w = container_of(c, struct write_channel, channel);
    c->in.ring.end += length;
    while (length > 0) {
        ssize_t count = write(w->fd, bytes, length);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return write_failed(c, errno);
        bytes += count;
        length -= (uint32_t)count;
    }
    c->in.ring.acked = c->in.ring.end;
}

static int publish(struct write_channel *w)
{
    if (fchmod(w->fd, w->mode) < 0)
        return errno;
    if (!w->exclusive)
        return rename(w->temporary, w->target) < 0 ? errno : 0;
    return rename_new(w->temporary, w->target);
}

static void write_eof(struct channel *c)
{
    struct write_channel *w = container_of(c, struct write_channel, channel);
    c->in.eof = true;
    struct stat st;
    int error = assume(w->uid, w->gid) ? 0 : errno;
    if (!error) {
        if (w->temporary)
            error = publish(w);
        else if (w->mode != KEEP_MODE && fchmod(w->fd, w->mode) < 0)
            error = errno;
        resume_self();
    }
    if (!error && fstat(w->fd, &st) < 0)
        error = errno;
    if (error)
        return write_failed(c, error);
    free(w->temporary);
    w->temporary = NULL;
    uint8_t size[8];
    put64(size, (uint64_t)st.st_size);
    channel_result(c, size, sizeof size);
    if (!c->finished)
        channel_finish(c, OK, 0);
}

static const struct kind write_kind = {.data = write_data, .eof = write_eof, .cancel = write_give_up, .drop = write_drop};

/* Follows a final symlink, as writing through a shell would; the directory parts are the kernel's business. */
static int resolve(const char *path, char *to)
{
    size_t length = strlen(path);
    memcpy(to, path, length + 1);
    for (int hop = 0; hop < MAX_HOPS; hop++) {
        char target[PATH_LIMIT + 1];
        ssize_t count = readlink(to, target, PATH_LIMIT);
        if (count < 0)
            return errno == EINVAL || errno == ENOENT ? 0 : errno;
        target[count] = 0;
        char *slash = strrchr(to, '/');
        size_t keep = target[0] == '/' || !slash ? 0 : (size_t)(slash - to) + 1;
        if (keep + (size_t)count > PATH_LIMIT)
            return ENAMETOOLONG;
        memcpy(to + keep, target, (size_t)count + 1);
    }
    return ELOOP;
}

static int open_temporary(struct write_channel *w)
{
    const char *slash = strrchr(w->target, '/');
    size_t directory = slash ? (size_t)(slash - w->target) + 1 : 0;
    w->temporary = malloc(directory + 24);
    if (!w->temporary)
        return ENOMEM;
    memcpy(w->temporary, w->target, directory);
    char *p = w->temporary + directory;
    p = (char *)put_bytes((uint8_t *)p, ".k8e-", 5);
    for (int shift = 60; shift >= 0; shift -= 4)
        *p++ = "0123456789abcdef"[w->channel.id >> shift & 15];
    *p = 0;
    w->fd = open(w->temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (w->fd < 0) {
        int error = errno;
        free(w->temporary);
        w->temporary = NULL;
        return error;
    }
    if (w->mode == KEEP_MODE)
        w->mode = 0644;
    return 0;
}

static int open_in_place(struct write_channel *w, int how, uint32_t *code)
{
    w->fd = open(w->target, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | how, 0644);
    if (w->fd < 0)
        return errno;
    struct stat st;
    if (fstat(w->fd, &st) < 0)
        return errno;
    if ((*code = (uint32_t)not_regular(&st))) /* it was swapped since it was looked at */
        return 0;
    return !w->append && ftruncate(w->fd, 0) < 0 ? errno : 0;
}

static int write_prepare(struct write_channel *w, const struct file_request *q, uint32_t *code)
{
    char target[PATH_LIMIT + 1];
    int error = resolve(q->path, target);
    if (error)
        return error;
    struct stat st;
    bool exists = stat(target, &st) == 0;
    if (!exists && errno != ENOENT)
        return errno;
    if (exists && (*code = (uint32_t)not_regular(&st)))
        return 0;
    if (exists && w->exclusive)
        return EEXIST;
    if (target[strlen(target) - 1] == '/')
        return EISDIR;
    if (!(w->target = strdup(target)))
        return ENOMEM;
    if (w->append)
        return open_in_place(w, O_APPEND | O_CREAT | (w->exclusive ? O_EXCL : 0), code);
    return exists ? open_in_place(w, 0, code) : open_temporary(w);
}

void write_open(uint64_t id, const struct file_request *q)
{
    struct write_channel *w = calloc(1, sizeof *w);
    if (!w)
        return channel_refuse(id, NO_MEMORY, ENOMEM);
    channel_init(&w->channel, &write_kind, id);
    w->channel.has_input = true;
    w->fd = -1;
    w->uid = q->uid;
    w->gid = q->gid;
    w->mode = q->mode == KEEP_MODE ? KEEP_MODE : q->mode & 07777;
    w->append = q->flags & APPEND;
    w->exclusive = q->flags & EXCLUSIVE;
    uint32_t code = OK;
    int error = write_prepare(w, q, &code);
    if (error || code)
        return channel_finish(&w->channel, error ? code_of(error) : code, error);
    channel_opened(&w->channel, "", 0);
}

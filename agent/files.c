/* Files: read, write, stat, mkdir, move, chmod. Each acts as the user it is asked for, and only ever on regular files where
 * content is concerned: nothing here can block on a FIFO or a device. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent.h"

enum { PATH_LIMIT = 4096, APPEND = 1, EXCLUSIVE = 2, FOLLOW = 1, PARENTS = 1, NO_REPLACE = 1, MAX_HOPS = 40 };

/* Acting as somebody else. Real and saved ids stay ours, so that nobody gains a hold on us in the meantime; the kernel
 * takes the capabilities away with the effective id. Not libc's calls: those prepare for threads that we do not have. */
bool assume(uint32_t uid, uint32_t gid)
{
    if ((uid != OWN_ID && uid > INT32_MAX) || (gid != OWN_ID && gid > INT32_MAX)) {
        errno = EINVAL;
        return false;
    }
    if (gid != OWN_ID && syscall(SYS_setresgid, -1, gid, -1) < 0)
        return false;
    if (uid != OWN_ID && syscall(SYS_setresuid, -1, uid, -1) < 0) {
        int error = errno;
        resume_self();
        errno = error;
        return false;
    }
    return true;
}

void resume_self(void)
{
    uid_t uid = getuid();
    gid_t gid = getgid();
    if (geteuid() != uid && syscall(SYS_setresuid, -1, uid, -1) < 0)
        die("cannot become myself again");
    if (getegid() != gid && syscall(SYS_setresgid, -1, gid, -1) < 0)
        die("cannot become myself again");
}

static uint8_t type_letter(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFREG: return 'f';
    case S_IFDIR: return 'd';
    case S_IFLNK: return 'l';
    case S_IFIFO: return 'p';
    case S_IFSOCK: return 's';
    case S_IFBLK: return 'b';
    case S_IFCHR: return 'c';
    default: return '?';
    }
}

uint32_t entry_encode(uint8_t *to, const struct stat *st, const char *name, const char *target, uint32_t target_length,
                      uint8_t flags)
{
    uint32_t name_length = (uint32_t)strlen(name);
    uint8_t *p = put8(put8(to + 4, type_letter(st->st_mode)), flags);
    p = put32(put16(p, 0), st->st_mode & 07777);
    p = put32(put32(p, st->st_uid), st->st_gid);
    p = put64(p, (uint64_t)st->st_size);
    p = put64(p, (uint64_t)((int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec));
    p = put32(put32(p, name_length), target_length);
    p = put_bytes(put_bytes(p, name, name_length), target, target_length);
    put32(to, (uint32_t)(p - to) - 4);
    return (uint32_t)(p - to);
}

static int not_regular(const struct stat *st)
{
    return S_ISREG(st->st_mode) ? OK : S_ISDIR(st->st_mode) ? IS_DIRECTORY : NOT_REGULAR;
}

/* READ ------------------------------------------------------------------------------------------------------------ */

struct read_channel {
    struct channel channel;
    int fd;
    uint64_t offset, left;
};

static void read_drop(struct channel *c)
{
    struct read_channel *r = container_of(c, struct read_channel, channel);
    if (r->fd >= 0)
        close(r->fd);
}

static void read_work(struct channel *c)
{
    struct read_channel *r = container_of(c, struct read_channel, channel);
    struct ring *ring = &c->out[0].ring;
    uint8_t *at;
    uint32_t space = ring_space(ring, false, &at);
    if (space == 0) {
        c->busy = false; /* until an ACK makes room */
        return;
    }
    size_t want = space < r->left ? space : (size_t)r->left;
    ssize_t count = want ? pread(r->fd, at, want, (off_t)r->offset) : 0;
    if (count < 0)
        return channel_finish(c, code_of(errno), errno);
    if (count == 0)
        return channel_finish(c, OK, 0);
    ring_wrote(ring, (uint32_t)count, false);
    r->offset += (uint64_t)count;
    r->left -= (uint64_t)count;
}

static void resume_work(struct channel *c, int stream)
{
    (void)stream;
    if (!c->finished)
        c->busy = work_to_do = true;
}

static const struct kind read_kind = {.room = resume_work, .work = read_work, .drop = read_drop};

static void read_open(uint64_t id, const struct file_request *q)
{
    struct stat st;
    /* Looked at before it is opened: opening a FIFO or a device can block or do something. Looked at again afterwards:
     * it may have been swapped. */
    if (stat(q->path, &st) < 0)
        return channel_refuse(id, code_of(errno), errno);
    if (not_regular(&st))
        return channel_refuse(id, (uint32_t)not_regular(&st), 0);
    int fd = open(q->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0)
        return channel_refuse(id, code_of(errno), errno);
    struct read_channel *r = NULL;
    if (fstat(fd, &st) < 0 || not_regular(&st) || q->offset > INT64_MAX || !(r = calloc(1, sizeof *r)) ||
        !ring_allocate(&r->channel.out[0].ring, OUTPUT_WINDOW)) {
        close(fd);
        if (!r && not_regular(&st))
            return channel_refuse(id, (uint32_t)not_regular(&st), 0);
        free(r);
        return q->offset > INT64_MAX ? channel_refuse(id, INVALID, EINVAL) : channel_refuse(id, NO_MEMORY, ENOMEM);
    }
    r->fd = fd;
    r->offset = q->offset;
    r->left = q->length < INT64_MAX ? q->length : INT64_MAX;
    channel_init(&r->channel, &read_kind, id);
    r->channel.streams = 1;
    r->channel.busy = work_to_do = true;
    uint8_t entry[MAX_EXTRA];
    channel_opened(&r->channel, entry, entry_encode(entry, &st, "", "", 0, 0));
}

/* WRITE ----------------------------------------------------------------------------------------------------------- */

struct write_channel {
    struct channel channel;
    int fd;
    uint32_t uid, gid, mode;
    bool append, exclusive;
    char *target, *temporary; /* temporary: NULL when appending, or done */
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

/* Renames, unless something is there. */
static int rename_new(const char *from, const char *to)
{
    const unsigned no_replace = 1; /* musl 1.2.3 knows neither the call nor its flag */
    return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, no_replace) < 0 ? errno : 0;
}

static int publish(struct write_channel *w)
{
    if (fchmod(w->fd, w->mode) < 0)
        return errno;
    if (!w->exclusive)
        return rename(w->temporary, w->target) < 0 ? errno : 0;
    int error = rename_new(w->temporary, w->target);
    if (error != EINVAL && error != ENOSYS)
        return error;
    /* A filesystem without that flag: a hard link refuses to replace as well. */
    if (link(w->temporary, w->target) < 0)
        return errno;
    unlink(w->temporary);
    return 0;
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

static int open_temporary(struct write_channel *w, const struct stat *old)
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
        w->mode = old ? old->st_mode & 07777 : 0644;
    /* Only root may give a file away; it gives it back to its owner. */
    if (old && (old->st_uid != geteuid() || old->st_gid != getegid()))
        (void)!fchown(w->fd, old->st_uid, old->st_gid);
    return 0;
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
    if (!w->append)
        return open_temporary(w, exists ? &st : NULL);
    w->fd = open(target, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (w->exclusive ? O_EXCL : 0),
                 0644);
    if (w->fd < 0)
        return errno;
    if (fstat(w->fd, &st) < 0)
        return errno;
    *code = (uint32_t)not_regular(&st);
    return 0;
}

static void write_open(uint64_t id, const struct file_request *q)
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

/* The rest -------------------------------------------------------------------------------------------------------- */

static const struct kind answer_kind = {0};

/* A request that is over as soon as it was carried out. */
static void answer(uint64_t id, int error, const void *bytes, uint32_t length)
{
    struct channel *c;
    if (error || !(c = calloc(1, sizeof *c)))
        return channel_refuse(id, error ? code_of(error) : NO_MEMORY, error);
    channel_init(c, &answer_kind, id);
    if (length)
        channel_result(c, bytes, length);
    if (!c->finished)
        channel_finish(c, OK, 0);
}

static void stat_path(uint64_t id, const struct file_request *q)
{
    struct stat st;
    if ((q->flags & FOLLOW ? stat : lstat)(q->path, &st) < 0)
        return answer(id, errno, NULL, 0);
    char target[PATH_LIMIT];
    ssize_t length = 0;
    if (S_ISLNK(st.st_mode) && (length = readlink(q->path, target, sizeof target)) < 0)
        return answer(id, errno, NULL, 0);
    uint8_t entry[MAX_ENTRY];
    answer(id, 0, entry, entry_encode(entry, &st, "", target, (uint32_t)length, 0));
}

static int make_directory(const struct file_request *q)
{
    struct stat st;
    if (!(q->flags & PARENTS))
        return mkdir(q->path, q->mode & 07777) < 0 ? errno : 0;
    char path[PATH_LIMIT + 1];
    memcpy(path, q->path, strlen(q->path) + 1);
    for (char *p = path + 1; *p; p++) {
        if (*p != '/')
            continue;
        *p = 0;
        if (mkdir(path, 0755) < 0 && errno != EEXIST && !(stat(path, &st) == 0 && S_ISDIR(st.st_mode)))
            return errno;
        *p = '/';
    }
    if (mkdir(path, q->mode & 07777) == 0)
        return 0;
    int error = errno;
    if (stat(path, &st) < 0)
        return error;
    return S_ISDIR(st.st_mode) ? 0 : ENOTDIR;
}

static int move_path(const struct file_request *q)
{
    if (!(q->flags & NO_REPLACE))
        return rename(q->path, q->second) < 0 ? errno : 0;
    return rename_new(q->path, q->second);
}

/* A path of the request, terminated; NULL and a code if it cannot be one. */
static const char *take_path(char *to, const uint8_t *bytes, uint32_t length, uint32_t *code)
{
    if (length > PATH_LIMIT || memchr(bytes, 0, length)) {
        *code = length > PATH_LIMIT ? NAME_TOO_LONG : INVALID;
        return NULL;
    }
    memcpy(to, bytes, length);
    to[length] = 0;
    return to;
}

void file_request(uint8_t type, uint64_t id, const uint8_t *payload, uint32_t length)
{
    static char paths[2][PATH_LIMIT + 1];
    uint32_t first = get32(payload + 32), second = get32(payload + 36), code = OK;
    if ((uint64_t)first + second != length - FILE_FIXED)
        return link_fail();
    struct file_request q = {
        .uid = get32(payload), .gid = get32(payload + 4), .flags = get32(payload + 8), .mode = get32(payload + 12),
        .offset = get64(payload + 16), .length = get64(payload + 24),
        .path = take_path(paths[0], payload + FILE_FIXED, first, &code),
        .second = take_path(paths[1], payload + FILE_FIXED + first, second, &code),
    };
    if (code)
        return channel_refuse(id, code, 0);
    bool unused = type == CONNECT && !q.flags;
    if ((!first && !unused) || (type == MOVE && !second))
        return channel_refuse(id, INVALID, EINVAL);
    if (!assume(q.uid, q.gid))
        return channel_refuse(id, code_of(errno), errno);
    switch (type) {
    case READ: read_open(id, &q); break;
    case WRITE: write_open(id, &q); break;
    case LIST: list_open(id, &q); break;
    case STAT: stat_path(id, &q); break;
    case MKDIR: answer(id, make_directory(&q), NULL, 0); break;
    case MOVE: answer(id, move_path(&q), NULL, 0); break;
    case REMOVE: remove_open(id, &q); break;
    case CHMOD: answer(id, chmod(q.path, q.mode & 07777) < 0 ? errno : 0, NULL, 0); break;
    case WATCH: watch_open(id, &q); break;
    case CONNECT: connect_open(id, &q); break;
    }
    resume_self();
}

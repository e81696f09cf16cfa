/* Files: read, stat, mkdir, move, chmod. Each acts as the user it is asked for, and only ever on regular files where
 * content is concerned: nothing here can block on a FIFO or a device. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent.h"

enum { FOLLOW = 1, PARENTS = 1, NO_REPLACE = 1, WRITABLE_BIND = 1, LAST_BIND = 2 };

/* Acting as another user. Real and saved ids stay, so that no process of that user can signal the agent; the kernel
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

int not_regular(const struct stat *st)
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
    if (fstat(fd, &st) < 0 || not_regular(&st) || !(r = calloc(1, sizeof *r)) ||
        !ring_allocate(&r->channel.out[0].ring, OUTPUT_WINDOW)) {
        close(fd);
        if (!r && not_regular(&st))
            return channel_refuse(id, (uint32_t)not_regular(&st), 0);
        free(r);
        return channel_refuse(id, NO_MEMORY, ENOMEM);
    }
    r->fd = fd;
    r->offset = q->offset;
    r->left = q->offset > INT64_MAX - OUTPUT_WINDOW ? 0 : q->length; /* past the end of anything */
    channel_init(&r->channel, &read_kind, id);
    r->channel.streams = 1;
    r->channel.busy = work_to_do = true;
    uint8_t entry[MAX_EXTRA];
    channel_opened(&r->channel, entry, entry_encode(entry, &st, "", "", 0, 0));
}

/* Renames, unless something is there. */
int rename_new(const char *from, const char *to)
{
    const unsigned no_replace = 1; /* musl 1.2.3 knows neither the call nor its flag */
    if (syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, no_replace) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS)
        return errno;
    /* Not everywhere: gVisor cannot do it in a mount that others may change as well, which the workspace is. A second
     * name is only ever made where there is none; what cannot have one (a directory) has to do with a look before. */
    if (link(from, to) == 0) {
        if (unlink(from) == 0)
            return 0;
        int error = errno;
        unlink(to);
        return error;
    }
    if (errno != EPERM)
        return errno;
    struct stat st;
    if (lstat(to, &st) == 0)
        return EEXIST;
    return rename(from, to) < 0 ? errno : 0;
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

/* A mount that our kernel can see already, where it is to be; later, that it can be written to, when what is to be kept
 * in it is a mount point itself; or the end of that, which takes what it was seen at away. */
static int bind_path(const struct file_request *q)
{
    if (q->flags & LAST_BIND)
        return umount2(q->path, MNT_DETACH) < 0 || rmdir(q->path) < 0 ? errno : (int)-renounce_mounting();
    const unsigned long writable = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV;
    return mount(q->path, q->flags & WRITABLE_BIND ? q->path : q->second, "",
                 q->flags & WRITABLE_BIND ? writable : MS_BIND, NULL) < 0 ? errno : 0;
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
    case BIND: answer(id, bind_path(&q), NULL, 0); break;
    }
    resume_self();
}

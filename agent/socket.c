/* Streams of other kinds: WATCH (inotify) and CONNECT (a socket inside the sandbox). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "agent.h"

/* WATCH ----------------------------------------------------------------------------------------------------------- */

enum {
    EVENTS = IN_CREATE | IN_DELETE | IN_MODIFY | IN_CLOSE_WRITE | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO |
             IN_DELETE_SELF | IN_MOVE_SELF,
    EVENT_BUFFER = 4096,
    MAX_RECORDS = 2 * EVENT_BUFFER, /* what a full buffer becomes at the most */
};

static void watch_read(struct channel *c)
{
    struct stream *s = &c->out[0];
    if (ring_room(&s->ring) < MAX_RECORDS)
        return source_mute(&s->source); /* the kernel queues, and says so when it overflows */
    _Alignas(8) char buffer[EVENT_BUFFER];
    ssize_t length = read(s->source.fd, buffer, sizeof buffer);
    bool gone = false;
    if (length < 0 && errno != EAGAIN && errno != EINTR)
        return channel_finish(c, code_of(errno), errno);
    for (ssize_t at = 0; at < length;) {
        const struct inotify_event *e = (const void *)(buffer + at);
        uint32_t name = e->len ? (uint32_t)strnlen(e->name, e->len) : 0;
        uint8_t record[16 + 256];
        uint8_t *p = put32(put32(put32(put32(record, 12 + name), e->mask), e->cookie), name);
        p = put_bytes(p, e->name, name);
        ring_put(&s->ring, record, (uint32_t)(p - record));
        gone = gone || e->mask & IN_IGNORED;
        at += (ssize_t)(sizeof *e + e->len);
    }
    if (gone)
        return channel_finish(c, OK, 0);
    source_watch(&s->source, EPOLLIN);
}

static void watch_ready(struct source *source, uint32_t events)
{
    (void)events;
    watch_read(container_of(container_of(source, struct stream, source), struct channel, out[0]));
}

static void watch_room(struct channel *c, int stream)
{
    (void)stream;
    if (!c->finished)
        watch_read(c);
}

void watch_open(uint64_t id, const struct file_request *q)
{
    static const struct kind watch_kind = {.room = watch_room};
    /* The kernel asks for read permission; gVisor forgets to. */
    struct stat st;
    if (stat(q->path, &st) == 0 && (S_ISDIR(st.st_mode) || S_ISREG(st.st_mode))) {
        int readable = open(q->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (readable < 0)
            return channel_refuse(id, code_of(errno), errno);
        close(readable);
    }
    int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (fd < 0 || inotify_add_watch(fd, q->path, EVENTS) < 0) {
        int error = errno;
        if (fd >= 0)
            close(fd);
        /* ENOSPC is the limit on watches here, not the disk. */
        return channel_refuse(id, error == ENOSPC ? TOO_MANY : code_of(error), error);
    }
    struct channel *c = calloc(1, sizeof *c);
    if (!c || !ring_allocate(&c->out[0].ring, OUTPUT_WINDOW)) {
        close(fd);
        free(c);
        return channel_refuse(id, NO_MEMORY, ENOMEM);
    }
    channel_init(c, &watch_kind, id);
    c->streams = 1;
    source_open(&c->out[0].source, fd, watch_ready);
    source_watch(&c->out[0].source, EPOLLIN);
    channel_opened(c, "", 0);
}

/* CONNECT --------------------------------------------------------------------------------------------------------- */

struct connection {
    struct channel channel;
    uint16_t port;
    bool connected, second_try;
};

static int begin(struct connection *k, const struct sockaddr *address, socklen_t length);
static void connection_ready(struct source *, uint32_t events);

static struct connection *as_connection(struct channel *c) { return container_of(c, struct connection, channel); }

static void check_over(struct channel *c)
{
    const struct stream *s = &c->out[0];
    if (!c->finished && s->ended && c->in.gone)
        channel_finish(c, code_of(s->error), s->error);
}

static int connect_six(struct connection *k)
{
    k->second_try = true;
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(k->port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    return begin(k, (struct sockaddr *)&six, sizeof six);
}

static void connection_writable(struct source *source, uint32_t events)
{
    input_ready(source, events);
    check_over(container_of(container_of(source, struct input, source), struct channel, in));
}

static void connected(struct connection *k)
{
    struct channel *c = &k->channel;
    int writer = fcntl(c->out[0].source.fd, F_DUPFD_CLOEXEC, 4);
    if (writer < 0)
        return channel_finish(c, code_of(errno), errno);
    k->connected = true;
    source_open(&c->in.source, writer, connection_writable);
    channel_opened(c, "", 0);
    source_watch(&c->out[0].source, EPOLLIN);
    source_watch(&c->in.source, EPOLLOUT); /* writes what came before the connection stood */
}

static void connection_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct channel *c = container_of(container_of(source, struct stream, source), struct channel, out[0]);
    struct connection *k = as_connection(c);
    if (k->connected) {
        stream_fill(c, &c->out[0]);
        return check_over(c);
    }
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(source->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error && k->port && !k->second_try) {
        source_close(source);
        error = connect_six(k);
        if (!error)
            return;
    }
    if (error)
        return channel_finish(c, code_of(error), error);
    connected(k);
}

static int begin(struct connection *k, const struct sockaddr *address, socklen_t length)
{
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    if (connect(fd, address, length) < 0 && errno != EINPROGRESS) {
        int error = errno;
        close(fd);
        return error;
    }
    source_open(&k->channel.out[0].source, fd, connection_ready);
    source_watch(&k->channel.out[0].source, EPOLLOUT);
    return 0;
}

static void connection_data(struct channel *c, const uint8_t *bytes, uint32_t length)
{
    if (as_connection(c)->connected) {
        input_data(c, bytes, length);
        check_over(c);
    } else {
        ring_put(&c->in.ring, bytes, length);
    }
}

static void connection_eof(struct channel *c)
{
    input_eof(c);
    check_over(c);
}

static void connection_room(struct channel *c, int stream)
{
    (void)stream;
    if (as_connection(c)->connected)
        stream_fill(c, &c->out[0]);
    check_over(c);
}

void connect_open(uint64_t id, const struct file_request *q)
{
    static const struct kind connection_kind = {
        .data = connection_data, .eof = connection_eof, .room = connection_room};
    struct connection *k = calloc(1, sizeof *k);
    if (!k || !ring_allocate(&k->channel.out[0].ring, OUTPUT_WINDOW)) {
        free(k);
        return channel_refuse(id, NO_MEMORY, ENOMEM);
    }
    struct channel *c = &k->channel;
    channel_init(c, &connection_kind, id);
    c->streams = 1;
    c->has_input = true;
    if (!ring_allocate(&c->in.ring, INPUT_WINDOW))
        return channel_finish(c, NO_MEMORY, ENOMEM);
    int error;
    if (q->flags) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        size_t length = strlen(q->path);
        if (length >= sizeof address.sun_path)
            return channel_finish(c, NAME_TOO_LONG, ENAMETOOLONG);
        memcpy(address.sun_path, q->path, length);
        error = begin(k, (struct sockaddr *)&address, sizeof address);
    } else if (q->offset < 1 || q->offset > 65535) {
        error = EINVAL;
    } else {
        k->port = (uint16_t)q->offset;
        struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(k->port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
        error = begin(k, (struct sockaddr *)&four, sizeof four);
        if (error)
            error = connect_six(k);
    }
    if (error)
        channel_finish(c, code_of(error), error);
}

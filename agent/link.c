/* The connection to the host: accepting, the handshake, frames in and out. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "agent.h"

enum {
    IN_SIZE = HEADER_SIZE + 8 + MAX_DATA,
    CONTROL_SIZE = 24576,
    OUT_SIZE = CONTROL_SIZE + HEADER_SIZE + 8 + MAX_DATA,
    GUESTS = 4, /* connections that have not shaken hands yet */
};

uint8_t instance[NONCE_SIZE];

static struct source listener;

static struct guest {
    struct source source;
    uint8_t bytes[HEADER_SIZE + HELLO_SIZE];
    uint32_t length;
} guests[GUESTS];
static int next_guest;

static struct source host = {.fd = -1};
/* Mappings of their own: their memory is given back when idle, and must not share a page with anything else. */
static uint8_t *in_bytes, *out_bytes;
static uint32_t in_length, out_start, out_end;
static uint8_t *big; /* payload of a request that does not fit into in_bytes */
static struct header big_header;
static uint32_t big_length;
static bool pong_due;
static uint64_t pong_token;
static uint64_t last_pumped; /* id of the channel that was served last; the next one starts the next round */

static void read_host(struct source *, uint32_t events);

/* Out ------------------------------------------------------------------------------------------------------------- */

static void put_header(uint8_t *p, uint8_t type, uint8_t stream, uint64_t id, uint32_t length)
{
    put64(put16(put8(put8(put32(p, length), type), stream), 0), id);
}

bool link_connected(void) { return host.fd >= 0; }

bool link_room(uint32_t control)
{
    return host.fd >= 0 && out_end - out_start + control + HEADER_SIZE <= CONTROL_SIZE;
}

/* Writes what is buffered, then the extra part; keeps the rest of both. The caller made sure that it fits. */
static void write_out(const uint8_t *head, uint32_t head_length, const uint8_t *bytes, uint32_t length)
{
    struct iovec parts[3] = {
        {out_bytes + out_start, out_end - out_start},
        {(void *)(uintptr_t)head, head_length},
        {(void *)(uintptr_t)bytes, length},
    };
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    ssize_t sent = sendmsg(host.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR)
            return link_close(0);
        sent = 0;
    }
    size_t done = (size_t)sent;
    size_t from_buffer = done < parts[0].iov_len ? done : parts[0].iov_len;
    out_start += (uint32_t)from_buffer;
    done -= from_buffer;
    if (out_start == out_end)
        out_start = out_end = 0;
    if (out_start > 0 && OUT_SIZE - out_end < head_length + length) {
        memmove(out_bytes, out_bytes + out_start, out_end - out_start);
        out_end -= out_start;
        out_start = 0;
    }
    for (int i = 1; i < 3; i++) {
        size_t skip = done < parts[i].iov_len ? done : parts[i].iov_len;
        done -= skip;
        if (skip == parts[i].iov_len)
            continue;
        memcpy(out_bytes + out_end, (uint8_t *)parts[i].iov_base + skip, parts[i].iov_len - skip);
        out_end += (uint32_t)(parts[i].iov_len - skip);
    }
}

void link_put(uint8_t type, uint8_t stream, uint64_t id, const void *payload, uint32_t length)
{
    if (host.fd < 0)
        return;
    if (OUT_SIZE - out_end < HEADER_SIZE + length) {
        memmove(out_bytes, out_bytes + out_start, out_end - out_start);
        out_end -= out_start;
        out_start = 0;
    }
    put_header(out_bytes + out_end, type, stream, id, length);
    if (length)
        memcpy(out_bytes + out_end + HEADER_SIZE, payload, length);
    out_end += HEADER_SIZE + length;
}

bool link_send_data(uint8_t stream, uint64_t id, uint64_t offset, const uint8_t *bytes, uint32_t length)
{
    if (!link_room(0))
        return false;
    uint8_t head[HEADER_SIZE + 8];
    put_header(head, DATA, stream, id, length + 8);
    put64(head + HEADER_SIZE, offset);
    write_out(head, sizeof head, bytes, length);
    return host.fd >= 0;
}

/* Serves each channel once, in turn. Returns false when one of them found no room. */
static bool serve_channels(void)
{
    if (pong_due && link_room(8)) {
        uint8_t token[8];
        put64(token, pong_token);
        link_put(PONG, 0, 0, token, sizeof token);
        pong_due = false;
    }
    struct channel *first = channel_find(last_pumped);
    first = first ? first->next : channels.next;
    struct channel *c = first;
    do {
        if (c != &channels) {
            if (!channel_pump(c))
                return false;
            last_pumped = c->id;
        }
        c = c->next;
    } while (c != first && host.fd >= 0);
    return true;
}

/* Goes on until the socket is full or nothing is due: only then will something wake us. */
void link_flush(void)
{
    while (host.fd >= 0) {
        bool served = serve_channels();
        if (host.fd >= 0 && out_end > out_start)
            write_out(NULL, 0, NULL, 0);
        if (host.fd < 0)
            return;
        if (out_end > out_start)
            /* A host that does not read its answers is not listened to: nothing may queue here. */
            return source_watch(&host, EPOLLOUT | (link_room(MAX_ENTRY + 256) ? EPOLLIN : 0));
        if (served)
            return source_watch(&host, EPOLLIN);
    }
}

/* Closing --------------------------------------------------------------------------------------------------------- */

static void say_goodbye(int fd, uint32_t reason)
{
    uint8_t frame[HEADER_SIZE + 4];
    put_header(frame, GOODBYE, 0, 0, 4);
    put32(frame + HEADER_SIZE, reason);
    (void)!send(fd, frame, sizeof frame, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void link_close(uint32_t reason)
{
    if (host.fd < 0)
        return;
    /* In the middle of a frame a goodbye would only be noise. */
    if (reason && out_start == out_end)
        say_goodbye(host.fd, reason);
    source_close(&host);
    in_length = out_start = out_end = 0;
    pong_due = false;
    if (big)
        munmap(big, big_header.length);
    big = NULL;
    for (struct channel *c = channels.next; c != &channels; c = c->next) {
        if (c->dead)
            continue;
        if (channel_is_command(c))
            command_link_lost(c);
        else {
            if (c->kind->cancel)
                c->kind->cancel(c);
            channel_kill(c);
        }
    }
}

void link_fail(void) { link_close(PROTOCOL_ERROR); }

void link_release_memory(void)
{
    if (in_length == 0)
        madvise(in_bytes, IN_SIZE, MADV_DONTNEED);
    if (out_start == out_end)
        madvise(out_bytes, OUT_SIZE, MADV_DONTNEED);
}

/* In -------------------------------------------------------------------------------------------------------------- */

static void channel_data(struct channel *c, const struct header *h, const uint8_t *payload)
{
    uint64_t offset = get64(payload);
    const uint8_t *bytes = payload + 8;
    uint32_t length = h->length - 8;
    if (!c->has_input || c->in.eof)
        return link_fail();
    struct input *in = &c->in;
    if (offset > in->ring.end || in->ring.end - offset > INPUT_WINDOW)
        return link_fail();
    uint64_t known = in->ring.end - offset; /* repeated after a lost link */
    if (known >= length)
        return;
    bytes += known;
    length -= (uint32_t)known;
    if (in->ring.end + length - in->acked_to_host > INPUT_WINDOW)
        return link_fail();
    c->kind->data(c, bytes, length);
}

static void channel_ack(struct channel *c, const struct header *h, uint64_t offset)
{
    int i = h->stream - 1;
    if (i < 0 || i >= c->streams)
        return link_fail();
    struct stream *s = &c->out[i];
    if (offset < s->ring.acked || offset > s->sent)
        return link_fail();
    ring_ack(&s->ring, offset);
    if (c->kind->room)
        c->kind->room(c, i);
}

static void channel_frame(const struct header *h, const uint8_t *payload)
{
    struct channel *c = channel_find(h->id);
    if (!c)
        return;
    if (h->type == RELEASE)
        return channel_is_command(c) ? command_frame(c, h->type, payload) : (void)0;
    /* What is over can still be acknowledged, or no longer wanted. */
    if (!c->attached || (c->finished && h->type != ACK && h->type != DETACH && h->type != CANCEL))
        return;
    switch (h->type) {
    case DATA:
        return channel_data(c, h, payload);
    case EOF_:
        if (!c->has_input || get64(payload) != c->in.ring.end)
            return link_fail();
        if (!c->in.eof)
            c->kind->eof(c);
        return;
    case ACK:
        return channel_ack(c, h, get64(payload));
    case CANCEL:
        if (channel_is_command(c))
            return link_fail();
        if (c->finished) /* it came too late: the result says what was done */
            return;
        if (c->kind->cancel)
            c->kind->cancel(c);
        return channel_finish(c, CANCELED, 0);
    default:
        return channel_is_command(c) ? command_frame(c, h->type, payload) : link_fail();
    }
}

/* The payload size that a frame must have, exactly or at least; false: no such frame from a host. */
static bool well_formed(const struct header *h)
{
    bool exact = true;
    uint32_t size;
    uint8_t stream = 0;
    switch (h->type) {
    case PING: size = 8; break;
    case EXEC: size = EXEC_FIXED; exact = false; break;
    case PARK: size = PARK_FIXED + EXEC_FIXED; exact = false; break;
    case ATTACH: size = 16; break;
    case COMMANDS: size = 0; break;
    case DATA: size = 9; exact = false; break;
    case EOF_: size = 8; break;
    case ACK: size = 8; stream = h->stream; break;
    case SIGNAL: size = 8; break;
    case END: case RESIZE: size = 4; break;
    case DETACH: case RELEASE: case CANCEL: size = 0; break;
    default:
        if (h->type != BIND && (h->type < READ || h->type > CONNECT))
            return false;
        size = FILE_FIXED;
        exact = false;
    }
    if (h->stream != stream || (h->id == 0) != (h->type == PING))
        return false;
    if (h->length > (h->type == EXEC || h->type == PARK ? MAX_REQUEST : h->type == DATA ? MAX_DATA + 8 : MAX_CONTROL))
        return false;
    return exact ? h->length == size : h->length >= size;
}

static void handle(const struct header *h, const uint8_t *payload)
{
    if (h->type == PING) {
        pong_due = true;
        pong_token = get64(payload);
    } else if (h->type >= DATA) {
        channel_frame(h, payload);
    } else if (h->type == ATTACH) {
        command_attach(h->id, get64(payload), get64(payload + 8));
    } else if (channel_find(h->id)) {
        /* The host may not know whether its EXEC arrived before a link broke, so that one is answered. RESULT ends the
         * answer's channel, not the command. */
        if (h->type == EXEC && !channel_find(h->id)->attached)
            channel_refuse(h->id, DUPLICATE, 0);
        else
            link_fail();
    } else if (h->type == EXEC) {
        command_exec(h->id, payload, h->length);
    } else if (h->type == PARK) {
        parked_request(h->id, payload, h->length);
    } else if (h->type == COMMANDS) {
        command_list(h->id);
    } else {
        file_request(h->type, h->id, payload, h->length);
    }
}

static struct header get_header(const uint8_t *p)
{
    return (struct header){.length = get32(p), .type = p[4], .stream = p[5], .id = get64(p + 8)};
}

/* Handles the complete frames in in_bytes. */
static void parse(void)
{
    uint32_t start = 0;
    while (host.fd >= 0 && in_length - start >= HEADER_SIZE) {
        struct header h = get_header(in_bytes + start);
        if (get16(in_bytes + start + 6) != 0 || !well_formed(&h))
            return link_fail();
        uint32_t have = in_length - start - HEADER_SIZE;
        if (h.length > IN_SIZE - HEADER_SIZE) {
            big = mmap(NULL, h.length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (big == MAP_FAILED) {
                big = NULL;
                return link_close(SHUTTING_DOWN);
            }
            big_header = h;
            big_length = have < h.length ? have : h.length;
            memcpy(big, in_bytes + start + HEADER_SIZE, big_length);
            start += HEADER_SIZE + big_length;
            break; /* it cannot be complete: it is larger than what was read */
        }
        if (have < h.length)
            break;
        handle(&h, in_bytes + start + HEADER_SIZE);
        start += HEADER_SIZE + h.length;
    }
    if (host.fd < 0)
        return;
    memmove(in_bytes, in_bytes + start, in_length - start);
    in_length -= start;
}

static void read_big(void)
{
    ssize_t count = read(host.fd, big + big_length, big_header.length - big_length);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR))
        return link_close(0);
    if (count > 0)
        big_length += (uint32_t)count;
    if (big_length < big_header.length)
        return;
    uint8_t *payload = big;
    struct header h = big_header;
    big = NULL;
    handle(&h, payload);
    munmap(payload, h.length);
}

static void read_host(struct source *source, uint32_t events)
{
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return; /* writable: link_flush follows every turn */
    if (big)
        return read_big();
    ssize_t count = read(source->fd, in_bytes + in_length, IN_SIZE - in_length);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR))
        return link_close(0);
    if (count > 0) {
        in_length += (uint32_t)count;
        parse();
    }
}

/* The handshake --------------------------------------------------------------------------------------------------- */

static void welcome(struct guest *g)
{
    struct header h = get_header(g->bytes);
    const uint8_t *hello = g->bytes + HEADER_SIZE;
    if (h.length != HELLO_SIZE || h.type != HELLO || h.stream || get16(g->bytes + 6) || h.id || get32(hello) != MAGIC)
        return source_close(&g->source);
    bool common = get16(hello + 4) <= GENERATION && GENERATION <= get16(hello + 6);
    uint8_t answer[HEADER_SIZE + 8 + 2 * NONCE_SIZE + sizeof AGENT_VERSION - 1];
    put_header(answer, HELLO, 0, 0, sizeof answer - HEADER_SIZE);
    uint8_t *p = put16(put16(put32(answer + HEADER_SIZE, MAGIC), common ? GENERATION : 0), 0);
    p = put_bytes(put_bytes(p, hello + 8, NONCE_SIZE), instance, NONCE_SIZE);
    put_bytes(p, AGENT_VERSION, sizeof AGENT_VERSION - 1);
    if (send(g->source.fd, answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof answer)
        return source_close(&g->source);
    if (!common) {
        say_goodbye(g->source.fd, NO_COMMON_GENERATION);
        return source_close(&g->source);
    }
    link_close(SUPERSEDED);
    int fd = g->source.fd;
    source_mute(&g->source);
    g->source.fd = -1;
    source_open(&host, fd, read_host);
    source_watch(&host, EPOLLIN);
}

static void read_guest(struct source *source, uint32_t events)
{
    (void)events;
    struct guest *g = container_of(source, struct guest, source);
    ssize_t count = read(source->fd, g->bytes + g->length, sizeof g->bytes - g->length);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (count <= 0)
        return source_close(source);
    g->length += (uint32_t)count;
    if (g->length > 4 && g->bytes[4] != HELLO)
        return source_close(source);
    if (g->length == sizeof g->bytes)
        welcome(g);
}

static void add_guest(int fd)
{
    struct guest *g = &guests[next_guest];
    next_guest = (next_guest + 1) % GUESTS;
    source_close(&g->source); /* the oldest makes way */
    g->length = 0;
    source_open(&g->source, fd, read_guest);
    source_watch(&g->source, EPOLLIN);
}

#ifdef K8E_POD
void link_admit(int fd) { add_guest(fd); }
#endif

static void accept_guest(struct source *source, uint32_t events)
{
    (void)events;
    int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0)
        add_guest(fd);
}

static uint8_t *map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die("no memory");
    return memory;
}

void link_listen(int fd)
{
    in_bytes = map(IN_SIZE);
    out_bytes = map(OUT_SIZE);
    for (int i = 0; i < GUESTS; i++)
        guests[i].source.fd = -1;
    source_open(&listener, fd, accept_guest);
    source_watch(&listener, EPOLLIN);
}

/* Channels: what all operations share. State is kept here; channel_pump turns it into frames when there is room. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"

struct channel channels = {.previous = &channels, .next = &channels};
bool work_to_do;

struct channel *channel_find(uint64_t id)
{
    for (struct channel *c = channels.next; c != &channels; c = c->next)
        if (c->id == id && !c->dead)
            return c;
    return NULL;
}

void channel_init(struct channel *c, const struct kind *kind, uint64_t id)
{
    c->kind = kind;
    c->id = id;
    c->attached = true;
    c->forget = !channel_is_command(c);
    for (int i = 0; i < 2; i++)
        c->out[i].source.fd = -1;
    c->in.source.fd = -1;
    c->previous = channels.previous;
    c->next = &channels;
    c->previous->next = c->next->previous = c;
}

/* Frees what every kind has; kinds with more do the rest in drop. */
static void dispose(struct channel *c)
{
    if (c->kind->drop)
        c->kind->drop(c);
    for (int i = 0; i < 2; i++) {
        source_close(&c->out[i].source);
        ring_free(&c->out[i].ring);
    }
    source_close(&c->in.source);
    ring_free(&c->in.ring);
    free(c->result);
    c->previous->next = c->next;
    c->next->previous = c->previous;
    free(c);
}

void channel_kill(struct channel *c)
{
    c->dead = true;
    c->attached = c->busy = false;
    for (int i = 0; i < 2; i++)
        source_close(&c->out[i].source);
    source_close(&c->in.source);
}

void channels_sweep(void)
{
    for (struct channel *c = channels.next, *next; c != &channels; c = next) {
        next = c->next;
        if (c->dead && !(channel_is_command(c) && command_unreaped(c)))
            dispose(c);
    }
}

static const struct kind refusal = {0};

void channel_refuse(uint64_t id, uint32_t code, int error)
{
    struct channel *c = calloc(1, sizeof *c);
    if (!c) {
        link_close(SHUTTING_DOWN); /* no memory for a refusal: the host will come back */
        return;
    }
    channel_init(c, &refusal, id);
    channel_finish(c, code, error);
}

void channel_opened(struct channel *c, const void *payload, uint32_t length)
{
    memcpy(c->opened_payload, payload, length);
    c->opened_length = length;
    c->opened = true;
}

void channel_finish(struct channel *c, uint32_t code, int error)
{
    c->code = code;
    c->error = (uint32_t)error;
    c->finished = true;
    c->busy = false;
    for (int i = 0; i < c->streams; i++)
        stream_end(&c->out[i]);
}

void channel_result(struct channel *c, const void *bytes, uint32_t length)
{
    free(c->result);
    c->result = malloc(length);
    if (!c->result)
        return channel_finish(c, NO_MEMORY, ENOMEM);
    memcpy(c->result, bytes, length);
    c->result_length = length;
}

static void put_offset(uint8_t type, uint8_t stream, uint64_t id, uint64_t offset)
{
    uint8_t payload[8];
    put64(payload, offset);
    link_put(type, stream, id, payload, sizeof payload);
}

/* Returns false when the socket is full. */
static bool pump_stream(struct channel *c, int i)
{
    struct stream *s = &c->out[i];
    while (s->ring.bytes && s->sent < s->ring.end) {
        uint8_t *at;
        uint32_t count = ring_bytes(&s->ring, &s->sent, &at);
        if (count > MAX_DATA)
            count = MAX_DATA;
        if (!link_send_data((uint8_t)(i + 1), c->id, s->sent, at, count))
            return false;
        s->sent += count;
    }
    if (s->ended && !s->eof_sent) {
        put_offset(EOF_, (uint8_t)(i + 1), c->id, s->ring.end);
        s->eof_sent = true;
    }
    return true;
}

bool channel_pump(struct channel *c)
{
    if (!c->attached)
        return true;
    if (!link_room(MAX_ENTRY + 256))
        return false;
    if (c->opened) {
        link_put(OPENED, 0, c->id, c->opened_payload, c->opened_length);
        c->opened = false;
        c->told = true;
    }
    if (c->detach_due) {
        uint8_t payload[8];
        put32(put32(payload, DETACHED), 0);
        link_put(RESULT, 0, c->id, payload, sizeof payload);
        command_link_lost(c);
        return true;
    }
    if (c->has_input && c->told) {
        struct input *in = &c->in;
        if (in->ack_due || in->ring.acked - in->acked_to_host >= INPUT_WINDOW / 4) {
            put_offset(ACK, 0, c->id, in->ring.acked);
            in->acked_to_host = in->ring.acked;
            in->ack_due = false;
        }
        if (in->gone && !in->gone_sent) {
            put_offset(EOF_, 0, c->id, in->ring.acked);
            in->gone_sent = true;
        }
    }
    bool failed = c->finished && c->code != OK;
    bool delivered = c->told || c->streams == 0;
    for (int i = 0; i < c->streams && c->told && !failed; i++) {
        if (!pump_stream(c, i))
            return false;
        delivered = delivered && c->out[i].eof_sent;
    }
    if (c->finished && (delivered || failed)) {
        uint8_t payload[8 + MAX_ENTRY];
        uint8_t *p = put32(put32(payload, c->code), c->error);
        if (c->result_length)
            p = put_bytes(p, c->result, c->result_length);
        link_put(RESULT, 0, c->id, payload, (uint32_t)(p - payload));
        c->attached = false;
        if (c->forget)
            channel_kill(c);
    }
    return true;
}

void stream_end(struct stream *s)
{
    source_close(&s->source);
    s->ended = true;
}

bool stream_fill(struct channel *c, struct stream *s)
{
    if (s->source.fd < 0)
        return false;
    uint8_t *at;
    uint32_t space = ring_space(&s->ring, !c->attached, &at);
    if (space == 0) {
        source_mute(&s->source);
        return false;
    }
    ssize_t count = read(s->source.fd, at, space);
    if (count > 0) {
        ring_wrote(&s->ring, (uint32_t)count, !c->attached);
        source_watch(&s->source, EPOLLIN);
        return true;
    }
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
        source_watch(&s->source, EPOLLIN);
        return false;
    }
    /* EIO is how a terminal says that its other end is closed. */
    s->error = count < 0 && errno != EIO ? errno : 0;
    stream_end(s);
    return false;
}

/* Input ----------------------------------------------------------------------------------------------------------- */

void input_gone(struct input *in)
{
    source_close(&in->source);
    in->gone = true;
    ring_ack(&in->ring, in->ring.end);
}

static void finish_input(struct input *in)
{
    if (in->terminal) {
        /* A terminal has no end; ^D is what a person would type. */
        if (write(in->source.fd, "\x04", 1) < 0 && errno == EAGAIN) {
            source_watch(&in->source, EPOLLOUT);
            return;
        }
        source_mute(&in->source);
        in->gone = in->gone_sent = true;
        return;
    }
    shutdown(in->source.fd, SHUT_WR); /* a socket has another half; a pipe has not, and does not mind */
    source_close(&in->source);
    in->gone = in->gone_sent = true; /* the host knows: it said so */
}

static void flush_input(struct input *in)
{
    while (in->ring.acked < in->ring.end) {
        uint64_t offset = in->ring.acked;
        uint8_t *at;
        uint32_t count = ring_bytes(&in->ring, &offset, &at);
        ssize_t written = write(in->source.fd, at, count);
        if (written < 0) {
            if (errno == EAGAIN || errno == EINTR)
                return source_watch(&in->source, EPOLLOUT);
            return input_gone(in);
        }
        ring_ack(&in->ring, offset + (uint64_t)written);
    }
    if (in->eof)
        return finish_input(in);
    if (!in->terminal)
        source_watch(&in->source, 0); /* only to hear that the reader has gone */
    else
        source_mute(&in->source);
}

void input_ready(struct source *source, uint32_t events)
{
    struct input *in = container_of(source, struct input, source);
    if (events & (EPOLLERR | EPOLLHUP))
        return input_gone(in);
    flush_input(in);
}

void input_data(struct channel *c, const uint8_t *bytes, uint32_t length)
{
    struct input *in = &c->in;
    if (in->held && in->ring.bytes)
        return ring_put(&in->ring, bytes, length);
    if (in->gone || in->source.fd < 0) {
        in->ring.end += length;
        return ring_ack(&in->ring, in->ring.end);
    }
    ring_put(&in->ring, bytes, length);
    flush_input(in);
}

void input_release(struct input *in)
{
    in->held = false;
    if (in->source.fd >= 0 && !in->gone && (in->ring.acked < in->ring.end || in->eof))
        flush_input(in);
}

void input_eof(struct channel *c)
{
    struct input *in = &c->in;
    in->eof = true;
    if (!in->gone && in->source.fd >= 0)
        flush_input(in);
}

uint32_t code_of(int error)
{
    switch (error) {
    case 0: return OK;
    case ENOENT: case ENXIO: case ENODEV: return NOT_FOUND;
    case EACCES: case EPERM: return DENIED;
    case EEXIST: return EXISTS;
    case ENOTDIR: return NOT_DIRECTORY;
    case EISDIR: return IS_DIRECTORY;
    case ENAMETOOLONG: return NAME_TOO_LONG;
    case ELOOP: return LINK_LOOP;
    case ENOSPC: case EDQUOT: return NO_SPACE;
    case EROFS: return READ_ONLY;
    case ENOTEMPTY: return NOT_EMPTY;
    case EXDEV: return CROSS_DEVICE;
    case EBUSY: case ETXTBSY: return BUSY;
    case EMFILE: case ENFILE: case EAGAIN: return TOO_MANY;
    case ENOMEM: return NO_MEMORY;
    case EINVAL: return INVALID;
    case EIO: return IO;
    case ECONNREFUSED: return REFUSED;
    case ENOSYS: case EOPNOTSUPP: return UNSUPPORTED;
    case E2BIG: case EFBIG: return TOO_BIG;
    case ENOEXEC: return NOT_EXECUTABLE;
    default: return OTHER;
    }
}

/* Authenticated connections: records are opened into the link's end of a socketpair, what comes from there is sealed.
 *
 * Each direction holds what it has until the other side takes it, and reads no more meanwhile: the link's flow control
 * and the kernel's reach through. A record that does not open ends the connection. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "pod.h"

enum {
    CARRIERS = 4,
    RECORD = PREFIX + MESSAGE_LIMIT,
    RECORDS = 2, /* the largest frame of the link takes more than one */
    BUFFER = RECORDS * RECORD,
    TURNS = 4,           /* reads in one go, so that no connection holds up the loop */
    PARTING_MS = 5000,   /* for a host that was let go to take the last words */
};

static struct carrier {
    struct source net, link;
    struct cipher in, out;
    uint8_t *in_bytes, *out_bytes;
    uint32_t in_start, in_end;     /* sealed, from the network */
    uint32_t text_start, text_end; /* opened, in in_bytes too, for the link */
    uint32_t out_start, out_end;   /* sealed, for the network */
    bool deaf;                     /* the link has closed its end */
    uint64_t opened, parting;      /* when; until when it may stay, 0: the link is there */
} carriers[CARRIERS];

static bool in_use(const struct carrier *c) { return c->in_bytes != NULL; }

static void drop(struct carrier *c)
{
    if (!in_use(c))
        return;
    source_close(&c->net);
    source_close(&c->link);
    munmap(c->in_bytes, BUFFER);
    munmap(c->out_bytes, BUFFER);
    explicit_bzero(c, sizeof *c);
    c->net.fd = c->link.fd = -1;
}

static bool blocked(ssize_t count) { return count < 0 && (errno == EAGAIN || errno == EINTR); }

/* Opens the next record if it is here. False: what is here is none of ours. */
static bool open_record(struct carrier *c)
{
    uint32_t have = c->in_end - c->in_start;
    if (have < PREFIX)
        return true;
    uint8_t *record = c->in_bytes + c->in_start;
    uint32_t length = get16(record);
    if (length <= TAG_SIZE)
        return false;
    if (have < PREFIX + length)
        return true;
    if (!cipher_open(&c->in, record + PREFIX, length))
        return false;
    c->text_start = c->in_start + PREFIX;
    c->text_end = c->text_start + length - TAG_SIZE;
    c->in_start += PREFIX + length;
    return true;
}

/* Network to link. False: the connection is over. */
static bool receive(struct carrier *c)
{
    for (int turns = 0; !c->deaf;) {
        if (c->text_start < c->text_end) {
            ssize_t count = send(c->link.fd, c->in_bytes + c->text_start, c->text_end - c->text_start, MSG_NOSIGNAL);
            if (blocked(count))
                return true;
            c->deaf = count < 0;
            c->text_start += count < 0 ? 0 : (uint32_t)count;
            continue;
        }
        c->text_start = c->text_end = 0;
        if (!open_record(c))
            return false;
        if (c->text_start < c->text_end)
            continue;
        if (turns++ == TURNS)
            return true;
        if (c->in_start > 0) {
            memmove(c->in_bytes, c->in_bytes + c->in_start, c->in_end - c->in_start);
            c->in_end -= c->in_start;
            c->in_start = 0;
        }
        ssize_t count = read(c->net.fd, c->in_bytes + c->in_end, BUFFER - c->in_end);
        if (blocked(count))
            return true;
        if (count <= 0)
            return false;
        c->in_end += (uint32_t)count;
    }
    return true;
}

/* Seals what was read behind each record's prefix. */
static bool seal_records(struct carrier *c, size_t count)
{
    c->out_start = c->out_end = 0;
    while (count > 0) {
        size_t length = count < TEXT_LIMIT ? count : TEXT_LIMIT;
        uint8_t *record = c->out_bytes + c->out_end;
        if (!cipher_seal(&c->out, record + PREFIX, length))
            return false;
        put16(record, (uint16_t)(length + TAG_SIZE));
        c->out_end += (uint32_t)(PREFIX + length + TAG_SIZE);
        count -= length;
    }
    return true;
}

/* Link to network. False: the connection is over. */
static bool transmit(struct carrier *c)
{
    for (int turns = 0;;) {
        if (c->out_start < c->out_end) {
            ssize_t count = send(c->net.fd, c->out_bytes + c->out_start, c->out_end - c->out_start, MSG_NOSIGNAL);
            if (blocked(count))
                return true;
            if (count < 0)
                return false;
            c->out_start += (uint32_t)count;
            continue;
        }
        if (turns++ == TURNS)
            return true;
        struct iovec parts[RECORDS];
        for (int i = 0; i < RECORDS; i++)
            parts[i] = (struct iovec){c->out_bytes + i * RECORD + PREFIX, TEXT_LIMIT};
        ssize_t count = readv(c->link.fd, parts, RECORDS);
        if (blocked(count))
            return true;
        if (count <= 0 || !seal_records(c, (size_t)count)) /* the link has let it go, and all of it was sent */
            return false;
    }
}

static void watch_only(struct source *s, uint32_t events)
{
    /* Not watched at all without events: hang-ups come unasked, and would come again and again. */
    if (events)
        source_watch(s, events);
    else
        source_mute(s);
}

static void advance(struct carrier *c)
{
    if (!receive(c) || !transmit(c))
        return drop(c);
    if (c->deaf && !c->parting) {
        c->parting = now_ms() + PARTING_MS;
        tick_soon();
    }
    bool text = !c->deaf && c->text_start < c->text_end, out = c->out_start < c->out_end;
    watch_only(&c->net, (out ? EPOLLOUT : 0) | (text || c->deaf ? 0 : EPOLLIN));
    watch_only(&c->link, (text ? EPOLLOUT : 0) | (out ? 0 : EPOLLIN));
}

static void net_ready(struct source *source, uint32_t events)
{
    (void)events;
    advance(container_of(source, struct carrier, net));
}

static void link_ready(struct source *source, uint32_t events)
{
    struct carrier *c = container_of(source, struct carrier, link);
    if (events & EPOLLHUP)
        c->deaf = true;
    advance(c);
}

static struct carrier *find_place(void)
{
    struct carrier *oldest = &carriers[0];
    for (struct carrier *c = carriers; c < carriers + CARRIERS; c++) {
        if (!in_use(c))
            return c;
        if (c->parting ? !oldest->parting || c->parting < oldest->parting
                       : !oldest->parting && c->opened < oldest->opened)
            oldest = c;
    }
    drop(oldest);
    return oldest;
}

static uint8_t *map(void)
{
    void *memory = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void carrier_open(int fd, const struct cipher *in, const struct cipher *out, const uint8_t *text, uint32_t length)
{
    int ends[2];
    struct carrier *c = find_place();
    uint8_t *in_bytes = map(), *out_bytes = map();
    if (!in_bytes || !out_bytes || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0) {
        if (in_bytes)
            munmap(in_bytes, BUFFER);
        if (out_bytes)
            munmap(out_bytes, BUFFER);
        close(fd);
        return;
    }
    *c = (struct carrier){
        .in = *in, .out = *out, .in_bytes = in_bytes, .out_bytes = out_bytes, .text_end = length, .opened = now_ms()};
    memcpy(in_bytes, text, length);
    source_open(&c->net, fd, net_ready);
    source_open(&c->link, ends[0], link_ready);
    link_admit(ends[1]);
    advance(c);
}

bool carriers_tick(void)
{
    bool waiting = false;
    for (struct carrier *c = carriers; c < carriers + CARRIERS; c++) {
        if (in_use(c) && c->parting && c->parting <= now_ms())
            drop(c);
        waiting = waiting || (in_use(c) && c->parting);
    }
    return waiting;
}

void pod_flush(void)
{
    for (struct carrier *c = carriers; c < carriers + CARRIERS; c++)
        if (in_use(c))
            transmit(c);
}

void pod_release_memory(void)
{
    for (struct carrier *c = carriers; c < carriers + CARRIERS; c++) {
        if (in_use(c) && c->in_start == c->in_end && c->text_start == c->text_end) {
            c->in_start = c->in_end = 0;
            madvise(c->in_bytes, BUFFER, MADV_DONTNEED);
        }
        if (in_use(c) && c->out_start == c->out_end)
            madvise(c->out_bytes, BUFFER, MADV_DONTNEED);
    }
}

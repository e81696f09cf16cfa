/* Unauthenticated peers: they have not proved yet that they are the gateway. They cost a slot, a few bytes of memory, and
 * four operations on the curve once they have sent a key. So both are rationed by address: a neighbour that floods the
 * port takes its own slots and its own turns, not the gateway's. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "pod.h"

enum {
    PEERS = 16,
    GREETING_MS = 5000,     /* to prove it, from the beginning of the connection */
    FIRST_LIMIT = 256,      /* the first record, which is a HELLO */
    ADDRESSES = 64,         /* remembered */
    ANSWER_COST_MS = 20,    /* an address gets one answer in so many ms that leads to nothing */
    ANSWER_CREDIT_MS = 320, /* and a few at once */
    /* A gateway whose machine is gone says no word of it; its commands go on when that is noticed. */
    SILENCE_S = 15,
    SILENCE_PROBES = 3,
    SILENCE_PAUSE_S = 5,
};

static const char channel_name[] = "k8e pod channel 1";
static uint8_t prologue[sizeof channel_name - 1 + NONCE_SIZE];
static struct responder responder = {.prologue = prologue, .prologue_length = sizeof prologue};
static struct source listener, timer;
static bool ticking;

static struct peer {
    struct source source;
    struct in6_addr address;
    uint64_t since;
    bool answered;
    struct cipher in, out;
    uint32_t length;
    uint8_t bytes[PREFIX + FIRST_LIMIT];
} peers[PEERS];

/* When all of its answers so far will have been paid for. */
static struct account {
    struct in6_addr address;
    uint64_t paid;
} accounts[ADDRESSES];

static bool same(const struct in6_addr *a, const struct in6_addr *b) { return memcmp(a, b, sizeof *a) == 0; }

static struct account *find_account(const struct in6_addr *address)
{
    struct account *oldest = &accounts[0];
    for (struct account *a = accounts; a < accounts + ADDRESSES; a++) {
        if (same(&a->address, address))
            return a;
        if (a->paid < oldest->paid)
            oldest = a;
    }
    *oldest = (struct account){.address = *address};
    return oldest;
}

static bool charge(const struct in6_addr *address)
{
    struct account *a = find_account(address);
    uint64_t now = now_ms();
    if (a->paid < now)
        a->paid = now;
    if (a->paid - now > ANSWER_CREDIT_MS - ANSWER_COST_MS)
        return false;
    a->paid += ANSWER_COST_MS;
    return true;
}

static void forget(struct peer *s)
{
    source_close(&s->source);
    explicit_bzero(&s->in, sizeof s->in);
    explicit_bzero(&s->out, sizeof s->out);
}

static bool make_keys(struct key_pair *keys)
{
    uint8_t secret[KEY_SIZE];
    bool made = getrandom(secret, sizeof secret, 0) == (ssize_t)sizeof secret && key_pair_make(keys, secret);
    explicit_bzero(secret, sizeof secret);
    return made;
}

/* The first message is here, and is a key by its size. */
static bool answer(struct peer *s)
{
    uint8_t message[PREFIX + ANSWER_SIZE];
    struct key_pair ephemeral;
    if (!charge(&s->address) || !make_keys(&ephemeral))
        return false;
    bool answered = noise_answer(&responder, &ephemeral, s->bytes + PREFIX, KEY_SIZE, NULL, 0, message + PREFIX, &s->in,
                                 &s->out);
    explicit_bzero(&ephemeral, sizeof ephemeral);
    if (!answered)
        return false;
    put16(message, ANSWER_SIZE);
    s->length = 0;
    s->answered = true;
    return send(s->source.fd, message, sizeof message, MSG_NOSIGNAL) == (ssize_t)sizeof message;
}

/* The first record is here. If it opens, this is the gateway. */
static bool admit(struct peer *s, uint32_t length)
{
    if (!cipher_open(&s->in, s->bytes + PREFIX, length))
        return false;
    struct account *a = find_account(&s->address);
    if (a->paid >= ANSWER_COST_MS)
        a->paid -= ANSWER_COST_MS;
    int fd = s->source.fd;
    source_mute(&s->source);
    s->source.fd = -1;
    carrier_open(fd, &s->in, &s->out, s->bytes + PREFIX, length - TAG_SIZE);
    forget(s);
    return true;
}

static void read_peer(struct source *source, uint32_t events)
{
    (void)events;
    struct peer *s = container_of(source, struct peer, source);
    while (source->fd >= 0) {
        /* No byte beyond the message: a record that follows is the carrier's to read. */
        uint32_t length = s->length < PREFIX ? 0 : get16(s->bytes);
        ssize_t count = read(source->fd, s->bytes + s->length, PREFIX + length - s->length);
        if (count < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (count <= 0)
            return forget(s);
        s->length += (uint32_t)count;
        if (s->length < PREFIX)
            continue;
        length = get16(s->bytes);
        bool possible = s->answered ? length > TAG_SIZE && length <= FIRST_LIMIT : length == KEY_SIZE;
        if (!possible || (s->length == PREFIX + length && !(s->answered ? admit(s, length) : answer(s))))
            return forget(s);
    }
}

static void set_option(int fd, int level, int name, int value)
{
    setsockopt(fd, level, name, &value, sizeof value);
}

/* The oldest of the address that has most of them. */
static struct peer *find_place(void)
{
    struct peer *victim = NULL;
    int most = 0;
    for (struct peer *s = peers; s < peers + PEERS; s++) {
        if (s->source.fd < 0)
            return s;
        int count = 0;
        for (struct peer *other = peers; other < peers + PEERS; other++)
            count += same(&other->address, &s->address);
        if (count > most || (count == most && s->since < victim->since)) {
            most = count;
            victim = s;
        }
    }
    forget(victim);
    return victim;
}

static struct in6_addr plain_address(const struct sockaddr_storage *from)
{
    struct in6_addr address = {0};
    if (from->ss_family == AF_INET6)
        return ((const struct sockaddr_in6 *)(const void *)from)->sin6_addr;
    if (from->ss_family == AF_INET)
        memcpy(address.s6_addr, &((const struct sockaddr_in *)(const void *)from)->sin_addr, 4);
    return address;
}

static void accept_peers(struct source *source, uint32_t events)
{
    (void)events;
    for (int i = 0; i < PEERS; i++) {
        struct sockaddr_storage from = {0};
        socklen_t size = sizeof from;
        int fd = accept4(source->fd, (struct sockaddr *)&from, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
        set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
        set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, SILENCE_S);
        set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, SILENCE_PAUSE_S);
        set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, SILENCE_PROBES);
        set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, (SILENCE_S + SILENCE_PROBES * SILENCE_PAUSE_S) * 1000);
        struct peer *s = find_place();
        s->address = plain_address(&from);
        s->since = now_ms();
        s->answered = false;
        s->length = 0;
        source_open(&s->source, fd, read_peer);
        source_watch(&s->source, EPOLLIN);
        tick_soon();
    }
}

/* A second's ticks while there is something to look at, none else. */
void tick_soon(void)
{
    const struct itimerspec second = {.it_value = {.tv_sec = 1}, .it_interval = {.tv_sec = 1}};
    if (!ticking && timerfd_settime(timer.fd, 0, &second, NULL) < 0)
        die("timerfd_settime");
    ticking = true;
}

static void tick(struct source *source, uint32_t events)
{
    (void)events;
    uint64_t expired;
    if (read(source->fd, &expired, sizeof expired) < 0)
        return;
    bool waiting = carriers_tick();
    for (struct peer *s = peers; s < peers + PEERS; s++) {
        if (s->source.fd >= 0 && now_ms() - s->since >= GREETING_MS)
            forget(s);
        waiting = waiting || s->source.fd >= 0;
    }
    if (waiting)
        return;
    const struct itimerspec none = {0};
    timerfd_settime(source->fd, 0, &none, NULL);
    ticking = false;
}

void pod_listen(int fd)
{
    put_bytes(put_bytes(prologue, channel_name, sizeof channel_name - 1), instance, NONCE_SIZE);
    memcpy(responder.gateway, gateway_key, KEY_SIZE);
    if (!make_keys(&responder.own))
        die("no key");
    for (int i = 0; i < PEERS; i++)
        peers[i].source.fd = -1;
    source_open(&timer, timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), tick);
    if (timer.fd < 0)
        die("timerfd_create");
    source_watch(&timer, EPOLLIN);
    source_open(&listener, fd, accept_peers);
    source_watch(&listener, EPOLLIN);
}

/* Carries bytes between the host and the agent's socket.
 *
 * Over a virtio console each port is one connection at a time. The host begins it with a greeting and a token; the guest
 * connects to the agent and repeats both, so that the host can tell what belongs to an older connection. Beginning, end
 * and bytes of a connection do not come here in their order: the kernel has bytes at once, and notices a beginning or an
 * end by a message that another of its threads handles. A port's end and its next beginning may be noticed as one: then
 * the greeting goes to the agent, which ends the old connection, and the host tries again, on the next port.
 * Over vsock a connection is a connection, and has a place here while it lasts. When either side is gone, so is the
 * other. The first place is not the agent's: it has the host's questions (control.c). */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"

enum { PORTS = 9, CONSOLE_PORTS = 4, SIZE = 65536, TRIES = 2000, PAUSE_US = 5000, ROUNDS = 8 };
enum { SIGNALS = PORTS, CONTROL_LISTENER, AGENT_LISTENER, SOURCES }; /* numbers of what is no port */
static const char greeting[8] = "K8E-VM1\n";
enum { GREETING = sizeof greeting + 16 }; /* with its token */

struct flow {
    char *bytes;
    size_t start, end;
};

static struct port {
    int fd, agent; /* -1: no connection */
    bool spent;    /* the agent has ended it, the host has not yet */
    bool busy;     /* there is more to move: others are served in between */
    struct flow in, out; /* to the agent, to the host; before there is a connection `in` has what came of the greeting */
} ports[PORTS];
static int epoll_fd, signals, listeners[2] = {-1, -1};
static bool vsock;

static void watch(int fd, uint32_t number)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u32 = number};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0)
        die("epoll");
}

static void hang_up(struct port *port)
{
    if (port->agent >= 0)
        close(port->agent);
    port->agent = -1;
    port->in.start = port->in.end = port->out.start = port->out.end = 0;
}

/* Moves what can be moved now, up to a limit. Returns 1 when something was, 0 when nothing can be, -1 when one side has
 * ended. */
static int move(struct flow *flow, int from, int to)
{
    int moved = 0;
    for (int i = 0; i < ROUNDS; i++) {
        if (flow->start == flow->end) {
            flow->start = flow->end = 0;
            ssize_t count = read(from, flow->bytes, SIZE);
            if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR))
                return -1;
            if (count < 0)
                return moved;
            flow->end = (size_t)count;
        }
        ssize_t count = write(to, flow->bytes + flow->start, flow->end - flow->start);
        if (count < 0 && errno != EAGAIN && errno != EINTR)
            return -1;
        if (count <= 0)
            return moved;
        flow->start += (size_t)count;
        moved = 1;
    }
    return 1;
}

/* Returns false when both have to end. */
static bool carry(struct port *port)
{
    int in = move(&port->in, port->fd, port->agent), out = move(&port->out, port->agent, port->fd);
    port->busy = in > 0 || out > 0;
    if (in >= 0 && out >= 0)
        return true;
    port->busy = false;
    hang_up(port);
    return false;
}

/* The console ------------------------------------------------------------------------------------------------------ */

/* The host's greeting is the last that has come: it says no more before it is answered. What is before it is an older
 * connection's. */
static bool greet(struct port *port)
{
    struct flow *in = &port->in;
    for (ssize_t count; (count = read(port->fd, in->bytes + in->end, SIZE - in->end)) > 0;) {
        in->end += (size_t)count;
        if (in->end > GREETING) {
            memmove(in->bytes, in->bytes + in->end - GREETING, GREETING);
            in->end = GREETING;
        }
    }
    if (in->end < GREETING || memcmp(in->bytes, greeting, sizeof greeting) != 0)
        return false;
    port->agent = connect_to_agent();
    if (port->agent < 0)
        return false;
    memcpy(port->out.bytes, in->bytes, GREETING);
    port->out.end = GREETING;
    in->end = 0;
    watch(port->agent, (uint32_t)(port - ports));
    return true;
}

static bool is_connected(int fd)
{
    struct pollfd one = {.fd = fd, .events = POLLIN};
    poll(&one, 1, 0);
    return !(one.revents & POLLHUP);
}

static void serve_port(struct port *port)
{
    if (!is_connected(port->fd)) {
        /* What has come is left there: it may be the next connection's, of which its bytes can be noticed before its
         * beginning. */
        port->spent = port->busy = false;
        hang_up(port);
        return;
    }
    if (port->spent || (port->agent < 0 && !greet(port)))
        return;
    port->spent = !carry(port);
}

/* /dev/vportXpN: X is the number of the device among all of the machine's, N that of the port. */
static int find_port(int number)
{
    char suffix[16];
    int length = snprintf(suffix, sizeof suffix, "p%d", number), found = -1;
    DIR *devices = opendir("/dev");
    for (struct dirent *each; found < 0 && devices && (each = readdir(devices));) {
        size_t size = strlen(each->d_name);
        if (strncmp(each->d_name, "vport", 5) == 0 && size > (size_t)length + 5 &&
            strcmp(each->d_name + size - (size_t)length, suffix) == 0)
            found = openat(dirfd(devices), each->d_name, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    }
    if (devices)
        closedir(devices);
    return found;
}

static void open_port(int number)
{
    struct port *port = &ports[number];
    for (int i = 0; (port->fd = find_port(number + 1)) < 0; i++) {
        if (i == TRIES)
            die("a port");
        usleep(PAUSE_US);
    }
    watch(port->fd, (uint32_t)number);
}

/* vsock ------------------------------------------------------------------------------------------------------------ */

static void end_connection(struct port *port)
{
    hang_up(port);
    if (port->fd >= 0)
        close(port->fd);
    port->fd = -1;
}

static void take_connection(struct port *port, int fd)
{
    end_connection(port);
    port->fd = fd;
    watch(fd, (uint32_t)(port - ports));
    if (port == ports)
        return;
    port->agent = connect_to_agent();
    if (port->agent < 0)
        end_connection(port);
    else
        watch(port->agent, (uint32_t)(port - ports));
}

static void take_connections(uint32_t source)
{
    for (int fd; (fd = accept_host(listeners[source - CONTROL_LISTENER])) >= 0;) {
        struct port *port = ports;
        if (source == AGENT_LISTENER)
            do
                port++;
            while (port < ports + PORTS && port->fd >= 0);
        if (port == ports + PORTS)
            close(fd); /* the host has as many as it may */
        else
            take_connection(port, fd);
    }
}

static void serve_connection(struct port *port)
{
    if (port->fd >= 0 && !carry(port))
        end_connection(port);
}

/* The loop --------------------------------------------------------------------------------------------------------- */

static void reap(pid_t agent)
{
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) > 0)
        ;
    for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) > 0;)
        if (pid == agent)
            power_off();
}

static void serve_questions(struct port *port)
{
    /* An answer to a host whose connection was not noticed yet would be lost: the question waits for that. */
    if (port->fd < 0 || (!vsock && !is_connected(port->fd)))
        return;
    if (!answer_questions(port->fd) && vsock)
        end_connection(port);
}

static void serve_source(uint32_t number, pid_t agent)
{
    struct port *port = &ports[number % PORTS];
    if (number == SIGNALS)
        reap(agent);
    else if (number > SIGNALS)
        take_connections(number);
    else if (number == 0)
        serve_questions(port);
    else
        (vsock ? serve_connection : serve_port)(port);
}

static void open_sources(void)
{
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGCHLD);
    sigprocmask(SIG_BLOCK, &wanted, NULL);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    signals = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    if (epoll_fd < 0 || signals < 0)
        die("epoll");
    watch(signals, SIGNALS);
    for (int i = 0; i < PORTS; i++) {
        ports[i].fd = ports[i].agent = -1;
        ports[i].in.bytes = malloc(SIZE);
        ports[i].out.bytes = malloc(SIZE);
        if (!ports[i].in.bytes || !ports[i].out.bytes)
            die("memory");
        if (!vsock && i < CONSOLE_PORTS)
            open_port(i);
    }
    for (uint32_t i = 0; vsock && i < 2; i++) {
        listeners[i] = listen_to_host(i ? AGENT_PORT : CONTROL_PORT);
        watch(listeners[i], CONTROL_LISTENER + i);
    }
}

_Noreturn void serve(pid_t agent)
{
    vsock = strcmp(required("link"), "vsock") == 0;
    open_sources();
    reap(agent);
    for (bool busy = false;;) {
        struct epoll_event events[2 * SOURCES];
        int count = epoll_wait(epoll_fd, events, 2 * SOURCES, busy ? 0 : -1);
        for (int i = 0; i < count; i++)
            serve_source(events[i].data.u32, agent);
        busy = false;
        for (uint32_t i = 1; i < PORTS; i++) {
            if (ports[i].busy)
                serve_source(i, agent);
            busy = busy || ports[i].busy;
        }
    }
}

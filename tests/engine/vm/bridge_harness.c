/* Runs the bridge of virtual machines (agent/guest/bridge.c, control.c) on the machine, for tests: unix sockets are in the
 * place of vsock's, which cannot be had here. Arguments: the agent's socket, and where to listen for questions and for
 * connections. It must be pid 1 of a namespace of its own: told to halt it kills all that it can. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "guest.h"

static char **paths;
char trace[512] = " init=1 agent=2";

_Noreturn void die(const char *what)
{
    perror(what);
    exit(70);
}

_Noreturn void power_off(void)
{
    exit(0);
}

const char *required(const char *name)
{
    return strcmp(name, "link") == 0 ? "vsock" : (die(name), NULL);
}

static struct sockaddr_un address_of(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    return address;
}

int connect_to_agent(void)
{
    struct sockaddr_un agent = address_of(paths[1]);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (connect(fd, (const void *)&agent, sizeof agent) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

int listen_to_host(unsigned port)
{
    struct sockaddr_un own = address_of(paths[1 + port]);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (const void *)&own, sizeof own) < 0 || listen(fd, 16) < 0)
        die("listener");
    return fd;
}

int accept_host(int listener)
{
    return accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

int main(int count, char **words)
{
    if (count != 4 || getpid() != 1)
        return 64;
    paths = words;
    serve(-2);
}

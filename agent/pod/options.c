/* The command line of the agent of pods:
 *
 *     k8e-agent-pod (--address IP --port N | --fd N) --gateway KEY --instance UID
 *     k8e-agent-pod --install DIRECTORY
 *
 * All of it is public: the key is the gateway's public one, the instance is the pod's UID. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pod.h"

#define USAGE "usage: k8e-agent-pod (--address IP --port N | --fd N) --gateway KEY --instance UID"
#define VERSION_LINE "k8e-agent-pod " AGENT_VERSION "\n"
enum { BACKLOG = 128, COPY = 65536 };

uint8_t gateway_key[KEY_SIZE];
static const char *address;
static int port = -1, inherited = -1;

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Dashes are passed over: Kubernetes writes a UID with them. */
static void parse_hex(const char *text, uint8_t *to, int size, const char *complaint)
{
    int count = 0;
    for (; *text; text++) {
        int value = digit(*text);
        if (*text == '-')
            continue;
        if (value < 0 || count == 2 * size)
            die(complaint);
        to[count / 2] = (uint8_t)(count % 2 ? to[count / 2] | value : value << 4);
        count++;
    }
    if (count != 2 * size)
        die(complaint);
}

static int parse_number(const char *text, int highest, const char *complaint)
{
    int number = 0, digits = 0;
    for (; *text >= '0' && *text <= '9' && number <= highest; text++, digits++)
        number = number * 10 + (*text - '0');
    if (*text || !digits || number > highest)
        die(complaint);
    return number;
}

static void join(char to[PATH_MAX], const char *directory, const char *dot, const char *name)
{
    const char *parts[] = {directory, "/", dot, name};
    size_t length = 0;
    for (int i = 0; i < 4; i++) {
        size_t more = strlen(parts[i]);
        if (length + more >= PATH_MAX)
            die("--install: the path is too long");
        memcpy(to + length, parts[i], more + 1);
        length += more;
    }
}

/* Copies a file into a directory, under its own name, at once or not at all. */
static void copy_file(const char *from, const char *directory, bool optional)
{
    static char partial[PATH_MAX], target[PATH_MAX], bytes[COPY];
    const char *name = strrchr(from, '/') + 1;
    int in = open(from, O_RDONLY | O_CLOEXEC);
    if (in < 0 && optional && errno == ENOENT)
        return;
    join(partial, directory, ".new-", name);
    join(target, directory, "", name);
    unlink(partial);
    int out = in < 0 ? -1 : open(partial, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0755);
    if (out < 0)
        die(in < 0 ? from : partial);
    for (ssize_t count; (count = read(in, bytes, sizeof bytes)) != 0;)
        if (count < 0 || write(out, bytes, (size_t)count) != count)
            die(partial);
    if (fchmod(out, 0755) < 0 || close(out) < 0 || rename(partial, target) < 0)
        die(target);
    close(in);
}

/* For an init container whose image has nothing but this program, and perhaps the loader beside it. */
static _Noreturn void install(const char *directory)
{
    static char self[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - sizeof "k8e-loader.so");
    if (length <= 0)
        die("/proc/self/exe");
    self[length] = 0;
    copy_file(self, directory, false);
    memcpy(strrchr(self, '/') + 1, "k8e-loader.so", sizeof "k8e-loader.so");
    copy_file(self, directory, true);
    _exit(0);
}

void pod_parse(int argc, char **argv)
{
    bool named = false, keyed = false;
    errno = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--version") == 0) {
            (void)!write(1, VERSION_LINE, sizeof VERSION_LINE - 1);
            _exit(0);
        }
        if (i + 1 == argc)
            die(USAGE);
        const char *option = argv[i], *value = argv[++i];
        if (strcmp(option, "--install") == 0)
            install(value);
        else if (strcmp(option, "--address") == 0)
            address = value;
        else if (strcmp(option, "--port") == 0)
            port = parse_number(value, 65535, "--port: want a number up to 65535");
        else if (strcmp(option, "--fd") == 0)
            inherited = parse_number(value, 99999, "--fd: want an inherited listening socket");
        else if (strcmp(option, "--gateway") == 0) {
            parse_hex(value, gateway_key, KEY_SIZE, "--gateway: want 64 hexadecimal digits");
            keyed = true;
        } else if (strcmp(option, "--instance") == 0) {
            parse_hex(value, instance, NONCE_SIZE, "--instance: want 32 hexadecimal digits");
            named = true;
        } else
            die(USAGE);
    }
    if (!named || !keyed || (address == NULL) != (port < 0) || (address == NULL) == (inherited < 0))
        die(USAGE);
}

static int inherit(void)
{
    int listening = 0;
    socklen_t size = sizeof listening;
    if (inherited < 3 || getsockopt(inherited, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) < 0 || !listening) {
        errno = 0;
        die("--fd: want an inherited listening socket");
    }
    fcntl(inherited, F_SETFD, FD_CLOEXEC);
    fcntl(inherited, F_SETFL, O_NONBLOCK);
    return inherited;
}

int pod_listener(void)
{
    if (inherited >= 0)
        return inherit();
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } at = {0};
    socklen_t size = sizeof at.v4;
    if (inet_pton(AF_INET, address, &at.v4.sin_addr) == 1) {
        at.v4.sin_family = AF_INET;
        at.v4.sin_port = htons((uint16_t)port);
    } else if (inet_pton(AF_INET6, address, &at.v6.sin6_addr) == 1) {
        at.v6.sin6_family = AF_INET6;
        at.v6.sin6_port = htons((uint16_t)port);
        size = sizeof at.v6;
    } else {
        errno = 0;
        die("--address: want an IPv4 or IPv6 address");
    }
    int fd = socket(at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP), on = 1;
    /* A container that is started again meets the old one's connections. Never SO_REUSEPORT: it lets others in. */
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) < 0 || bind(fd, &at.any, size) < 0 ||
        listen(fd, BACKLOG) < 0)
        die(address);
    return fd;
}

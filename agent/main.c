/* k8e-agent: arguments, the listener, signals, reaping and the loop. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#ifdef K8E_POD
#include "pod/pod.h"
#endif

static int epoll_fd;
static struct source signals;
static bool stopping;
uint64_t initial_files[2];

_Noreturn void die(const char *message)
{
    char number[] = ": error 000\n";
    for (int i = 10, error = errno; i >= 8; i--, error /= 10)
        number[i] = (char)('0' + error % 10);
    (void)!write(2, "k8e-agent: ", 11);
    (void)!write(2, message, strlen(message));
    if (errno)
        (void)!write(2, number, sizeof number - 1);
    else
        (void)!write(2, "\n", 1);
    _exit(70);
}

uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* Sources --------------------------------------------------------------------------------------------------------- */

void source_open(struct source *s, int fd, void (*ready)(struct source *, uint32_t))
{
    *s = (struct source){.fd = fd, .ready = ready};
}

void source_watch(struct source *s, uint32_t events)
{
    if (s->fd < 0 || (s->watched && s->events == events))
        return;
    struct epoll_event event = {.events = events, .data.ptr = s};
    if (epoll_ctl(epoll_fd, s->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, s->fd, &event) < 0)
        die("epoll");
    s->watched = true;
    s->events = events;
}

void source_mute(struct source *s)
{
    if (s->watched)
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, s->fd, NULL);
    s->watched = false;
}

void source_close(struct source *s)
{
    if (s->fd < 0)
        return;
    source_mute(s);
    close(s->fd);
    s->fd = -1;
}

/* Signals --------------------------------------------------------------------------------------------------------- */

static void read_signal(struct source *source, uint32_t events)
{
    (void)events;
    struct signalfd_siginfo info;
    while (read(source->fd, &info, sizeof info) == (ssize_t)sizeof info) {
        /* As pid 1 only the outside (which shows as pid 0) may stop us: root of the sandbox may not. */
        if (info.ssi_signo == SIGTERM && (getpid() != 1 || info.ssi_pid == 0))
            stopping = true;
    }
    for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) > 0;)
        command_reaped(pid);
}

static void block_signals(void)
{
    /* Who started us may ignore some (a shell does, for INT and QUIT of what it puts in the background), and what is
     * ignored stays so through every execve: no command could be interrupted. */
    const uint64_t standard[4] = {0}; /* the kernel's struct sigaction, SIG_DFL */
    for (long number = 1; number <= 64; number++)
        syscall(SYS_rt_sigaction, number, standard, NULL, sizeof(uint64_t));
    /* Not sigfillset: musl leaves the signals out that it keeps for threads, and their default action is to kill us. */
    const uint64_t all = UINT64_MAX;
    sigset_t wanted;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, NULL, sizeof all);
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGCHLD);
    sigaddset(&wanted, SIGTERM);
    int fd = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0)
        die("signalfd");
    source_open(&signals, fd, read_signal);
    source_watch(&signals, EPOLLIN);
}

/* Start ----------------------------------------------------------------------------------------------------------- */

#ifndef K8E_POD
static int listen_at(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        die("--listen: the path is too long");
    memcpy(address.sun_path, path, strlen(path) + 1);
    /* Only root of the sandbox may enter the directory: the socket's own mode is not honoured everywhere. */
    char directory[sizeof address.sun_path];
    memcpy(directory, address.sun_path, sizeof directory);
    char *slash = strrchr(directory, '/');
    if (!slash || slash == directory)
        die("--listen: want a socket in a directory of its own");
    *slash = 0;
    if (mkdir(directory, 0700) < 0 && errno != EEXIST)
        die(directory);
    struct stat st;
    if (lstat(directory, &st) < 0)
        die(directory);
    errno = 0;
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077))
        die("--listen: the directory must be ours alone (mode 0700)");
    unlink(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    mode_t mask = umask(0177);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 8) < 0)
        die(path);
    umask(mask);
    return fd;
}

static int inherit(const char *text)
{
    int fd = 0, listening = 0;
    while (*text >= '0' && *text <= '9' && fd < 100000)
        fd = fd * 10 + (*text++ - '0');
    socklen_t size = sizeof listening;
    errno = 0;
    if (*text || fd < 3 || getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) < 0 || !listening)
        die("--fd: want an inherited listening socket");
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static void parse_instance(const char *text)
{
    errno = 0;
    if (strlen(text) != 2 * NONCE_SIZE)
        die("--instance: want 32 hexadecimal digits");
    for (int i = 0; i < NONCE_SIZE; i++) {
        int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            die("--instance: want 32 hexadecimal digits");
        instance[i] = (uint8_t)(high << 4 | low);
    }
}
#endif

static void check_surroundings(void)
{
    /* Descriptors 0 to 2 must be taken, or a pipe could become a command's standard stream by accident. */
    int fd;
    do
        fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    while (fd >= 0 && fd <= 2);
    if (fd < 0)
        die("/dev/null");
    close(fd);
    /* Trees are found through /proc: without it a timeout could leave processes behind. */
    if (access("/proc/self/stat", R_OK) < 0)
        die("/proc is not mounted");
}

static void raise_files(void)
{
    /* Each command takes four descriptors; they get the limit that we were given. */
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) < 0)
        die("getrlimit");
    initial_files[0] = files.rlim_cur;
    initial_files[1] = files.rlim_max;
    rlim_t wanted = files.rlim_max < 8192 ? files.rlim_max : 8192;
    if (files.rlim_cur < wanted) {
        files.rlim_cur = wanted;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

static bool leftover(void)
{
    for (struct channel *c = channels.next; c != &channels; c = c->next)
        if (channel_is_command(c))
            return true;
    return false;
}

static void run(void)
{
    bool fresh = false; /* memory was touched since it was given back */
    while (!stopping) {
        int timeout = work_to_do ? 0 : commands_timeout();
        if (timeout < 0 && fresh && !leftover())
            timeout = 1000;
        struct epoll_event events[32];
        int count = epoll_wait(epoll_fd, events, 32, timeout);
        if (count < 0 && errno != EINTR)
            die("epoll_wait");
        if (count == 0 && timeout == 1000) {
            link_release_memory();
#ifdef K8E_POD
            pod_release_memory();
#endif
            fresh = false;
        } else {
            fresh = true;
        }
        for (int i = 0; i < count; i++) {
            struct source *s = events[i].data.ptr;
            if (s->fd >= 0) /* closed earlier in this turn */
                s->ready(s, events[i].events);
        }
        work_to_do = false;
        for (struct channel *c = channels.next; c != &channels; c = c->next)
            if (c->busy && !c->dead) {
                c->kind->work(c);
                work_to_do = work_to_do || c->busy;
            }
        commands_tick();
        link_flush();
        channels_sweep();
    }
}

int main(int argc, char **argv)
{
#ifdef K8E_POD
    pod_parse(argc, argv);
#else
    int listener = -1;
    bool named = false;
    const char *path = NULL, *fd = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--version") == 0) {
            (void)!write(1, "k8e-agent " AGENT_VERSION "\n", sizeof "k8e-agent " AGENT_VERSION "\n" - 1);
            return 0;
        }
        errno = 0;
        if (i + 1 == argc)
            die("usage: k8e-agent (--listen PATH | --fd N) --instance HEX");
        if (strcmp(argv[i], "--listen") == 0)
            path = argv[++i];
        else if (strcmp(argv[i], "--fd") == 0)
            fd = argv[++i];
        else if (strcmp(argv[i], "--instance") == 0) {
            parse_instance(argv[++i]);
            named = true;
        } else
            die("usage: k8e-agent (--listen PATH | --fd N) --instance HEX");
    }
    errno = 0;
    if (!named || (path == NULL) == (fd == NULL))
        die("usage: k8e-agent (--listen PATH | --fd N) --instance HEX");
#endif
    check_surroundings();
    raise_files();
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0)
        die("epoll_create1");
    block_signals();
    if (getpid() != 1 && prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
        die("cannot reap orphans");
    prctl(PR_SET_DUMPABLE, 0);
    if (chdir("/") < 0)
        die("/");
    setgroups(0, NULL); /* not allowed in every user namespace, where there are none to begin with */
    umask(0); /* modes are as asked for; commands have a mask of their own */
#ifdef K8E_POD
    link_listen(-1);
    pod_listen(pod_listener());
#else
    listener = path ? listen_at(path) : inherit(fd);
    link_listen(listener);
#endif
    run();
    link_close(SHUTTING_DOWN);
#ifdef K8E_POD
    pod_flush();
#endif
    commands_end_all();
    channels_sweep();
#ifndef K8E_POD
    if (path)
        unlink(path);
#endif
    return 0;
}

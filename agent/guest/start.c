/* Starts the agent as the other runtimes do: pid 1 of its namespaces, with few capabilities, under its limits. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "guest.h"

#define GROUP "/cgroup/sandbox"
enum { SOCKET = 3 };

static const struct sockaddr_un agent_address = {.sun_family = AF_UNIX, .sun_path = "/link.sock"};

static void make_group(void)
{
    char text[32];
    write_file("/cgroup/cgroup.subtree_control", "+pids +memory");
    if (mkdir(GROUP, 0755) < 0)
        die(GROUP);
    snprintf(text, sizeof text, "%lu", number("pids"));
    write_file(GROUP "/pids.max", text);
}

static void limit(int what, unsigned long value)
{
    struct rlimit both = {value, value};
    if (setrlimit(what, &both) < 0)
        die("a limit");
}

static void give_up_capabilities(unsigned long kept)
{
    for (int i = 0; prctl(PR_CAPBSET_READ, i, 0, 0, 0) >= 0; i++)
        if (!(kept >> i & 1) && prctl(PR_CAPBSET_DROP, i, 0, 0, 0) < 0)
            die("capabilities");
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2] = {{(uint32_t)kept, (uint32_t)kept, 0}, {0}};
    if (syscall(SYS_capset, &head, sets) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        die("capabilities");
}

static _Noreturn void become_agent(int listener)
{
    char fd[] = {'0' + SOCKET, 0};
    const char *instance = required("instance");
    unsigned long kept = number("capabilities"), files = number("files"), processes = number("pids");
    write_file("/proc/self/oom_score_adj", "0");
    enter_root();
    limit(RLIMIT_NOFILE, files);
    limit(RLIMIT_NPROC, processes);
    limit(RLIMIT_CORE, 0);
    if (setsid() < 0 || dup2(listener, SOCKET) < 0 || fcntl(SOCKET, F_SETFD, 0) < 0)
        die("the agent's socket");
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int i = 0; i < 3; i++)
        dup2(null, i);
    for (int i = SOCKET + 1; i < 64; i++)
        close(i);
    give_up_capabilities(kept);
    apply_filter();
    char *argv[] = {"/k8e-agent", "--fd", fd, "--instance", (char *)(uintptr_t)instance, NULL};
    char *environment[] = {"PATH=/usr/bin:/bin", NULL};
    execve(argv[0], argv, environment);
    _exit(70);
}

pid_t start_agent(void)
{
    make_group();
    write_file("/proc/sys/user/max_user_namespaces", "0");
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (const void *)&agent_address, sizeof agent_address) < 0 ||
        listen(listener, 8) < 0)
        die("the agent's socket");
    /* Into the group from its first moment: no process of the sandbox is ever outside. */
    write_file(GROUP "/cgroup.procs", "0");
    const unsigned long spaces = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;
    pid_t agent = (pid_t)syscall(SYS_clone, spaces | SIGCHLD, 0, 0, 0, 0);
    if (agent == 0)
        become_agent(listener);
    if (agent < 0)
        die("the agent");
    write_file("/cgroup/cgroup.procs", "0");
    close(listener);
    return agent;
}

int connect_to_agent(void)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (const void *)&agent_address, sizeof agent_address) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

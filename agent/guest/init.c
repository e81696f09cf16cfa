/* k8e-guest: options, errors, and the order of things. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

static char words[4096];
static size_t words_length;
char trace[512];

_Noreturn void power_off(void)
{
    sync();
    /* Not RB_POWER_OFF: a machine without ACPI cannot. It is started such that its VMM ends when it resets. */
    reboot(RB_AUTOBOOT);
    for (;;)
        pause();
}

_Noreturn void die(const char *what)
{
    dprintf(2, "k8e-guest: %s: %s\n", what, strerror(errno));
    power_off();
}

uint64_t boot_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

void mark(const char *what)
{
    size_t used = strlen(trace);
    snprintf(trace + used, sizeof trace - used, " %s=%llu", what, (unsigned long long)boot_us());
}

const char *option(const char *name)
{
    size_t length = strlen(name);
    for (const char *word = words; word < words + words_length; word += strlen(word) + 1)
        if (strncmp(word, "k8e.", 4) == 0 && strncmp(word + 4, name, length) == 0 && word[4 + length] == '=')
            return word + 5 + length;
    return NULL;
}

const char *required(const char *name)
{
    const char *value = option(name);
    errno = EINVAL;
    return value ? value : (die(name), NULL);
}

unsigned long number(const char *name)
{
    char *end;
    const char *text = required(name);
    unsigned long value = strtoul(text, &end, 0);
    errno = EINVAL;
    return *end || end == text ? (die(name), 0) : value;
}

void write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        die(path);
    close(fd);
}

static void read_options(void)
{
    int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, words, sizeof words - 2);
    if (length < 0)
        die("/proc/cmdline");
    close(fd);
    words_length = (size_t)length;
    for (ssize_t i = 0; i < length; i++)
        if (words[i] == ' ' || words[i] == '\n')
            words[i] = 0;
}

static void mount_or_die(const char *kind, const char *where)
{
    if ((mkdir(where, 0755) < 0 && errno != EEXIST) || mount(kind, where, kind, 0, NULL) < 0)
        die(where);
}

/* The kernel is the sandbox's own, and its users are kept from each other by it: what none of them needs is not there. */
static void harden_kernel(void)
{
    static const char *const settings[][2] = {
        {"modules_disabled", "1"}, {"kexec_load_disabled", "1"},        {"dmesg_restrict", "1"},   {"kptr_restrict", "2"},
        {"sysrq", "0"},            {"unprivileged_bpf_disabled", "1"}, {"io_uring_disabled", "2"}, {"perf_event_paranoid", "3"},
    };
    char path[64];
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        snprintf(path, sizeof path, "/proc/sys/kernel/%s", settings[i][0]);
        if (access(path, F_OK) == 0) /* not all kernels have all */
            write_file(path, settings[i][1]);
    }
}

int main(void)
{
    mount_or_die("proc", "/proc");
    mount_or_die("devtmpfs", "/dev");
    mount_or_die("cgroup2", "/cgroup");
    read_options();
    mark("init");
    write_file("/proc/self/oom_score_adj", "-1000");
    load_modules();
    harden_kernel();
    mark("modules");
    make_root();
    mark("root");
    set_up_network();
    mark("network");
    pid_t agent = start_agent();
    mark("agent");
    dprintf(2, "k8e-guest: ready%s\n", trace);
    serve(agent);
}

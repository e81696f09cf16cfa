/* Questions of the host about the machine. A line asks: a number, a word and perhaps another; a line answers, and begins
 * with the number: what comes late, after the host has given up, is not taken for the answer to its next question. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

static char asked[256]; /* what came of questions so far */
static size_t asked_length;

static unsigned long long count_kills(void)
{
    static char text[16384];
    int fd = open("/proc/vmstat", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (length < 0)
        return 0;
    text[length] = 0;
    char *found = strstr(text, "\noom_kill ");
    return found ? strtoull(found + 10, NULL, 10) : 0;
}

/* Ends everything and writes what is not on the disk yet. */
static _Noreturn void halt(int fd, unsigned long question)
{
    kill(-1, SIGKILL); /* all but us, the agent's namespace included */
    while (waitpid(-1, NULL, 0) > 0)
        ;
    sync();
    umount2(ROOT, MNT_DETACH);
    umount2("/disk", MNT_DETACH);
    sync();
    dprintf(fd, "%lu halted\n", question);
    power_off();
}

static void set_clock(const char *text)
{
    unsigned long long ns = strtoull(text, NULL, 10);
    struct timespec now = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    clock_settime(CLOCK_REALTIME, &now);
}

static void answer(int fd, const char *line)
{
    char text[640], *word;
    unsigned long question = strtoul(line, &word, 10);
    if (strcmp(word, " halt") == 0)
        halt(fd, question);
    if (strncmp(word, " clock ", 7) == 0)
        set_clock(word + 7);
    int length = snprintf(text, sizeof text, "%lu oom_kills=%llu%s\n", question, count_kills(), trace);
    (void)!write(fd, text, (size_t)length);
}

bool answer_questions(int fd)
{
    for (;;) {
        ssize_t count = read(fd, asked + asked_length, sizeof asked - asked_length);
        if (count <= 0) {
            bool over = count == 0 || errno != EAGAIN;
            if (over)
                asked_length = 0;
            return !over;
        }
        asked_length += (size_t)count;
        for (char *end; (end = memchr(asked, '\n', asked_length));) {
            *end = 0;
            answer(fd, asked);
            asked_length -= (size_t)(end + 1 - asked);
            memmove(asked, end + 1, asked_length);
        }
        if (asked_length == sizeof asked)
            asked_length = 0; /* no question is that long */
    }
}

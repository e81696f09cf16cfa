/* What other processes with our uid can change of one that waits, and what its copies would inherit: a program that makes
 * all processes of its user nicer, or limits them, must not reach the programs after it by that. */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>
#include <sys/resource.h>

#include "../raw.h"
#include "loader.h"

enum { LIMITS = 16, PROCESS = 1 /* IOPRIO_WHO_PROCESS */ };

static struct attributes {
    long nice, policy, priority, input_output, processors;
    uint8_t affinity[128];
    struct { uint64_t soft, hard; } limits[LIMITS];
} noted;

static void read_attributes(struct attributes *a)
{
    int parameter = 0;
    memset(a, 0, sizeof *a);
    a->nice = raw(SYS_getpriority, PRIO_PROCESS, 0);
    a->policy = raw(SYS_sched_getscheduler, 0);
    a->priority = raw(SYS_sched_getparam, 0, &parameter) < 0 ? -1 : parameter;
    a->input_output = raw(SYS_ioprio_get, PROCESS, 0);
    a->processors = raw(SYS_sched_getaffinity, 0, sizeof a->affinity, a->affinity);
    for (long i = 0; i < LIMITS; i++)
        raw(SYS_prlimit64, 0, i, 0, &a->limits[i]);
}

void note_attributes(void) { read_attributes(&noted); }

bool is_unaltered(void)
{
    struct attributes now;
    read_attributes(&now);
    return memcmp(&now, &noted, sizeof now) == 0;
}

void expect_most_files(void) { noted.limits[RLIMIT_NOFILE].soft = noted.limits[RLIMIT_NOFILE].hard; }

/* A command, shared by command.c (its life) and exec.c (its start). */
#ifndef K8E_COMMAND_H
#define K8E_COMMAND_H

#include "agent.h"

enum { MAX_NAME = 128 };

struct command {
    struct channel channel;
    struct launch *launch; /* with its stacks and strings, in one mapping; NULL once the supervisor was reaped */
    uint8_t *memory;
    size_t memory_size;
    pid_t supervisor;
    struct source report;
    uint32_t pid;
    bool started, exited, lost, detach_wanted, terminal, handed_over, copy;
    bool lent;      /* launch and supervisor are a template's, which has them back at the command's end */
    bool disturbed; /* a signal, or the wish for its end, may be on its way to the supervisor */
    uint32_t window; /* as asked for */
    uint16_t rows, columns;
    uint64_t wall_us, user_us, system_us, max_rss_kib;
    uint32_t drain_ms;
    uint64_t drain_until; /* after the exit, while a child holds the pipes */
    uint64_t started_unix_ms;
    uint8_t how, cause;
    uint32_t value;
    uint32_t name_length;
    char name[MAX_NAME];
};

extern const struct kind command_kind;
extern int command_count;

void command_refuse(struct command *, enum stage, int error);
int command_build(struct command *, const uint8_t *payload, uint32_t length, const char *preload); /* errno; preload: NULL or LD_PRELOAD=... */
int command_pipes(struct command *, int stdio[3]); /* makes its pipes; errno */
int command_open(struct command *, int *report); /* makes its pipes and starts its supervisor; errno */
void command_launch(struct command *); /* the plain way, from what was built */
void command_free_launch(struct command *);
void command_started(struct command *);
void command_report(struct command *, char what);
void command_lost(struct command *); /* its supervisor is gone without a word */
void command_watch(struct command *, int report); /* hears the supervisor (-1: not itself) and the streams from now on */
void stdout_ready(struct source *, uint32_t events);
void stderr_ready(struct source *, uint32_t events);

#endif

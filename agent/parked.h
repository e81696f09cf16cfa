/* Parked interpreters, shared by parked.c (those that wait, and their programs) and template.c (those that make copies). */
#ifndef K8E_PARKED_H
#define K8E_PARKED_H

#include "command.h"

enum { ANSWER_MS = 2000, START_MS = 30000, SEND_BUFFER = 524288, MAX_LOADER = 4096, MAX_SAME = 4, MAX_COPIES = 256 };
enum { READY = 'P', FORKS = 'F', TAKEN = 'T', OUTDATED = 'O' }; /* as in park/loader.h */

struct parked {
    struct parked *next;
    struct command process; /* no channel of its own: it lends its pipes and its supervisor to a run */
    struct source control;
    uint64_t asked_by; /* PARK's channel, until it was answered; 0: no caller waits */
    uint64_t keep_ms, until; /* when it is let go; 0: never */
    bool ready, leaving, reaped; /* reaped: its supervisor's pid may be reused by now */
    struct command *run; /* was offered to it, or will be when it is ready */
    /* A template waits for no program itself: its copies do, one after the other, under its supervisor. */
    bool forks;
    int copies;              /* that it has been asked for; they have hash seeds and places in memory in common */
    struct parked *copy;     /* of a template: the one that waits, or is being made */
    struct command *current; /* of a template: the command that a copy has become, until its end */
    bool used;               /* of a template: a command, or what it has left behind, may be below its supervisor */
    struct parked *template; /* of a copy */
    pid_t pid;               /* of a copy, as it says; 0: it was not heard of yet */
};

/* parked.c */
struct parked *parked_new(void); /* in the list; NULL: no memory */
int parked_control(struct parked *, int *other); /* opens its conversation; errno */
bool parked_hear(struct parked *); /* returns false when it is gone or on its way */
void parked_hear_all(struct parked *); /* that is there; it can say no more */
void parked_move(struct parked *, struct command *run); /* its pipes become the run's */
void parked_send(struct parked *); /* its run */
void parked_close(struct parked *);
void parked_answer(struct parked *, uint32_t code, int error);
void parked_let_go(struct parked *); /* it will not be a command, and a template makes no more copies; commands are left alone */
void parked_forget(struct parked *);
void parked_end(struct parked *); /* all that is below its supervisor */

/* template.c */
void template_copy(struct parked *template); /* asks for the next copy */
void template_known(struct parked *template); /* has the supervisor look at the copy that waits, if it has none to look after */
void template_adopt(struct parked *copy); /* the copy is its run's command from now on */
void template_report(struct parked *template, char heard);
void template_gone(struct parked *template); /* its supervisor is */

#endif

/* Templates: interpreters that have started up and make a copy of themselves for each program, which costs a fraction of
 * a start. A copy waits like any parked interpreter, with pipes of its own, and is used once.
 *
 * The kernel lets a process with the template's memory be a child of the template's parent, and of no other process that
 * the agent could trust. So a template's supervisor looks after one command after the other, never two: everything below
 * it is the template, the copy that waits, and one command's. It says when the next may begin ('r'); when a command leaves
 * anything behind, or was sent a signal that may arrive late, the template is not used again. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "parked.h"

/* Sends the template the other ends of the copy's pipes and of its conversation. */
static bool send_files(const struct parked *t, const int files[4])
{
    char order = FORKS;
    struct iovec part = {&order, 1};
    union { struct cmsghdr head; char room[CMSG_SPACE(4 * sizeof(int))]; } control = {.room = {0}};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.head = (struct cmsghdr){.cmsg_len = CMSG_LEN(4 * sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.head), files, 4 * sizeof(int));
    return sendmsg(t->control.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
}

void template_copy(struct parked *t)
{
    int files[4] = {-1, -1, -1, -1};
    struct parked *copy = t->copies++ < MAX_COPIES ? parked_new() : NULL;
    bool fine = copy;
    if (copy) {
        copy->template = t;
        t->copy = copy;
        copy->process.launch = t->process.launch;
        fine = !command_pipes(&copy->process, files) && !parked_control(copy, &files[3]) && send_files(t, files);
        copy->process.launch = NULL;
    }
    for (int i = 0; i < 4; i++)
        if (files[i] >= 0)
            close(files[i]);
    if (!fine)
        parked_let_go(t);
}

void template_known(struct parked *t)
{
    if (t->copy && t->copy->pid && !t->current && !t->leaving && !t->reaped) {
        atomic_store(&t->process.launch->next_wanted, t->copy->pid);
        kill(t->process.supervisor, SIGUSR1);
    }
}

void template_adopt(struct parked *copy)
{
    struct parked *t = copy->template;
    struct command *run = copy->run;
    t->current = run;
    t->used = true;
    t->copy = NULL;
    run->launch = t->process.launch;
    run->supervisor = t->process.supervisor;
    run->lent = run->copy = true;
    parked_move(copy, run);
}

static void end_current(struct parked *t, bool lost)
{
    struct command *run = t->current;
    t->current = NULL;
    if (lost)
        command_lost(run);
    else
        command_report(run, 'e');
    run->launch = NULL;
    run->supervisor = 0;
    run->lent = false;
    if (run->disturbed && !t->leaving)
        parked_let_go(t);
}

void template_report(struct parked *t, char heard)
{
    if (heard == 'r' && t->copy) {
        t->used = false;
        t->copy->ready = true;
        t->until = t->keep_ms ? now_ms() + t->keep_ms : 0;
        parked_answer(t, OK, 0);
        if (t->copy->run)
            parked_send(t->copy);
    } else if (heard == 'e') {
        struct parked *copy = t->copy;
        /* It may have had a program, and an end, before its word of that was heard. */
        if (!t->current && copy)
            parked_hear_all(copy);
        if (t->current)
            end_current(t, false);
        else if (!t->leaving)
            parked_let_go(t); /* the copy was killed */
        if (!t->leaving && !t->reaped)
            template_copy(t);
    }
}

void template_gone(struct parked *t)
{
    struct parked *copy = t->copy;
    t->leaving = true;
    if (!t->current && copy)
        parked_hear_all(copy);
    if (t->current)
        end_current(t, true);
    if (t->copy)
        parked_let_go(t->copy);
    parked_answer(t, UNSUPPORTED, 0);
}

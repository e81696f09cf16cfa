/* The loader: a small library that the agent preloads into an interpreter which is to wait for its program.
 *
 * It stops the interpreter when it has started up and before it looks at the program: python.c and node.c know where that
 * is; a shell, whose start is mostly the linker's and libc's, is stopped before its main. loader.c talks to the agent, and
 * remembers what start-up depended on; template.c makes children of one that has started up. It needs no library itself:
 * what it uses of libc is found in the process it is loaded into. */
#ifndef K8E_LOADER_H
#define K8E_LOADER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Out of the way of the descriptors that interpreters open at their start, so that those get the numbers they always
 * get, and below 64, so that the table does not grow. The agent knows it as well. */
enum { CONTROL_FD = 63 };

/* Agent to loader: this, then the directory and the code, neither terminated. */
struct handover { uint32_t no_stdin, cwd_length, code_length; };

/* Loader to agent, one byte each. A child of a template says its pid behind READY. */
enum { READY = 'P', FORKS = 'F', TAKEN = 'T', DECLINED = 'N', OUTDATED = 'O' };

/* Agent to a template, for each child that it is to make: one byte, and with it the child's stdio and its CONTROL_FD. */
enum { CHILD_FILES = 4 };

struct task {
    bool no_stdin;
    char *cwd, *code; /* terminated */
    size_t code_length;
};

extern char *placeholder; /* what stands in the arguments where the code will be */

void *find_symbol(const char *name);
void say(const void *bytes, size_t count);
_Noreturn void give_up(void); /* the agent starts a program the plain way then */

/* What start-up read: if it is another by the time there is a program, so would a fresh interpreter be. */
void watch_path(const char *path);
void watch_loaded(const char *path); /* unless it cannot change */
void watch_lookup(const char *name); /* the places where PATH finds it, up to the right one */

/* Writable memory of the process by its place, for finding what has no name. */
struct region { uintptr_t start, end; bool anonymous; };
int list_regions(struct region *, int room, bool all); /* all: or the heap and the program's own data only */
bool in_regions(const struct region *, int count, uintptr_t address, size_t length);
bool has_shared_memory(void); /* that can be written to */

/* What an interpreter does about a fork that is not libc's; NULL: nothing. */
struct fork_steps {
    void (*before)(void), (*in_parent)(void), (*in_child)(void);
    bool goes_on; /* a child has more to do before it waits for its program */
};

/* Returns in each child, or at once where nothing may be a template. */
void become_template(const struct fork_steps *);
void wait_for_task(struct task *); /* returns with a program; everything about the process but the interpreter is ready */
void take_task(const struct task *); /* from here on it is the run */

/* attributes.c: what other processes with our uid can change of this one, and a fork inherits. */
void note_attributes(void);
bool is_unaltered(void); /* since they were noted */
void expect_most_files(void); /* the interpreter itself raises that limit, as far as it may */

/* template.c */
bool can_fork(void); /* nothing of this process would be shared with a child of it, or be missing there */
void fork_children(const struct fork_steps *); /* as the agent asks; returns in each child */
void say_ready(bool is_child);

/* What an interpreter's file provides. */
bool prepare_python(void); /* false: this is no Python */
bool prepare_node(void);
typedef int main_function(int, char **, char **);
int python_main(int argc, char **argv, char **envp);

#endif

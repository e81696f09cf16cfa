/* k8e-guest: pid 1 of a virtual machine. It makes of the machine's disks the root that every other runtime makes on the
 * host (root.c), configures the network (network.c), starts the agent as pid 1 of a namespace of its own (start.c), and
 * then carries bytes between the agent's socket and the host (bridge.c): over the ports of a virtio console, or over
 * vsock (vsock.c).
 *
 * Everything that it is to do comes on the kernel's command line, as words `k8e.NAME=VALUE` (src/k8e/engine/local/vm/
 * has the other end). It runs with the attacker, like the agent: nothing of the host rests on it. */
#ifndef K8E_GUEST_H
#define K8E_GUEST_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define ROOT "/root" /* where the sandbox's root is put together */

/* init.c */
_Noreturn void die(const char *what); /* tells the console, and ends the machine */
_Noreturn void power_off(void);
const char *option(const char *name);          /* NULL: not given */
const char *required(const char *name);        /* dies instead */
unsigned long number(const char *name);        /* of a required one */
void write_file(const char *path, const char *text);
void mark(const char *what); /* notes when it was reached, for the boot trace */
uint64_t boot_us(void);
extern char trace[512];

/* modules.c */
void load_modules(void);

/* root.c */
void make_root(void);  /* from the disks, below ROOT */
void enter_root(void); /* in a mount namespace of its own */

/* network.c */
void set_up_network(void);

/* start.c */
pid_t start_agent(void); /* returns when it listens */
int connect_to_agent(void);

/* filter.c */
void apply_filter(void); /* to this process and all that it starts; needs no-new-privileges */

/* control.c */
bool answer_questions(int fd); /* of the host; false: it has ended the connection */

/* vsock.c */
int listen_to_host(unsigned port);
int accept_host(int listener); /* -1: no connection now, or not the host's */

/* bridge.c */
enum { CONTROL_PORT = 1, AGENT_PORT = 2 }; /* of vsock; of a console the agent has all but the first */
_Noreturn void serve(pid_t agent);

#endif

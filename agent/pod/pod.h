/* The agent of pods: it listens on TCP for the one gateway whose public key it was started with. docs/kubernetes-channel.md
 * has the reasons.
 *
 * options.c reads the command line. peers.c accepts connections and shakes hands. carrier.c carries bytes between an
 * authenticated connection and the link (../link.c), which has one end of a socketpair and knows nothing of all this. */
#ifndef K8E_POD_H
#define K8E_POD_H

#include "../agent.h"
#include "noise.h"

/* A message on the wire: length u16, then so many bytes. */
enum { PREFIX = 2 };

/* options.c */
void pod_parse(int argc, char **argv); /* dies of what is wrong */
int pod_listener(void);
extern uint8_t gateway_key[KEY_SIZE];

/* peers.c */
void pod_listen(int fd);
void tick_soon(void); /* carriers_tick and the peers' deadlines are looked at within a second */

/* carrier.c */
void carrier_open(int fd, const struct cipher *in, const struct cipher *out, const uint8_t *text, uint32_t length);
bool carriers_tick(void);         /* whether one waits for its end */
void pod_flush(void);             /* sends what the link has said last */
void pod_release_memory(void);

#endif

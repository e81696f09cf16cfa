/* k8e-agent: pid 1 of a sandbox. One thread, one epoll loop (main.c); a connection to the host (link.c) that carries
 * channels; a channel is a command (exec.c, command.c, supervisor.c; parked.c and template.c for those that wait for their program) or an
 * operation on files and sockets (files.c, write.c, walk.c, socket.c). Bytes flow through rings (ring.c) that are flow control and memory for a lost link in one.
 *
 * Everything that is sent is derived from channel state when the socket has room (channel_pump), so nothing queues. */
#ifndef K8E_AGENT_H
#define K8E_AGENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "wire.h"

/* main.c ---------------------------------------------------------------------------------------------------------- */

struct source {
    int fd; /* -1: closed */
    uint32_t events;
    bool watched;
    void (*ready)(struct source *, uint32_t events);
};

void source_open(struct source *, int fd, void (*ready)(struct source *, uint32_t));
void source_watch(struct source *, uint32_t events); /* level triggered; errors and hang-ups come unasked */
void source_mute(struct source *);
void source_close(struct source *);
uint64_t now_ms(void);
extern uint64_t initial_files[2]; /* RLIMIT_NOFILE as we found it, for the commands */
_Noreturn void die(const char *message);

#define container_of(pointer, type, member) ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

/* ring.c ---------------------------------------------------------------------------------------------------------- */

/* The bytes [acked, end) of a stream. A full ring that may drop splits: its first half stays, its second half keeps the
 * latest bytes, and what is between is gone but counted. */
struct ring {
    uint8_t *bytes;
    uint32_t capacity; /* a multiple of 4096 */
    uint64_t acked, end;
    bool split;
    uint64_t tail_origin, tail_start; /* split only: where the second half began, and begins now */
};

uint32_t ring_space(const struct ring *, bool may_drop, uint8_t **at);   /* contiguous room to write */
void ring_wrote(struct ring *, uint32_t count, bool may_drop);
uint32_t ring_bytes(const struct ring *, uint64_t *offset, uint8_t **at); /* contiguous bytes from offset on; skips the gap */
void ring_ack(struct ring *, uint64_t offset);
uint32_t ring_room(const struct ring *); /* bytes that fit without dropping */
void ring_put(struct ring *, const void *bytes, uint32_t count); /* the caller checked ring_room */

/* channel.c ------------------------------------------------------------------------------------------------------- */

/* Bytes out of the sandbox: a ring, and usually a descriptor that fills it. */
struct stream {
    struct source source;
    struct ring ring;
    uint64_t sent;
    uint64_t mark; /* the command has exited: deliver up to here whatever happens */
    bool ended, eof_sent;
    int error;
};

/* Bytes into the sandbox: written through, and held in a ring while the descriptor would block. */
struct input {
    struct source source;
    struct ring ring;        /* acked: written to the descriptor; end: received */
    uint64_t acked_to_host;
    bool ack_due;
    bool eof, gone, gone_sent; /* host said EOF; the command reads no more; host was told */
    bool held;                 /* there is no descriptor yet: what comes waits in the ring */
    bool terminal;
};

struct channel;

struct kind {
    void (*data)(struct channel *, const uint8_t *, uint32_t); /* the next bytes of stream 0, within the window */
    void (*eof)(struct channel *);
    void (*room)(struct channel *, int stream); /* an ACK made room in a ring */
    void (*work)(struct channel *);             /* a slice of something long; called while busy */
    void (*cancel)(struct channel *);           /* give up: the host asked, or is gone */
    void (*drop)(struct channel *);             /* the last thing before the memory goes */
};

enum { MAX_EXTRA = 96 };

struct channel {
    struct channel *previous, *next;
    const struct kind *kind;
    uint64_t id;
    bool attached;      /* to the live connection */
    bool opened, told;  /* OPENED is due; was sent in this attachment, and nothing else goes before it */
    bool finished;      /* RESULT is due once all output was sent; code, error and extra say what */
    bool forget;        /* nothing needs to survive RESULT */
    bool detach_due;    /* a command that the host lets go */
    bool busy, dead;
    uint32_t code, error;
    uint8_t opened_payload[MAX_EXTRA];
    uint32_t opened_length;
    uint8_t *result;    /* what follows code and errno */
    uint32_t result_length;
    struct stream out[2]; /* streams 1 and 2 */
    int streams;          /* how many of them are in use */
    struct input in;
    bool has_input;
};

extern struct channel channels; /* list head */
extern bool work_to_do;

struct channel *channel_find(uint64_t id);
void channel_init(struct channel *, const struct kind *, uint64_t id);
void channel_refuse(uint64_t id, uint32_t code, int error);
void channel_opened(struct channel *, const void *payload, uint32_t length);
void channel_finish(struct channel *, uint32_t code, int error);
void channel_result(struct channel *, const void *bytes, uint32_t length);
void channel_kill(struct channel *); /* freed at the end of this turn */
void channels_sweep(void);
bool channel_pump(struct channel *); /* sends what is due; false when the socket is full */
bool stream_fill(struct channel *, struct stream *); /* reads the descriptor into the ring; true if it read */
void stream_end(struct stream *);
void input_data(struct channel *, const uint8_t *, uint32_t length);
void input_eof(struct channel *);
void input_ready(struct source *, uint32_t events);
void input_gone(struct input *);
void input_release(struct input *); /* there is a descriptor now, or never will be */
bool ring_allocate(struct ring *, uint32_t capacity);
void ring_free(struct ring *);
uint32_t code_of(int error);

/* link.c ---------------------------------------------------------------------------------------------------------- */

void link_listen(int fd); /* -1: for those only whom link_admit lets in */
void link_admit(int fd);   /* in the agent of pods (pod/): a connection as the listener would accept it */
void link_flush(void);
bool link_connected(void);
bool link_room(uint32_t control); /* is there room for control frames of that many bytes */
void link_put(uint8_t type, uint8_t stream, uint64_t id, const void *payload, uint32_t length);
bool link_send_data(uint8_t stream, uint64_t id, uint64_t offset, const uint8_t *bytes, uint32_t length);
void link_fail(void); /* the host broke the protocol */
void link_close(uint32_t reason);
void link_release_memory(void);
extern uint8_t instance[NONCE_SIZE];

/* command.c ------------------------------------------------------------------------------------------------------- */

void command_exec(uint64_t id, const uint8_t *payload, uint32_t length);
void command_attach(uint64_t id, uint64_t stdout_from, uint64_t stderr_from);
void command_list(uint64_t id);
void command_frame(struct channel *, uint8_t type, const uint8_t *payload);
void command_reaped(pid_t pid);
void command_link_lost(struct channel *);
bool command_unreaped(struct channel *); /* its supervisor still uses its memory */
bool channel_is_command(const struct channel *);
int commands_timeout(void); /* ms until the next drain ends or offer lapses, -1: none */
void commands_tick(void);
void commands_end_all(void);

/* parked.c -------------------------------------------------------------------------------------------------------- */

struct command;

void parked_request(uint64_t id, const uint8_t *payload, uint32_t length);
bool parked_offer(struct command *); /* true: a parked interpreter was asked to be this command, and its answer follows */
void parked_reaped(pid_t pid);
uint64_t parked_deadline(void); /* of now_ms, UINT64_MAX: none */
void parked_tick(void);
void parked_end_all(void);

/* supervisor.c ---------------------------------------------------------------------------------------------------- */

struct rlimit_request { uint32_t resource; uint64_t soft, hard; };

/* What a supervisor is given, and where it leaves its report. It shares the agent's memory. */
struct launch {
    /* set before the supervisor starts */
    char **argv, **envp;
    const char *cwd, *path; /* path: PATH of the environment, NULL if argv[0] has a slash */
    uint32_t uid, gid, umask, timeout_ms, grace_ms, flags;
    uint32_t group_count, rlimit_count;
    uint32_t *groups;
    struct rlimit_request *rlimits;
    struct rlimit_request files; /* RLIMIT_NOFILE as the agent found it */
    int stdio[3], report;
    int control; /* what a parked interpreter waits on; -1: none */
    void *supervisor_stack, *command_stack; /* tops */
    /* the agent's wishes; SIGUSR1 says that one is here */
    _Atomic uint32_t begin_wanted; /* a parked one has its program: its timeout counts from now on */
    uint64_t offered_us;           /* when it was offered one, before that process could know of it; 0: it never was */
    _Atomic uint32_t end_wanted; /* 1 + grace in ms */
    _Atomic int next_wanted;       /* the pid of a template's copy, as that says, which is to be the next command */
    _Atomic uint32_t last_wanted;  /* a template is not needed any more: the command that runs is its last */
    _Atomic uint64_t signals[SCOPES];
    /* the report, valid after the byte that announces it: 's' started, 'f' failed, 'e' ended; 'r': the next may begin */
    int pid, failed_stage, failed_error, status, cause;
    uint64_t wall_us, user_us, system_us, max_rss_kib;
};

long supervisor_start(struct launch *);
long renounce_mounting(void); /* -errno; nothing to do where it was done, or never could be */

/* tree.c, for supervisors only */
void each_number(const char *directory, void (*visit)(int, void *), void *context); /* entries whose name is a number */
void signal_tree(int number, int then); /* every descendant of this process; then: a second signal, or 0 */
void kill_tree(void);     /* stops it first, so that it cannot grow meanwhile */
void kill_children(void); /* what is left, or came since */
bool has_other_children(int one, int other);

/* files.c, write.c, walk.c, socket.c --------------------------------------------------------------------------------------- */

enum { PATH_LIMIT = 4096 };
struct stat;

struct file_request {
    uint32_t uid, gid, flags, mode;
    uint64_t offset, length;
    const char *path, *second; /* NUL-terminated copies, "/"-rooted; second may be empty */
};

void file_request(uint8_t type, uint64_t id, const uint8_t *payload, uint32_t length);
void write_open(uint64_t id, const struct file_request *);
void list_open(uint64_t id, const struct file_request *);
void remove_open(uint64_t id, const struct file_request *);
void watch_open(uint64_t id, const struct file_request *);
void connect_open(uint64_t id, const struct file_request *);
int not_regular(const struct stat *); /* a code, OK for a regular file */
int rename_new(const char *from, const char *to); /* errno; never replaces */
bool assume(uint32_t uid, uint32_t gid); /* act as another user until resume() */
void resume_self(void);
uint32_t entry_encode(uint8_t *to, const struct stat *, const char *name, const char *target, uint32_t target_length,
                      uint8_t flags);
enum { MAX_ENTRY = 48 + 2 * PATH_LIMIT };

#endif

/* The agent protocol in numbers. docs/agent-protocol.md is the contract, src/k8e/link/protocol.py the other
 * spelling; a test compares the three. */
#ifndef K8E_WIRE_H
#define K8E_WIRE_H

#include <stdint.h>
#include <string.h>

#define AGENT_VERSION "0.3.0"
#define GENERATION 4
#define MAGIC 0x4145384bu

enum {
    HEADER_SIZE = 16,
    HELLO_SIZE = 24,
    NONCE_SIZE = 16,
    MAX_DATA = 65536,
    MAX_REQUEST = 2097152,
    MAX_CONTROL = 65536,
    INPUT_WINDOW = 262144,
    OUTPUT_WINDOW = 262144,
    MIN_WINDOW = 16384,
    MAX_WINDOW = 1048576,
    MAX_COMMANDS = 1024,
    MAX_DEPTH = 128,
    EXEC_FIXED = 52,
    FILE_FIXED = 40,
    PARK_FIXED = 8,
    MAX_PARKED = 12,
};

enum frame_type {
    HELLO = 1,
    PING = 2,
    PONG = 3,
    GOODBYE = 4,
    EXEC = 16,
    ATTACH = 17,
    READ = 18,
    WRITE = 19,
    LIST = 20,
    STAT = 21,
    MKDIR = 22,
    MOVE = 23,
    REMOVE = 24,
    CHMOD = 25,
    WATCH = 26,
    CONNECT = 27,
    COMMANDS = 28,
    PARK = 29,
    BIND = 30,
    DATA = 32,
    EOF_ = 33, /* EOF is stdio's */
    ACK = 34,
    OPENED = 35,
    RESULT = 36,
    SIGNAL = 37,
    END = 38,
    RESIZE = 39,
    DETACH = 40,
    RELEASE = 41,
    CANCEL = 42,
};

enum code {
    OK = 0,
    NOT_FOUND = 1,
    DENIED = 2,
    EXISTS = 3,
    NOT_DIRECTORY = 4,
    IS_DIRECTORY = 5,
    NOT_REGULAR = 6,
    NAME_TOO_LONG = 7,
    LINK_LOOP = 8,
    NO_SPACE = 9,
    READ_ONLY = 10,
    NOT_EMPTY = 11,
    CROSS_DEVICE = 12,
    BUSY = 13,
    TOO_MANY = 14,
    NO_MEMORY = 15,
    INVALID = 16,
    IO = 17,
    TOO_DEEP = 18,
    REFUSED = 19,
    UNSUPPORTED = 20,
    CANCELED = 21,
    DETACHED = 22,
    UNKNOWN_COMMAND = 23,
    DUPLICATE = 24,
    TOO_BIG = 25,
    NOT_EXECUTABLE = 26,
    LOST = 27,
    OTHER = 28,
};

enum stage { STAGE_REQUEST = 1, STAGE_RESOURCES, STAGE_USER, STAGE_LIMITS, STAGE_CWD, STAGE_EXEC };
enum goodbye { SUPERSEDED = 1, PROTOCOL_ERROR, NO_COMMON_GENERATION, SHUTTING_DOWN };
enum exec_flag { EXEC_PTY = 1, EXEC_NO_STDIN = 2, EXEC_DETACHED = 4, EXEC_KEEP_CAPABILITIES = 8, EXEC_PARKED = 16, EXEC_FLAGS = 31 };
enum opened_state { STATE_ENDED = 1, STATE_HANDED_OVER = 2, STATE_COPY = 4 };
enum how { EXITED = 1, SIGNALLED = 2 };
enum cause { BY_ITSELF = 0, BY_TIMEOUT = 1, BY_END = 2 };
enum scope { SCOPE_PROCESS, SCOPE_GROUP, SCOPE_TREE, SCOPES };

#define OWN_ID 0xffffffffu
#define KEEP_MODE 0xffffffffu

struct header {
    uint32_t length;
    uint8_t type, stream;
    uint64_t id;
};

/* Both supported machines are little endian; memcpy is what makes unaligned access legal. */
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little endian only"
#endif

static inline uint16_t get16(const uint8_t *p) { uint16_t v; memcpy(&v, p, sizeof v); return v; }
static inline uint32_t get32(const uint8_t *p) { uint32_t v; memcpy(&v, p, sizeof v); return v; }
static inline uint64_t get64(const uint8_t *p) { uint64_t v; memcpy(&v, p, sizeof v); return v; }
static inline uint8_t *put8(uint8_t *p, uint8_t v) { *p = v; return p + 1; }
static inline uint8_t *put16(uint8_t *p, uint16_t v) { memcpy(p, &v, sizeof v); return p + sizeof v; }
static inline uint8_t *put32(uint8_t *p, uint32_t v) { memcpy(p, &v, sizeof v); return p + sizeof v; }
static inline uint8_t *put64(uint8_t *p, uint64_t v) { memcpy(p, &v, sizeof v); return p + sizeof v; }
static inline uint8_t *put_bytes(uint8_t *p, const void *s, size_t n) { if (n) memcpy(p, s, n); return p + n; }

#endif

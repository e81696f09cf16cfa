/* Noise_KX_25519_ChaChaPoly_BLAKE2s, the responder's side: noiseprotocol.org, revision 34. The primitives are those of
 * crypto.zig. No I/O: bytes in, bytes out. */
#ifndef K8E_NOISE_H
#define K8E_NOISE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KEY_SIZE = 32,
    TAG_SIZE = 16,
    MESSAGE_LIMIT = 65535, /* of every Noise message */
    TEXT_LIMIT = MESSAGE_LIMIT - TAG_SIZE,
    ANSWER_SIZE = 2 * KEY_SIZE + 2 * TAG_SIZE, /* and the payload's */
};

struct key_pair {
    uint8_t secret[KEY_SIZE], public[KEY_SIZE];
};

/* One direction. A nonce is used once; the last one is reserved by the specification. */
struct cipher {
    uint8_t key[KEY_SIZE];
    uint64_t nonce;
};

struct responder {
    struct key_pair own;        /* static, made at the start */
    uint8_t gateway[KEY_SIZE];  /* the only initiator that can read an answer */
    const uint8_t *prologue;
    size_t prologue_length;
};

bool key_pair_make(struct key_pair *, const uint8_t secret[KEY_SIZE]);

/* Answers the initiator's message, which is its ephemeral key and a payload in the clear. The answer takes ANSWER_SIZE
 * and the payload's length. Only who has the gateway's secret can derive the ciphers: the first message that `in` opens
 * proves that. */
bool noise_answer(const struct responder *, const struct key_pair *ephemeral, const uint8_t *message, size_t length,
                  const uint8_t *payload, size_t payload_length, uint8_t *answer, struct cipher *in,
                  struct cipher *out);

bool cipher_seal(struct cipher *, uint8_t *text, size_t length); /* in place, and TAG_SIZE more */
bool cipher_open(struct cipher *, uint8_t *text, size_t length); /* length with the tag */

#endif

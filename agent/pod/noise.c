/* The handshake and the ciphers, word for word from the specification; the names there are in the comments. */
#define _GNU_SOURCE
#include <string.h>

#include "noise.h"

/* crypto.zig */
bool crypto_public(uint8_t *public, const uint8_t *secret);
bool crypto_agree(uint8_t *shared, const uint8_t *secret, const uint8_t *public);
void crypto_seal(uint8_t *text, size_t length, const uint8_t *data, size_t data_length, uint64_t nonce,
                 const uint8_t *key);
bool crypto_open(uint8_t *text, size_t length, const uint8_t *data, size_t data_length, uint64_t nonce,
                 const uint8_t *key);
void crypto_hash(uint8_t *hash, const uint8_t *first, size_t first_length, const uint8_t *second,
                 size_t second_length);
void crypto_derive(uint8_t *keys, const uint8_t *chaining, const uint8_t *material, size_t length);

static const uint8_t name[] = "Noise_KX_25519_ChaChaPoly_BLAKE2s";

/* SymmetricState */
struct state {
    uint8_t hash[KEY_SIZE], chaining[KEY_SIZE]; /* h, ck */
    struct cipher cipher;                       /* k, n */
};

bool key_pair_make(struct key_pair *keys, const uint8_t secret[KEY_SIZE])
{
    memcpy(keys->secret, secret, KEY_SIZE);
    return crypto_public(keys->public, secret);
}

static void mix_hash(struct state *s, const uint8_t *bytes, size_t length)
{
    crypto_hash(s->hash, s->hash, KEY_SIZE, bytes, length);
}

static bool mix_key(struct state *s, const uint8_t *secret, const uint8_t *public)
{
    uint8_t shared[KEY_SIZE], keys[2 * KEY_SIZE];
    bool agreed = crypto_agree(shared, secret, public);
    if (agreed) {
        crypto_derive(keys, s->chaining, shared, KEY_SIZE);
        memcpy(s->chaining, keys, KEY_SIZE);
        memcpy(s->cipher.key, keys + KEY_SIZE, KEY_SIZE);
        s->cipher.nonce = 0;
    }
    explicit_bzero(shared, sizeof shared);
    explicit_bzero(keys, sizeof keys);
    return agreed;
}

/* EncryptAndHash; returns what follows it. */
static uint8_t *put_sealed(struct state *s, uint8_t *at, const uint8_t *text, size_t length)
{
    if (length)
        memcpy(at, text, length);
    crypto_seal(at, length, s->hash, KEY_SIZE, s->cipher.nonce++, s->cipher.key);
    mix_hash(s, at, length + TAG_SIZE);
    return at + length + TAG_SIZE;
}

static void split(struct state *s, struct cipher *in, struct cipher *out)
{
    uint8_t keys[2 * KEY_SIZE];
    crypto_derive(keys, s->chaining, s->chaining, 0);
    memcpy(in->key, keys, KEY_SIZE);
    memcpy(out->key, keys + KEY_SIZE, KEY_SIZE);
    in->nonce = out->nonce = 0;
    explicit_bzero(keys, sizeof keys);
}

bool noise_answer(const struct responder *r, const struct key_pair *ephemeral, const uint8_t *message, size_t length,
                  const uint8_t *payload, size_t payload_length, uint8_t *answer, struct cipher *in,
                  struct cipher *out)
{
    if (length < KEY_SIZE || length > MESSAGE_LIMIT || payload_length > MESSAGE_LIMIT - ANSWER_SIZE)
        return false;
    const uint8_t *remote = message; /* re */
    struct state s;
    crypto_hash(s.hash, name, sizeof name - 1, name, 0);
    memcpy(s.chaining, s.hash, KEY_SIZE);
    mix_hash(&s, r->prologue, r->prologue_length);
    mix_hash(&s, r->gateway, KEY_SIZE); /* -> s, known beforehand */
    mix_hash(&s, remote, KEY_SIZE);     /* -> e */
    mix_hash(&s, message + KEY_SIZE, length - KEY_SIZE);
    memcpy(answer, ephemeral->public, KEY_SIZE); /* <- e, ee, se, s, es */
    mix_hash(&s, ephemeral->public, KEY_SIZE);
    bool agreed = mix_key(&s, ephemeral->secret, remote) && mix_key(&s, ephemeral->secret, r->gateway);
    if (agreed) {
        uint8_t *at = put_sealed(&s, answer + KEY_SIZE, r->own.public, KEY_SIZE);
        agreed = mix_key(&s, r->own.secret, remote);
        if (agreed) {
            put_sealed(&s, at, payload, payload_length);
            split(&s, in, out);
        }
    }
    explicit_bzero(&s, sizeof s);
    return agreed;
}

bool cipher_seal(struct cipher *c, uint8_t *text, size_t length)
{
    if (c->nonce == UINT64_MAX || length > TEXT_LIMIT)
        return false;
    crypto_seal(text, length, text, 0, c->nonce++, c->key);
    return true;
}

bool cipher_open(struct cipher *c, uint8_t *text, size_t length)
{
    if (c->nonce == UINT64_MAX || length < TAG_SIZE || length > MESSAGE_LIMIT)
        return false;
    return crypto_open(text, length - TAG_SIZE, text, 0, c->nonce++, c->key);
}

//! The primitives of the pod's channel, from Zig's standard library and with C names. Nothing is implemented here.

const std = @import("std");
const X25519 = std.crypto.dh.X25519;
const Aead = std.crypto.aead.chacha_poly.ChaCha20Poly1305;
const Blake2s = std.crypto.hash.blake2.Blake2s256;
const Hkdf = std.crypto.kdf.hkdf.Hkdf(std.crypto.auth.hmac.Hmac(Blake2s));

// A failed check of the language, of which release builds have few, ends the process without a word.
pub const panic = std.debug.no_panic;

/// The public key of a secret one.
export fn crypto_public(public: *[32]u8, secret: *const [32]u8) bool {
    public.* = X25519.recoverPublicKey(secret.*) catch return false;
    return true;
}

/// The secret that both sides share; false for a public key of low order, with which it would be no secret.
export fn crypto_agree(shared: *[32]u8, secret: *const [32]u8, public: *const [32]u8) bool {
    shared.* = X25519.scalarmult(secret.*, public.*) catch return false;
    return true;
}

/// Encrypts in place; the tag of 16 bytes follows the text.
export fn crypto_seal(text: [*]u8, length: usize, data: *const [32]u8, data_length: usize, nonce: u64, key: *const [32]u8) void {
    Aead.encrypt(text[0..length], text[length..][0..16], text[0..length], data[0..data_length], expand(nonce), key.*);
}

/// Decrypts in place; length is without the tag. Nothing is decrypted when the tag is wrong.
export fn crypto_open(text: [*]u8, length: usize, data: *const [32]u8, data_length: usize, nonce: u64, key: *const [32]u8) bool {
    const tag = text[length..][0..16].*;
    Aead.decrypt(text[0..length], text[0..length], tag, data[0..data_length], expand(nonce), key.*) catch return false;
    return true;
}

export fn crypto_hash(hash: *[32]u8, first: [*]const u8, first_length: usize, second: [*]const u8, second_length: usize) void {
    var state = Blake2s.init(.{});
    state.update(first[0..first_length]);
    state.update(second[0..second_length]);
    state.final(hash);
}

/// Two keys out of a chaining key and new material.
export fn crypto_derive(keys: *[64]u8, chaining: *const [32]u8, material: *const [32]u8, length: usize) void {
    Hkdf.expand(keys, "", Hkdf.extract(chaining, material[0..length]));
}

fn expand(nonce: u64) [12]u8 {
    var bytes = [_]u8{0} ** 12;
    std.mem.writeInt(u64, bytes[4..12], nonce, .little);
    return bytes;
}

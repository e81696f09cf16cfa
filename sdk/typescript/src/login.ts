/**
 * How a client gets its certificate: from the daemon of this machine, which knows its users, or with an API key.
 *
 * Nothing secret is ever sent. The key in an API key signs a request for a certificate; its fingerprint tells whether the
 * server at the other end is the gateway it was made for, before anything is asked of it.
 */
import { createHash, createPrivateKey, generateKeyPairSync, sign } from "node:crypto";
import { readFileSync } from "node:fs";
import { request as httpRequest } from "node:http";
import { type DetailedPeerCertificate, connect as connectTls } from "node:tls";

import { type Client, type ServiceError } from "@grpc/grpc-js";

import { OPTIONS, makeTarget } from "./channel.js";
import { SandboxService } from "./contract.js";
import { InvalidArgument, ServerNotTrusted, Unavailable, translate } from "./errors.js";
import { findHint } from "./hints.js";

const PREFIX = "k8e_";
const PURPOSE = Buffer.from("k8e-login-v1\0", "latin1");
const SECONDS = 20;

/** The anonymous certificate, which every client has: gRPC requires one before a client can ask for its own. */
export const NOBODY_CERTIFICATE = Buffer.from(`-----BEGIN CERTIFICATE-----
MIIBPjCB5qADAgECAgEBMAoGCCqGSM49BAMCMBUxEzARBgNVBAMMCms4ZSBub2Jv
ZHkwIBcNMjAwMTAxMDAwMDAwWhgPOTk5OTEyMzEyMzU5NTlaMBUxEzARBgNVBAMM
Cms4ZSBub2JvZHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAQzjk1c1Duxelb3
l77bFsjtKWpsd3lrFBdEJWRmEL6jAgR4dyno48Z8+sVtwCb7a9QI6VtKStEPs8bf
0Se5a2NjoyUwIzAMBgNVHRMBAf8EAjAAMBMGA1UdJQQMMAoGCCsGAQUFBwMCMAoG
CCqGSM49BAMCA0cAMEQCIC/NfbBtdz/41tKckGHOJxWb+d2Ha8BptCCoqoztQMEd
AiBXewdvxdGnsW4wOLDW5iZearjouaP/OGGDNtqw+G61Ng==
-----END CERTIFICATE-----
`);
export const NOBODY_KEY = Buffer.from(`-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgrHASSgmZw/WqHUbY
dRjQ7dluc+ZU2dAFaL9uyHm7a4KhRANCAAQzjk1c1Duxelb3l77bFsjtKWpsd3lr
FBdEJWRmEL6jAgR4dyno48Z8+sVtwCb7a9QI6VtKStEPs8bf0Se5a2Nj
-----END PRIVATE KEY-----
`);

/** A client certificate with its key, and the CA that the gateway's own must come from. All PEM. */
export interface Identity {
  certificate: Buffer;
  key: Buffer;
  authority: Buffer;
  expires: number;
  /** Where the gateway is, if it said so. */
  endpoint: string;
  /** The process that issued it, of this machine. */
  daemon: string;
}

interface ApiKey {
  keyId: Buffer;
  fingerprint: Buffer;
  secret: Buffer;
}

const sha256 = (data: Uint8Array): Buffer => createHash("sha256").update(data).digest();

export function parseKey(text: string): ApiKey {
  const word = text.trim();
  const encoded = word.slice(PREFIX.length);
  const content = /^[A-Za-z0-9_-]*$/.test(encoded) ? Buffer.from(encoded, "base64url") : Buffer.alloc(0);
  const body = content.subarray(0, 72);
  if (!word.startsWith(PREFIX) || content.length !== 76 || !sha256(body).subarray(0, 4).equals(content.subarray(72))) {
    const parts = { code: "bad_apikey", field: "apiKey", hint: findHint("bad_apikey") };
    throw new InvalidArgument("this is not an API key, or not all of it", parts);
  }
  return { keyId: body.subarray(0, 8), fingerprint: body.subarray(8, 40), secret: body.subarray(40) };
}

function signLogin(key: ApiKey, request: Uint8Array): Buffer {
  // A raw Ed25519 key in the one form that node takes: PKCS#8 with a head that is always the same.
  const head = Buffer.from("302e020100300506032b657004220420", "hex");
  const secret = createPrivateKey({ key: Buffer.concat([head, key.secret]), format: "der", type: "pkcs8" });
  return sign(null, Buffer.concat([PURPOSE, key.fingerprint, key.keyId, sha256(request)]), secret);
}

// A request for a certificate (PKCS#10), which node does not make.

function tag(kind: number, ...parts: Uint8Array[]): Buffer {
  const content = Buffer.concat(parts);
  const size = content.length;
  const length = size < 0x80 ? [size] : size < 0x100 ? [0x81, size] : [0x82, size >> 8, size & 0xff];
  return Buffer.concat([Buffer.from([kind, ...length]), content]);
}

const sequence = (...parts: Uint8Array[]) => tag(0x30, ...parts);
const ECDSA_WITH_SHA256 = sequence(Buffer.from("06082a8648ce3d040302", "hex"));
const COMMON_NAME = Buffer.from("0603550403", "hex");

export function makeRequest(): { key: Buffer; der: Buffer; pem: string } {
  const { privateKey, publicKey } = generateKeyPairSync("ec", { namedCurve: "P-256" });
  const name = sequence(tag(0x31, sequence(COMMON_NAME, tag(0x0c, Buffer.from("k8e client")))));
  const version = Buffer.from("020100", "hex");
  const attributes = tag(0xa0);
  const info = sequence(version, name, publicKey.export({ format: "der", type: "spki" }), attributes);
  const signature = sign("sha256", info, privateKey);
  const der = sequence(info, ECDSA_WITH_SHA256, tag(0x03, Buffer.from([0]), signature));
  const lines = der.toString("base64").match(/.{1,64}/g)!.join("\n");
  const pem = `-----BEGIN CERTIFICATE REQUEST-----\n${lines}\n-----END CERTIFICATE REQUEST-----\n`;
  return { key: Buffer.from(privateKey.export({ format: "pem", type: "pkcs8" })), der, pem };
}

/** From the daemon of this machine, through its socket. Fails with what the system says when there is none. */
export async function loginLocal(path: string): Promise<Identity> {
  const request = makeRequest();
  const body = Buffer.from(JSON.stringify({ csr: request.pem }));
  const { status, text } = await new Promise<{ status: number; text: string }>((resolve, reject) => {
    const headers = { Host: "localhost", "Content-Type": "application/json", "Content-Length": body.length };
    const call = httpRequest(
      { socketPath: path, path: "/v1/login", method: "POST", headers, timeout: SECONDS * 1000, agent: false },
      (response) => {
        const pieces: Buffer[] = [];
        response.on("data", (piece: Buffer) => pieces.push(piece));
        response.on("end", () => resolve({ status: response.statusCode ?? 0, text: Buffer.concat(pieces).toString() }));
        response.on("error", reject);
      },
    );
    call.on("timeout", () => call.destroy(new Error("no answer in time")));
    call.on("error", reject);
    call.end(body);
  });
  let answer: Record<string, string | number>;
  try {
    answer = JSON.parse(text) as Record<string, string | number>;
  } catch (cause) {
    const hint = "Is this client of the same version as the daemon?";
    const parts = { code: "answer_unusable", detail: `${path}: ${(cause as Error).message}`, hint };
    throw new Unavailable("what answers at the daemon's socket is no daemon", parts, { cause });
  }
  if (status >= 300) {
    const [code, detail, hint] = ["code", "detail", "hint"].map((name) => String(answer[name] ?? ""));
    throw new Unavailable(String(answer["error"] ?? ""), { code: code!, detail: detail!, hint: findHint(code!, hint) });
  }
  return {
    certificate: Buffer.from(String(answer["certificate"])),
    key: request.key,
    authority: Buffer.from(String(answer["ca_certificate"])),
    expires: Number(answer["expires_at"]),
    endpoint: String(answer["endpoint"]),
    daemon: findProcess(Number(answer["pid"])),
  };
}

/**
 * A process of this machine, told apart from a later one with its id; empty when it has ended, or cannot be seen from
 * here.
 */
export function findProcess(pid: number): string {
  let text: string;
  try {
    text = readFileSync(`/proc/${pid}/stat`, "latin1");
  } catch {
    return "";
  }
  const [state = "", ...fields] = text.slice(text.lastIndexOf(")") + 2).split(" ");
  return "ZX".includes(state) ? "" : `${pid}@${fields[18]}`; // the time at which it was started
}

export async function loginWithKey(address: string, text: string): Promise<Identity> {
  const key = parseKey(text);
  const authority = await findAuthority(address, key.fingerprint);
  const request = makeRequest();
  const message = { key_id: key.keyId.toString("hex"), csr: request.pem, signature: signLogin(key, request.der) };
  return exchange(address, authority, request.key, message, NOBODY_KEY, NOBODY_CERTIFICATE);
}

/** Exchanges a certificate that is valid for a new one. */
export async function loginWithCertificate(
  address: string,
  authority: Buffer,
  key: Buffer,
  certificate: Buffer,
): Promise<Identity> {
  const request = makeRequest();
  return exchange(address, authority, request.key, { csr: request.pem }, key, certificate);
}

/** Sends the request for a certificate for `own` on a connection that is made with `key` and `certificate`. */
async function exchange(
  address: string,
  authority: Buffer,
  own: Buffer,
  message: object,
  key: Buffer,
  certificate: Buffer,
): Promise<Identity> {
  const target = makeTarget(address, authority, key, certificate);
  const client: Client = new SandboxService(address, target.credentials(), { ...OPTIONS, ...target.options });
  try {
    return await new Promise((resolve, reject) => {
      const login = (client as unknown as Record<string, (...words: unknown[]) => unknown>)["Login"]!;
      const done = (error: ServiceError | null, response: { certificate: string; expires_at: number }) =>
        error
          ? reject(translate(error, "asks")) // a certificate that is not fetched has no effect
          : resolve({
              certificate: Buffer.from(response.certificate),
              key: own,
              authority,
              expires: response.expires_at,
              endpoint: "",
              daemon: "",
            });
      login.call(client, message, { deadline: new Date(Date.now() + SECONDS * 1000) }, done);
    });
  } finally {
    client.close();
  }
}

/**
 * The CA certificate (PEM) that a server sends along, if it is the one that we were told to trust.
 *
 * Nothing is believed yet and nothing is asked: this only fetches the certificate that has that fingerprint. The
 * connection that counts is then made with it as the only CA.
 */
export async function findAuthority(address: string, fingerprint: Uint8Array): Promise<Buffer> {
  const border = address.lastIndexOf(":");
  const host = address.slice(0, border).replace(/^\[|\]$/g, "");
  const port = Number(address.slice(border + 1));
  const chain = await new Promise<Buffer[]>((resolve, reject) => {
    const options = { host, port, rejectUnauthorized: false, ALPNProtocols: ["h2"], minVersion: "TLSv1.3" as const };
    const socket = connectTls(options, () => {
      const found: Buffer[] = [];
      let certificate: DetailedPeerCertificate | undefined = socket.getPeerCertificate(true);
      while (certificate?.raw && !found.some((known) => known.equals(certificate!.raw))) {
        found.push(certificate.raw);
        certificate = certificate.issuerCertificate;
      }
      socket.destroy();
      resolve(found);
    });
    socket.setTimeout(SECONDS * 1000, () => socket.destroy(new Error("no answer in time")));
    socket.on("error", (cause) => {
      const parts = { code: "unreachable", detail: cause.message, hint: findHint("unreachable") };
      reject(new Unavailable(`${address} cannot be reached`, parts, { cause }));
    });
  });
  const authority = chain.find((certificate) => sha256(certificate).equals(fingerprint));
  if (!authority) {
    const error = `${address} is not the gateway that this key was made for`;
    throw new ServerNotTrusted(error, { code: "wrong_gateway", hint: findHint("wrong_gateway") });
  }
  const lines = authority.toString("base64").match(/.{1,64}/g)!.join("\n");
  return Buffer.from(`-----BEGIN CERTIFICATE-----\n${lines}\n-----END CERTIFICATE-----\n`);
}

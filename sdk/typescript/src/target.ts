/** Turns the choice of a gateway into a connection's credentials: logs in, renews, finds the CA to trust. */
import { execFile } from "node:child_process";
import { accessSync, constants, readFileSync } from "node:fs";
import { dirname, join } from "node:path";

import { parse } from "yaml";

import { type Target, makeTarget } from "./channel.js";
import { type Choice, LOCAL, type Wanted, choose, findRunDir, readAddress } from "./discovery.js";
import { InvalidArgument, SandboxError, Unavailable } from "./errors.js";
import { findHint } from "./hints.js";
import {
  type Identity,
  NOBODY_CERTIFICATE,
  NOBODY_KEY,
  findProcess,
  loginLocal,
  loginWithCertificate,
  loginWithKey,
} from "./login.js";
import { addToken } from "./token.js";
import { type Credentials, Profiles, RenewedCertificate, isWorn } from "./profiles.js";

const AGAIN = 60; // seconds after which a renewal that failed is tried again
const AT_SOCKET = "renewed_at_socket";

export async function findTarget(wanted: Wanted): Promise<Target> {
  const choice = choose(wanted);
  if (choice.endpoint === undefined) {
    const identity = await logInHere();
    return belong(readAddress(identity.endpoint), identity, true);
  }
  if (choice.apiKey !== undefined) {
    return belong(choice.endpoint, await loginWithKey(choice.endpoint, choice.apiKey));
  }
  if (choice.certificateFile) {
    return useFiles(choice.endpoint, choice);
  }
  if (choice.profile) {
    return useProfile(choice.profile);
  }
  const here = await findIdentityHere(choice.endpoint);
  // Else anonymously, so that the gateway's answer says what is missing.
  return here ? belong(choice.endpoint, here) : makeTarget(choice.endpoint, findRoots(), NOBODY_KEY, NOBODY_CERTIFICATE);
}

/** Looked for anew when a third of the certificate's life is left. */
function belong(address: string, identity: Identity, local = false): Target {
  const renewAt = identity.expires - (identity.expires - Date.now() / 1000) / 3;
  const daemon = local ? identity.daemon : "";
  return makeTarget(address, identity.authority, identity.key, identity.certificate, renewAt, local, daemon);
}

/** Whether the daemon of this machine has ended. gRPC learns of that by and by, and would send a call that is lost. */
export function isGone(target: Target): boolean {
  return target.daemon !== "" && findProcess(parseInt(target.daemon, 10)) !== target.daemon;
}

function useFiles(endpoint: string, choice: Choice): Target {
  const certificates = readFile(choice.certificateFile!);
  if (!choice.keyFile) {
    const target = makeTarget(endpoint, certificates, NOBODY_KEY, NOBODY_CERTIFICATE);
    return choice.tokenFile ? addToken(target, choice.tokenFile) : target;
  }
  const blocks = /-----BEGIN CERTIFICATE-----[^]*?-----END CERTIFICATE-----\n?/g;
  const [own = "", ...rest] = certificates.toString("latin1").match(blocks) ?? [];
  const roots = rest.length ? Buffer.from(rest.join("")) : findRoots();
  return makeTarget(endpoint, roots, readFile(choice.keyFile), Buffer.from(own));
}

function readFile(path: string): Buffer {
  try {
    return readFileSync(path);
  } catch (cause) {
    const code = "certificate_unreadable";
    const parts = { code, detail: (cause as Error).message, hint: findHint(code) };
    throw new InvalidArgument("K8E_SANDBOX_CERT or K8E_SANDBOX_KEY cannot be read", parts, { cause });
  }
}

// Profiles

/** Renews the certificate when a third of its life is left. While it is valid, a renewal that fails is no error. */
async function useProfile(name: string): Promise<Target> {
  const kept = new RenewedCertificate(new Profiles().find(name));
  let credentials = kept.read();
  const now = Date.now() / 1000;
  let tried = 0;
  if (isWorn(credentials, now)) {
    try {
      credentials = await renew(credentials);
      kept.save(credentials);
    } catch (error) {
      if (!(error instanceof SandboxError) || now >= credentials.expires_at) {
        throw error;
      }
      tried = now;
    }
  }
  const life = credentials.expires_at - credentials.issued_at;
  return makeTarget(
    readAddress(credentials.endpoint),
    Buffer.from(credentials.ca_certificate),
    Buffer.from(credentials.key),
    Buffer.from(credentials.certificate),
    Math.max(credentials.expires_at - life / 3, tried + AGAIN),
  );
}

/**
 * By the certificate itself; that of a user of this machine at the socket. Where the socket is closed to the user, the
 * gateway's refusal says what to do.
 */
async function renew(credentials: Credentials): Promise<Credentials> {
  const now = Date.now() / 1000;
  const address = readAddress(credentials.endpoint);
  let identity: Identity;
  try {
    const { ca_certificate: authority, key, certificate } = credentials;
    identity = await loginWithCertificate(address, Buffer.from(authority), Buffer.from(key), Buffer.from(certificate));
  } catch (error) {
    const atSocket = error instanceof SandboxError && error.code === AT_SOCKET;
    const found = atSocket ? await findIdentityHere(address) : undefined;
    if (!found) {
      throw error;
    }
    identity = found;
  }
  return {
    endpoint: credentials.endpoint,
    ca_certificate: identity.authority.toString(),
    certificate: identity.certificate.toString(),
    key: identity.key.toString(),
    issued_at: now,
    expires_at: identity.expires,
  };
}

// The daemon of this machine

/** A user of this machine needs no key for its own gateway. undefined: it is another machine's, or closed to the user. */
async function findIdentityHere(address: string): Promise<Identity | undefined> {
  const border = address.lastIndexOf(":");
  const path = join(findRunDir(), "k8e.sock");
  if (!["127.0.0.1", "[::1]", "localhost"].includes(address.slice(0, border))) {
    return undefined;
  }
  try {
    accessSync(path, constants.W_OK);
    const identity = await loginLocal(path);
    return identity.endpoint.endsWith(address.slice(border)) ? identity : undefined;
  } catch {
    return undefined;
  }
}

/**
 * Logs in as the user of this process. A daemon that was killed takes connections until its last thread has ended, so one
 * that goes away without an answer is asked once more: it is the next daemon that answers then.
 */
async function logInHere(): Promise<Identity> {
  const path = join(findRunDir(), "k8e.sock");
  for (let left = 2; ; left--) {
    try {
      return await loginLocal(path);
    } catch (cause) {
      const { code } = cause as NodeJS.ErrnoException;
      if (cause instanceof SandboxError) {
        throw cause;
      }
      if (code === "EACCES") {
        throw fail("daemon_not_allowed", "you may not use the daemon of this machine", cause);
      }
      const gone = code === "ENOENT" || code === "ECONNREFUSED";
      if (!left || !(gone || code === "ECONNRESET" || code === "EPIPE")) {
        throw fail("daemon_unreachable", "the daemon of this machine does not answer", cause);
      }
      if (gone) {
        await startDaemon(path);
      }
    }
  }
}

function fail(code: string, error: string, cause: unknown): Unavailable {
  const detail = cause instanceof Error ? cause.message : String(cause);
  return new Unavailable(error, { code, detail, hint: findHint(code) }, { cause });
}

/** By asking the command line for its status, which needs one. */
async function startDaemon(path: string): Promise<void> {
  if (process.geteuid?.() !== 0) {
    throw fail("daemon_not_running", "the daemon does not run, and only root can start it", path);
  }
  const env: NodeJS.ProcessEnv = { K8E_SANDBOX_ENDPOINT: LOCAL };
  for (const [name, value] of Object.entries(process.env)) {
    if (!name.startsWith("K8E_SANDBOX_")) {
      env[name] = value;
    }
  }
  return new Promise((resolve, reject) => {
    execFile("k8e", ["sandbox", "status"], { timeout: 120_000, env }, (error, stdout) => {
      if (error?.code === "ENOENT") {
        reject(fail("daemon_not_started", "the daemon does not run, and there is no k8e to start it", path));
      } else if (Number(error?.code) === 2) {
        reject(fail("daemon_not_started", "the daemon of this machine could not be started", stdout.trim()));
      } else {
        resolve();
      }
    });
  });
}

// The CA to trust

/** The server's own CA, if we are where it runs; else the cluster's; else null: the system's. */
function findRoots(): Buffer | null {
  try {
    return readFileSync(join(process.env["K8E_STATE_DIR"] || "/var/lib/k8e", "identity", "ca.crt"));
  } catch {
    return readClusterAuthority(process.env["KUBECONFIG"] || "/etc/k8e/k8e.yaml");
  }
}

interface KubeConfig {
  "current-context"?: string;
  contexts?: { name: string; context: { cluster: string } }[];
  clusters?: { name: string; cluster: { "certificate-authority-data"?: string; "certificate-authority"?: string } }[];
}

/** null for a kubeconfig without what we look for, which is no reason to fail. */
function readClusterAuthority(path: string): Buffer | null {
  try {
    const config = parse(readFileSync(path, "utf8")) as KubeConfig;
    const current = config["current-context"];
    const named = config.contexts?.find((each) => each.name === current)?.context.cluster;
    const found = current ? config.clusters?.find((each) => each.name === named) : config.clusters?.[0];
    const data = found?.cluster["certificate-authority-data"];
    return data ? Buffer.from(data, "base64") : readFileSync(join(dirname(path), found!.cluster["certificate-authority"]!));
  } catch {
    return null;
  }
}

/**
 * The files below ~/.k8e/sandbox that `k8e connect` writes and all clients of a user share. They contain private keys: a
 * file that other users could read or change is refused.
 *
 *     profiles.yaml              gateways that have a name
 *     certificates/HASH@HOST     the certificate that the one with this hash was exchanged for, when it was renewed
 */
import { createHash } from "node:crypto";
import { closeSync, constants, fstatSync, mkdirSync, openSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { dirname, join } from "node:path";

import { parse } from "yaml";

import { InvalidArgument } from "./errors.js";
import { findHint } from "./hints.js";

/** A gateway, a client's certificate for it, and the CA that the gateway's own comes from. PEM. */
export interface Credentials {
  endpoint: string;
  ca_certificate: string;
  certificate: string;
  key: string;
  issued_at: number;
  expires_at: number;
}

/** Whether less than a third of its life is left. */
export function isWorn(credentials: Credentials, now: number): boolean {
  return now > credentials.expires_at - (credentials.expires_at - credentials.issued_at) / 3;
}

export function findFolder(): string {
  return join(process.env["HOME"] || homedir(), ".k8e", "sandbox");
}

function unusable(path: string, cause: string): InvalidArgument {
  const code = "profile_unusable";
  return new InvalidArgument(`${path} cannot be used`, { code, detail: cause, hint: findHint(code) });
}

/** undefined if there is no file. */
function readPrivate(path: string): string | undefined {
  let descriptor: number;
  try {
    descriptor = openSync(path, constants.O_RDONLY);
  } catch (cause) {
    if ((cause as NodeJS.ErrnoException).code === "ENOENT") {
      return undefined;
    }
    throw unusable(path, (cause as Error).message);
  }
  try {
    const found = fstatSync(descriptor);
    if (found.uid !== process.geteuid?.() || found.mode & 0o077) {
      throw unusable(path, "others could read or change it");
    }
    return readFileSync(descriptor, "utf8");
  } finally {
    closeSync(descriptor);
  }
}

function readCredentials(path: string, fields: unknown): Credentials {
  const found = (fields ?? {}) as Credentials;
  const texts = [found.endpoint, found.ca_certificate, found.certificate, found.key];
  if (!texts.every((text) => typeof text === "string") || ![found.issued_at, found.expires_at].every(Number.isFinite)) {
    throw unusable(path, "it is not as k8e connect wrote it");
  }
  return found;
}

/** Gateways by name, and the current one, which is used if none is named and this machine has no daemon. */
export class Profiles {
  readonly #path = join(findFolder(), "profiles.yaml");
  readonly #profiles: Map<string, unknown>;
  readonly current: string;

  constructor() {
    let content: unknown;
    try {
      content = parse(readPrivate(this.#path) ?? "") ?? {};
    } catch (cause) {
      throw cause instanceof InvalidArgument ? cause : unusable(this.#path, (cause as Error).message);
    }
    const { profiles, current } = content as { profiles?: unknown; current?: unknown };
    const empty = typeof content === "object" && Object.keys(content as object).length === 0;
    if (!empty && (typeof profiles !== "object" || profiles === null || Array.isArray(profiles))) {
      throw unusable(this.#path, "it has no profiles");
    }
    this.#profiles = new Map(Object.entries(profiles ?? {}));
    this.current = typeof current === "string" && this.#profiles.has(current) ? current : "";
  }

  find(name: string): Credentials {
    if (!this.#profiles.has(name)) {
      const code = "no_such_profile";
      const detail = `there are: ${[...this.#profiles.keys()].sort().join(", ") || "none"}`;
      throw new InvalidArgument(`there is no profile ${name}`, { code, detail, field: "profile", hint: findHint(code) });
    }
    return readCredentials(this.#path, this.#profiles.get(name));
  }

  /** The name of the first profile for it; empty if there is none. */
  forEndpoint(endpoint: string): string {
    for (const [name, fields] of this.#profiles) {
      if ((fields as Credentials | null)?.endpoint === endpoint) {
        return name;
      }
    }
    return "";
  }
}

/**
 * The certificate for which a profile's was exchanged. A file of its own, which is replaced as a whole: clients that renew
 * at the same time need no lock, and profiles.yaml is `k8e connect`'s alone.
 */
export class RenewedCertificate {
  readonly #stored: Credentials;
  readonly #path: string;

  constructor(stored: Credentials) {
    const digest = createHash("sha256").update(stored.certificate).digest("hex").slice(0, 16);
    const place = stored.endpoint.replace(/[^A-Za-z0-9.-]/g, "_");
    this.#stored = stored;
    this.#path = join(findFolder(), "certificates", `${digest}@${place}`);
  }

  /** The newest: the renewed one, else the profile's own. */
  read(): Credentials {
    const content = readPrivate(this.#path);
    if (content === undefined) {
      return this.#stored;
    }
    try {
      const renewed = readCredentials(this.#path, JSON.parse(content));
      return renewed.expires_at > this.#stored.expires_at ? renewed : this.#stored;
    } catch {
      return this.#stored; // it is renewed anew
    }
  }

  /** A home that cannot be written is no error: this process has the certificate, the next one renews anew. */
  save(renewed: Credentials): void {
    const folder = dirname(this.#path);
    const draft = join(folder, `.renewed.${process.pid}`);
    try {
      mkdirSync(folder, { mode: 0o700, recursive: true });
      const flags = constants.O_WRONLY | constants.O_CREAT | constants.O_TRUNC | constants.O_NOFOLLOW;
      const descriptor = openSync(draft, flags, 0o600);
      try {
        writeFileSync(descriptor, JSON.stringify(renewed));
      } finally {
        closeSync(descriptor);
      }
      renameSync(draft, this.#path);
    } catch {
      // See above.
    }
  }
}

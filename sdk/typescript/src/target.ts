/**
 * Which gateway, and with which identity. In this order:
 *
 * 1. an endpoint: the option, K8E_SANDBOX_ENDPOINT, or that of a profile (option, K8E_SANDBOX_PROFILE). Its identity: an
 *    API key (option, K8E_SANDBOX_APIKEY); the files K8E_SANDBOX_CERT and K8E_SANDBOX_KEY; a profile for the same
 *    endpoint; the daemon of this machine, where the endpoint is its own; else anonymously, with a CA to check the server by
 * 2. the daemon of this machine, through its unix socket; root starts it when it is not there
 * 3. 127.0.0.1:50051, as in 1
 *
 * The CA to check a server by is the one that came with the identity; else that of the server's own files, of the
 * kubeconfig, or one of the system's.
 */
import { execFile } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";

import { parse } from "yaml";

import { type Target, makeTarget } from "./channel.js";
import { InvalidArgument, Unavailable } from "./errors.js";
import { type Identity, NOBODY_CERTIFICATE, NOBODY_KEY, loginLocal, loginWithKey } from "./login.js";

const DEFAULT = "127.0.0.1:50051";
const PORT = 50051;

export interface Wanted {
  endpoint: string | undefined;
  apiKey: string | undefined;
  profile: string | undefined;
}

interface Profile {
  endpoint: string;
  certificate: string;
  key: string;
  ca_certificate: string;
}

/** Looked for anew when a third of the certificate's life is left. */
function belong(address: string, identity: Identity): Target {
  const renewAt = identity.expires - (identity.expires - Date.now() / 1000) / 3;
  return makeTarget(address, identity.authority, identity.key, identity.certificate, renewAt);
}

export async function findTarget(wanted: Wanted): Promise<Target> {
  const profile = wanted.profile ?? (process.env["K8E_SANDBOX_PROFILE"] || undefined);
  const profiles = readProfiles();
  if (profile !== undefined && !profiles.has(profile)) {
    const parts = { code: "profile_not_found", field: "profile", hint: "`k8e connect` makes one" };
    throw new InvalidArgument(`there is no profile ${profile}`, parts);
  }
  const named = profile === undefined ? undefined : profiles.get(profile)?.endpoint;
  const endpoint = (wanted.endpoint || process.env["K8E_SANDBOX_ENDPOINT"]) || named;
  if (endpoint) {
    return chooseIdentity(readAddress(endpoint), wanted.apiKey, profile, profiles);
  }
  const local = await logInHere(true);
  if (local) {
    return belong(readAddress(local.endpoint), local);
  }
  return chooseIdentity(DEFAULT, wanted.apiKey, profile, profiles);
}

async function chooseIdentity(
  address: string,
  givenKey: string | undefined,
  profile: string | undefined,
  profiles: Map<string, Profile>,
): Promise<Target> {
  const apiKey = givenKey || process.env["K8E_SANDBOX_APIKEY"];
  if (apiKey) {
    return belong(address, await loginWithKey(address, apiKey));
  }
  const [certificateFile, keyFile] = [process.env["K8E_SANDBOX_CERT"], process.env["K8E_SANDBOX_KEY"]];
  if (certificateFile && keyFile) {
    const found = readFile(certificateFile, "K8E_SANDBOX_CERT").toString("latin1");
    const [own = "", ...rest] = found.match(/-----BEGIN CERTIFICATE-----[^]*?-----END CERTIFICATE-----\n?/g) ?? [];
    const roots = rest.length ? Buffer.from(rest.join("")) : findRoots();
    return makeTarget(address, roots, readFile(keyFile, "K8E_SANDBOX_KEY"), Buffer.from(own));
  }
  for (const [name, found] of profiles) {
    if ((profile === undefined || profile === name) && readAddress(found.endpoint) === address) {
      return makeTarget(address, Buffer.from(found.ca_certificate), Buffer.from(found.key), Buffer.from(found.certificate));
    }
  }
  const [host, port] = [address.slice(0, address.lastIndexOf(":")), address.slice(address.lastIndexOf(":"))];
  if (["127.0.0.1", "localhost", "[::1]"].includes(host)) {
    const local = await logInHere(false);
    if (local?.endpoint.endsWith(port)) {
      return belong(address, local);
    }
  }
  const roots = certificateFile ? readFile(certificateFile, "K8E_SANDBOX_CERT") : findRoots();
  // Anonymously, so that the gateway's answer says what is missing.
  return makeTarget(address, roots, NOBODY_KEY, NOBODY_CERTIFICATE);
}

/** As who we are on this machine; undefined where there is no daemon. */
async function logInHere(start: boolean): Promise<Identity | undefined> {
  const path = join(process.env["K8E_RUN_DIR"] || "/run/k8e", "k8e.sock");
  for (let tries = 0; ; tries++) {
    try {
      return await loginLocal(path);
    } catch (cause) {
      const { code, message } = cause as NodeJS.ErrnoException;
      if (cause instanceof Unavailable) {
        throw cause;
      }
      if (code === "EACCES") {
        const hint = "join the group `k8e`, or use an API key";
        throw new Unavailable(`${path} is not open for you`, { code: "not_allowed", detail: message, hint }, { cause });
      }
      if (tries || !["ENOENT", "ECONNREFUSED"].includes(code ?? "")) {
        const parts = { code: "unreachable", detail: message };
        throw new Unavailable("the daemon of this machine does not answer", parts, { cause });
      }
      if (!start || process.geteuid?.() !== 0 || !(await startDaemon())) {
        return undefined;
      }
    }
  }
}

/** By asking the command line for its status, which needs one. */
async function startDaemon(): Promise<boolean> {
  return new Promise((resolve, reject) => {
    execFile("k8e", ["sandbox", "status"], { timeout: 120_000 }, (error, stdout) => {
      if (error?.code === "ENOENT") {
        resolve(false);
      } else if (Number(error?.code) === 2) {
        const parts = { code: "unreachable", detail: stdout.trim() };
        reject(new Unavailable("the daemon of this machine could not be started", parts));
      } else {
        resolve(true);
      }
    });
  });
}

/** host:port, as gRPC takes it. */
export function readAddress(text: string): string {
  const bare = text.trim().replace(/^https:\/\//, "").replace(/\/+$/, "");
  const match = /^(\[[0-9A-Fa-f:.]+\]|[^\s:/@[\]]+)(?::(\d{1,5}))?$/.exec(bare);
  if (!match) {
    const hint = "write host:port, such as 10.0.0.1:50051";
    throw new InvalidArgument(`${text} is no endpoint`, { code: "invalid_argument", field: "endpoint", hint });
  }
  return `${match[1]}:${match[2] ?? PORT}`;
}

function readProfiles(): Map<string, Profile> {
  const path = join(process.env["HOME"] || homedir(), ".k8e", "sandbox", "profiles.yaml");
  if (!existsSync(path)) {
    return new Map();
  }
  try {
    const profiles = new Map(Object.entries((parse(readFileSync(path, "utf8")) as { profiles: Record<string, Profile> }).profiles));
    for (const { endpoint, certificate, key, ca_certificate } of profiles.values()) {
      if (![endpoint, certificate, key, ca_certificate].every((part) => typeof part === "string")) {
        throw new Error("a profile is not complete");
      }
    }
    return profiles;
  } catch (cause) {
    const parts = { code: "invalid_profiles", detail: (cause as Error).message, hint: "`k8e connect` writes it anew" };
    throw new InvalidArgument(`${path} cannot be read`, parts, { cause });
  }
}

function readFile(path: string, variable: string): Buffer {
  try {
    return readFileSync(path);
  } catch (cause) {
    throw new InvalidArgument(`${variable} cannot be read`, { code: "invalid_argument", detail: (cause as Error).message });
  }
}

/** The server's own CA, if we are where it runs; else the cluster's; else null: the system's. */
function findRoots(): Buffer | null {
  try {
    return readFileSync(join(process.env["K8E_STATE_DIR"] || "/var/lib/k8e", "identity", "ca.crt"));
  } catch {
    // Most machines are not where it runs.
  }
  const path = [process.env["KUBECONFIG"], "/etc/k8e/k8e.yaml"].find((each) => each && existsSync(each));
  return path ? readClusterAuthority(path) : null;
}

interface KubeConfig {
  "current-context": string;
  contexts: { name: string; context: { cluster: string } }[];
  clusters: { name: string; cluster: { "certificate-authority-data": string } }[];
}

/** null for a kubeconfig without what we look for, which is no reason to fail. */
function readClusterAuthority(path: string): Buffer | null {
  try {
    const config = parse(readFileSync(path, "utf8")) as KubeConfig;
    const context = config.contexts.find((each) => each.name === config["current-context"])!.context;
    const cluster = config.clusters.find((each) => each.name === context.cluster)!.cluster;
    return Buffer.from(cluster["certificate-authority-data"], "base64");
  } catch {
    return null;
  }
}

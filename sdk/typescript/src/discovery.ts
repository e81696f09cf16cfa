/**
 * Chooses the gateway and the credential; asks nothing of either yet. The command line and the Python client choose alike:
 * sdk/discovery.json has the cases that all three are tested with, docs/gateway.md the order.
 *
 * A credential that is given is used or refused. It is never replaced by another one, least of all by the rights that the
 * user of this process has on this machine.
 */
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";

import { InvalidArgument } from "./errors.js";
import { findHint } from "./hints.js";
import { Profiles, findFolder } from "./profiles.js";

const PORT = 50051;
/** As an endpoint: the daemon of this machine, through its socket. */
export const LOCAL = "local";

export interface Wanted {
  endpoint: string | undefined;
  apiKey: string | undefined;
  profile: string | undefined;
}

/** A gateway and the credential for it. Without an endpoint: the daemon of this machine, through its socket. */
export interface Choice {
  endpoint?: string;
  apiKey?: string | undefined;
  /** With `keyFile` the client's certificate, else CAs to trust. */
  certificateFile?: string | undefined;
  keyFile?: string | undefined;
  profile?: string;
  /** Of a service account; `certificateFile` has the CAs to trust. */
  tokenFile?: string;
}

/** An argument comes before its variable; a key that is one comes before the files that variables name. */
export function choose(wanted: Wanted): Choice {
  const given = wanted.endpoint ?? variable("ENDPOINT");
  const apiKey = wanted.apiKey ?? variable("APIKEY");
  const name = wanted.profile ?? variable("PROFILE");
  const certificateFile = wanted.apiKey === undefined ? variable("CERT") : undefined;
  const keyFile = wanted.apiKey === undefined ? variable("KEY") : undefined;
  if (keyFile && !certificateFile) {
    const code = "credential_incomplete";
    throw new InvalidArgument("K8E_SANDBOX_KEY is set, and K8E_SANDBOX_CERT is not", { code, hint: findHint(code) });
  }
  const tokenFile = wanted.apiKey === undefined ? variable("TOKEN_FILE") : undefined;
  if (tokenFile) {
    // It is sent as it is, so it goes to a gateway of the given CA only.
    if (apiKey !== undefined || name !== undefined || keyFile || given === LOCAL) {
      throw ambiguous("K8E_SANDBOX_TOKEN_FILE is set, and another credential or `local` is given");
    }
    if (!certificateFile) {
      const code = "credential_incomplete";
      throw new InvalidArgument("K8E_SANDBOX_TOKEN_FILE is set, and K8E_SANDBOX_CERT is not", { code, hint: findHint(code) });
    }
    return { endpoint: given !== undefined ? readAddress(given) : findOwnGateway(), certificateFile, tokenFile };
  }
  if (keyFile && (apiKey !== undefined || name !== undefined)) {
    const other = apiKey !== undefined ? "an API key" : `the profile ${name}`;
    throw ambiguous(`K8E_SANDBOX_CERT and K8E_SANDBOX_KEY are set, and ${other} is given`);
  }
  const credential = apiKey !== undefined || certificateFile !== undefined;
  if (given === LOCAL) {
    if (credential || name !== undefined) {
      throw ambiguous("the socket of this machine's daemon takes no credential, and one is given");
    }
    return {};
  }
  if (name !== undefined) {
    const endpoint = readAddress(new Profiles().find(name).endpoint);
    if (given !== undefined && readAddress(given) !== endpoint) {
      throw ambiguous(`the profile ${name} is for ${endpoint}, and the endpoint says ${given}`);
    }
    return apiKey !== undefined ? { endpoint, apiKey } : { endpoint, profile: name };
  }
  if (given === undefined && !credential) {
    return chooseWithoutCredential();
  }
  const endpoint = given !== undefined ? readAddress(given) : findOwnGateway();
  return credential ? { endpoint, apiKey, certificateFile, keyFile } : { endpoint, profile: new Profiles().forEndpoint(endpoint) };
}

/** The daemon of this machine; the gateway that `k8e connect` was last used for, where there is no daemon. */
function chooseWithoutCredential(): Choice {
  if (existsSync(join(findRunDir(), "k8e.sock")) || !existsSync(join(findFolder(), "profiles.yaml"))) {
    return {};
  }
  const profiles = new Profiles();
  const profile = profiles.current;
  return profile ? { endpoint: readAddress(profiles.find(profile).endpoint), profile } : {};
}

/** An empty variable says nothing; an empty argument does, and is refused by what reads it. */
function variable(name: string): string | undefined {
  return process.env[`K8E_SANDBOX_${name}`] || undefined;
}

function ambiguous(error: string): InvalidArgument {
  return new InvalidArgument(error, { code: "target_ambiguous", hint: findHint("target_ambiguous") });
}

export function findRunDir(): string {
  return process.env["K8E_RUN_DIR"] || "/run/k8e";
}

/** Where the gateway of this machine listens: its daemon writes that into its run directory. */
function findOwnGateway(): string {
  let text: string;
  try {
    text = readFileSync(join(findRunDir(), "gateway"), "utf8");
  } catch {
    return `127.0.0.1:${PORT}`;
  }
  return readAddress(text);
}

/** host:port, as gRPC takes it. People also write `https://` in front, or no port. */
export function readAddress(text: string): string {
  const bare = text.trim().replace(/^https:\/\//, "").replace(/^grpcs:\/\//, "").replace(/\/+$/, "");
  if (/^[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*$/.test(bare)) {
    return `[${bare}]:${PORT}`;
  }
  const match = /^(\[[0-9A-Fa-f:.]+\]|[^\s:/@[\]]+)(?::([0-9]{1,5}))?$/.exec(bare);
  const port = Number(match?.[2] ?? PORT);
  if (!match || port < 1 || port > 65_535) {
    const code = "bad_endpoint";
    throw new InvalidArgument(`${JSON.stringify(text)} is no endpoint`, { code, field: "endpoint", hint: findHint(code) });
  }
  return `${match[1]}:${match[2] ?? PORT}`;
}

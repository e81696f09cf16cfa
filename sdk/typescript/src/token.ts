/**
 * The token of a service account, which a program in a cluster sends with each call. The kubelet writes it into a file and
 * renews it there, so the file is read anew for each call.
 */
import { readFileSync } from "node:fs";

import { Metadata, credentials } from "@grpc/grpc-js";

import { type Target } from "./channel.js";
import { InvalidArgument } from "./errors.js";
import { findHint } from "./hints.js";

const MOST = 8 << 10;
const TOKEN = /^[!-~]+$/;

function readToken(path: string): string {
  const code = "token_unreadable";
  const fail = (detail: string, cause?: unknown) =>
    new InvalidArgument("K8E_SANDBOX_TOKEN_FILE cannot be read", { code, detail, hint: findHint(code) }, { cause });
  let token: string;
  try {
    token = readFileSync(path, "latin1").trim();
  } catch (cause) {
    throw fail((cause as Error).message, cause);
  }
  if (token.length > MOST || !TOKEN.test(token)) {
    throw fail(`${path} has no token`);
  }
  return token;
}

export function addToken(target: Target, path: string): Target {
  readToken(path); // so that a wrong name is an error of its own
  const perCall = credentials.createFromMetadataGenerator((_, done) => {
    try {
      const metadata = new Metadata();
      metadata.set("authorization", `Bearer ${readToken(path)}`);
      done(null, metadata);
    } catch (error) {
      done(error as Error);
    }
  });
  return { ...target, credentials: () => credentials.combineChannelCredentials(target.credentials(), perCall) };
}

/** The gateway's contract (proto/sandbox.proto), loaded once. */
import { existsSync } from "node:fs";
import { dirname, join } from "node:path";

import { loadPackageDefinition, type ServiceClientConstructor } from "@grpc/grpc-js";
import { loadSync, type MessageTypeDefinition, type PackageDefinition } from "@grpc/proto-loader";

import { here } from "./here.js";

interface ErrorDetail {
  code: string;
  error: string;
  detail: string;
  hint: string;
  field: string;
  retry_after: number;
  run_id: string;
}

function findContract(): string {
  // In the package it is beside dist/; in the repository it has a folder of its own.
  for (let folder = here(); ; folder = dirname(folder)) {
    for (const path of [join(folder, "proto", "sandbox.proto"), join(folder, "proto", "sandbox", "v1", "sandbox.proto")]) {
      if (existsSync(path)) {
        return path;
      }
    }
    if (folder === dirname(folder)) {
      throw new Error("the package is not complete: it has no proto/sandbox.proto");
    }
  }
}

const definition: PackageDefinition = loadSync(findContract(), {
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});

const loaded = loadPackageDefinition(definition) as unknown as {
  sandbox: { v1: { SandboxService: ServiceClientConstructor } };
};

export const SandboxService = loaded.sandbox.v1.SandboxService;

const errorDetail = definition["sandbox.v1.ErrorDetail"] as MessageTypeDefinition<object, ErrorDetail>;

/** undefined for what cannot be read: such an answer says nothing. */
export function decodeErrorDetail(value: Buffer) {
  try {
    const { code, error, detail, hint, field, retry_after, run_id } = errorDetail.deserialize(value);
    return { code, error, detail, hint, field, retryAfter: retry_after, runId: run_id };
  } catch {
    return undefined;
  }
}

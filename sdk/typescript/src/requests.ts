/** Requests of the gateway, from what callers give. */
import { InvalidArgument } from "./errors.js";
import { encode } from "./model.js";
import type { Command, ExecOptions, Path, Wishes } from "./options.js";

/* eslint-disable-next-line @typescript-eslint/no-explicit-any -- the loader's messages have no types */
export type Message = any;

export const pathFields = (name: string, path: Path): Record<string, Path> =>
  typeof path === "string" ? { [name]: path } : { [`${name}_bytes`]: path };

/** A text has a length and letters, as a list has: `"x"` would be taken apart. */
export function checkList(field: string, values: readonly unknown[] | undefined): void {
  if (values !== undefined && !Array.isArray(values)) {
    const parts = { code: "invalid_argument", field, hint: `give a list: [${JSON.stringify(values)}]` };
    throw new InvalidArgument(`${field} is no list`, parts);
  }
}

export function wishes({ allowedHosts, ...options }: Wishes): Message {
  checkList("allowedHosts", allowedHosts);
  return {
    session_id: options.sessionId ?? "",
    allowed_hosts: allowedHosts ?? [],
    deny_all_hosts: allowedHosts?.length === 0, // this format cannot tell an empty list from none
    env: options.env ?? {},
    image: options.image ?? "",
    limits: {
      cpus: options.cpus ?? 0,
      memory: options.memory ?? 0,
      pids: options.pids ?? 0,
      disk: options.disk ?? 0,
      inodes: options.inodes ?? 0,
      open_files: options.openFiles ?? 0,
    },
    ttl: options.ttl ?? 0,
  };
}

export function execRequest(sessionId: string, command: Command, timeout: number, options: ExecOptions, background = false): Message {
  if (typeof command !== "string") {
    checkList("command", command);
  }
  if (!command.length && typeof command !== "string") {
    // On the wire no arguments are no list, and no code is an empty program, which would be run.
    const parts = { code: "invalid_argument", field: "command", hint: "the program is the first entry of the list" };
    throw new InvalidArgument("command is an empty list", parts);
  }
  return {
    session_id: sessionId,
    ...(typeof command === "string"
      ? { command, language: options.language ?? "bash" }
      : { argv: command.map((word) => encode("command", word)) }),
    timeout,
    env: options.env ?? {},
    ...pathFields("workdir", options.workdir ?? ""),
    stdin: encode("stdin", options.stdin ?? ""),
    background,
    user: options.user ?? "",
  };
}

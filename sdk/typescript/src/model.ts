/** What calls give back, as plain data. Output is text, and beside it the exact bytes. */
import { InvalidArgument } from "./errors.js";
import { hintAtHosts } from "./hints.js";

/** Where a command wrote it. */
export type StreamName = "stdout" | "stderr";

/** Something that the code asked of the network and did not get; the hint says what to ask for. */
export interface Refusal {
  host: string;
  address: string;
  port: number;
  reason: string;
  hint: string;
}

/** A run: how it ended, or how it stands, and its output. */
export interface RunResult {
  /** Decoded as UTF-8, with U+FFFD for what is none. */
  stdout: string;
  stderr: string;
  /** 124 after a timeout, 128+n for a signal; null while it runs or when its end is not known. */
  exitCode: number | null;
  sessionId: string;
  runId: string;
  /** running, completed, timed_out, killed, oom_killed or lost */
  status: string;
  durationMs: number;
  /** Some of the output is not here: the middle of more than 1 MiB. */
  truncated: boolean;
  /** How much there was, exactly. */
  stdoutBytes: number;
  stderrBytes: number;
  denied: Refusal[];
  /** Why it was ended, where that was not the command's own doing nor yours: its session was stopped. Else "". */
  reason: string;
  /** In a virtual machine without the processor's help: some ten times slower than usual. */
  emulated: boolean;
  rawStdout: Uint8Array;
  rawStderr: Uint8Array;
}

/** A file or directory in a sandbox. */
export interface FileInfo {
  path: string;
  /** The exact bytes, also where they are not UTF-8. */
  rawPath: Uint8Array;
  modified: number;
  type: string;
  size: number;
}

/** A session, as its owner sees it. */
export interface SessionInfo {
  sessionId: string;
  tenantId: string;
  /** creating, active, stopping, stopped, starting, destroying or destroyed */
  phase: string;
  runtimeClass: string;
  image: string;
  envKeys: string[];
  created: number;
  lastUsed: number;
  ttl: number;
  allowedHosts: string[];
  denied: Refusal[];
  /** Whose sub-agent's it is; "" if it is none. */
  parentSessionId: string;
  /** Its sub-agents' sessions. */
  children: string[];
  /** It can be stopped and started, and does not end by itself. */
  persistent: boolean;
  /** To be given again when it is started. */
  secretKeys: string[];
  labels: Record<string, string>;
  readOnly: boolean;
  powerless: boolean;
  /** A virtual machine without the processor's help: some ten times slower than usual. */
  emulated: boolean;
}

/** An image that sessions can be made of. */
export interface ImageInfo {
  image: string;
  digest: string;
  size: number;
  added: number;
  lastUsed: number;
}

/** The amount that was copied into a sandbox or out of one. */
export interface Transfer {
  bytes: number;
  files: number;
  /** Links and special files, which are not copied. */
  skipped: string[];
}

/** A command that runs in a session. */
export interface ProcessInfo {
  /** Inside the sandbox. */
  pid: number;
  /** Its first word. */
  command: string;
  /** The exact bytes of it, also where they are not UTF-8. */
  rawCommand: Uint8Array;
  /** Unix seconds. */
  started: number;
  /** How much it has written so far. */
  stdoutBytes: number;
  stderrBytes: number;
}

/** The end of a `pip install`, and all that it wrote. */
export interface PipResult {
  output: string;
  exitCode: number | null;
  denied: Refusal[];
}

/** A question to a person, and what became of it. Its texts have no characters that a terminal acts on. */
export interface Approval {
  approvalId: string;
  sessionId: string;
  tenantId: string;
  action: string;
  /** pending, approved, rejected, expired or withdrawn */
  status: string;
  /** The only one that means yes. */
  approved: boolean;
  askedBy: string;
  askedAt: number;
  expiresAt: number;
  answeredBy: string;
  /** 0: not answered. */
  answeredAt: number;
  reason: string;
}

/** Whether sandboxes work at the gateway, and who it says is calling. */
export interface StatusInfo {
  available: boolean;
  version: string;
  runtimeClass: string;
  sessions: number;
  tenantId: string;
  scope: string;
  name: string;
}

/** A piece of live output: the exact bytes, which can be written as they are, and `text`. */
export class Chunk extends Uint8Array {
  /** Where the command wrote it. */
  readonly stream: StreamName;
  /** Decoded as UTF-8. A character that is split between two pieces is in the text of the second. */
  readonly text: string;

  constructor(data: Uint8Array, stream: StreamName, text = decode(data)) {
    super(data);
    this.stream = stream;
    this.text = text;
  }

  static get [Symbol.species]() {
    return Uint8Array;
  }

  /** As a Buffer has it: `output += chunk` is text, and not a list of numbers. */
  override toString(): string {
    return this.text;
  }
}

/** Turns the output of one run into chunks. */
export class ChunkReader {
  readonly #decoders = { stdout: makeDecoder(), stderr: makeDecoder() };

  read(data: Uint8Array, stream: StreamName): Chunk {
    return new Chunk(data, stream, this.#decoders[stream].decode(data, { stream: true }));
  }

  /** The rest: an incomplete character at the very end. */
  rest(): Chunk[] {
    const last = (["stdout", "stderr"] as const).map((stream) => new Chunk(new Uint8Array(), stream, this.#decoders[stream].decode()));
    return last.filter((chunk) => chunk.text);
  }
}

// Not TextDecoder's default, which would swallow a byte order mark.
const makeDecoder = () => new TextDecoder("utf-8", { ignoreBOM: true });

/** Text as UTF-8, and bytes as they are. Anything else would be sent as nothing. */
export function encode(field: string, data: unknown): Uint8Array {
  if (typeof data === "string") {
    return Buffer.from(data, "utf8");
  }
  if (!ArrayBuffer.isView(data)) {
    const parts = { code: "invalid_argument", field, hint: "give a string, or bytes (Uint8Array)" };
    throw new InvalidArgument(`${field} is neither text nor bytes`, parts);
  }
  return Buffer.from(data.buffer, data.byteOffset, data.byteLength);
}

export function decode(data: Uint8Array): string {
  return makeDecoder().decode(data);
}

/* eslint-disable-next-line @typescript-eslint/no-explicit-any -- messages are checked where they are made */
type Message = any;

function readRefusals(refusals: Message[], sessionId: string): Refusal[] {
  return refusals.map(({ host, address, port, reason, hint, entry }) => {
    return { host, address, port, reason, hint: hintAtHosts(sessionId, entry, hint) };
  });
}

export function readRun(message: Message): RunResult {
  return {
    stdout: decode(message.stdout),
    stderr: decode(message.stderr),
    exitCode: message._exit_code === "exit_code" ? message.exit_code : null,
    sessionId: message.session_id,
    runId: message.run_id,
    status: message.status,
    durationMs: message.duration_ms,
    truncated: message.truncated,
    stdoutBytes: message.stdout_bytes,
    stderrBytes: message.stderr_bytes,
    denied: readRefusals(message.denied, message.session_id),
    reason: message.reason,
    emulated: message.emulated,
    rawStdout: message.stdout,
    rawStderr: message.stderr,
  };
}

export function readPip(message: Message): PipResult {
  return {
    output: decode(message.output),
    exitCode: message._exit_code === "exit_code" ? message.exit_code : null,
    denied: readRefusals(message.run?.denied ?? [], message.run?.session_id ?? ""),
  };
}

export function readFileInfo(message: Message): FileInfo {
  const rawPath: Uint8Array = message.path_bytes.length ? message.path_bytes : Buffer.from(message.path);
  return { path: message.path, rawPath, modified: message.modified, type: message.type, size: message.size };
}

export function readProcess(message: Message): ProcessInfo {
  return {
    pid: message.pid,
    command: message.command,
    rawCommand: message.command_bytes.length ? message.command_bytes : Buffer.from(message.command),
    started: message.started,
    stdoutBytes: message.stdout_bytes,
    stderrBytes: message.stderr_bytes,
  };
}

export function readSession(message: Message): SessionInfo {
  return {
    sessionId: message.session_id,
    tenantId: message.tenant_id,
    phase: message.phase,
    runtimeClass: message.runtime_class,
    image: message.image,
    envKeys: message.env_keys,
    created: message.created,
    lastUsed: message.last_used,
    ttl: message.ttl,
    allowedHosts: message.allowed_hosts,
    denied: readRefusals(message.denied, message.session_id),
    parentSessionId: message.parent_session_id,
    children: message.children,
    persistent: message.persistent,
    secretKeys: message.secret_keys,
    labels: message.labels,
    readOnly: message.read_only,
    powerless: message.powerless,
    emulated: message.emulated,
  };
}

export function readImage(message: Message): ImageInfo {
  return {
    image: message.image,
    digest: message.digest,
    size: message.size,
    added: message.added,
    lastUsed: message.last_used,
  };
}

export function readApproval(message: Message): Approval {
  return {
    approvalId: message.approval_id,
    sessionId: message.session_id,
    tenantId: message.tenant_id,
    action: message.action,
    status: message.status,
    approved: message.status === "approved",
    askedBy: message.asked_by,
    askedAt: message.asked_at,
    expiresAt: message.expires_at,
    answeredBy: message.answered_by,
    answeredAt: message.answered_at,
    reason: message.reason,
  };
}

export function readStatus(message: Message): StatusInfo {
  return {
    available: message.available,
    version: message.version,
    runtimeClass: message.runtime_class,
    sessions: message.sessions,
    tenantId: message.tenant_id,
    scope: message.scope,
    name: message.name,
  };
}

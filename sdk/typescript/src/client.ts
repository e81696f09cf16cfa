/** The client: every call of the gateway, and the session that `run` keeps for itself. */
import {
  Client,
  type ClientDuplexStream,
  type ClientReadableStream,
  type ClientUnaryCall,
  type ClientWritableStream,
  Metadata,
  type ServiceError,
} from "@grpc/grpc-js";

import { once } from "node:events";
import { stat } from "node:fs/promises";
import type { Writable } from "node:stream";
import { setTimeout as sleep } from "node:timers/promises";

import { failWith, follow, unlessAborted } from "./abort.js";
import { BackgroundRun, type Look } from "./background.js";
import { OPTIONS, type Target } from "./channel.js";
import { SandboxService } from "./contract.js";
import { LOCAL, type Wanted } from "./discovery.js";
import {
  Conflict,
  type Effect,
  InvalidArgument,
  NotFound,
  NotText,
  RunLost,
  SandboxError,
  findEffect,
} from "./errors.js";
import { findHint } from "./hints.js";
import { InteractiveRun } from "./interactive.js";
import { PIECE, TargetFolder, findPermissions, listFolder, readPieces, replaceFile } from "./local_files.js";
import {
  type Approval,
  type Chunk,
  ChunkReader,
  type FileInfo,
  type ImageInfo,
  type PipResult,
  type ProcessInfo,
  type RunResult,
  type SessionInfo,
  type StatusInfo,
  type Transfer,
  encode,
  readApproval,
  readFileInfo,
  readImage,
  readPip,
  readProcess,
  readRun,
  readSession,
  readStatus,
} from "./model.js";
import { Retry, isLost } from "./retry.js";
import { findTarget, isGone } from "./target.js";

const SMALL = 4 << 20; // a file up to here goes in one message
const MARGIN = 30; // seconds for the way there and back, on top of what the command may take
const CREATE_SECONDS = 180;
const FILE_SECONDS = 600;

/** What code is run by. */
export type Language = "bash" | "python" | "node" | "ts";
/** Code for the language; or a program and its arguments, without a shell. */
export type Command = string | readonly (string | Uint8Array)[];
/** A path that is not UTF-8 is given as bytes. */
export type Path = string | Uint8Array;

/** Which gateway, and who calls. What is left out is looked for (docs/gateway.md). */
export interface ClientOptions {
  /** HOST:PORT of a gateway, or `local`: the daemon of this machine. */
  endpoint?: string;
  /** Whom new sessions belong to. */
  tenantId?: string;
  /** No others than that tenant's sessions are meant, for who sees several tenants'. */
  onlyTenant?: boolean;
  /** Without an endpoint it is used at this machine's gateway. */
  apiKey?: string;
  /** The name that `k8e connect` gave to a gateway. */
  profile?: string;
}

/** For every call. */
export interface CallOptions {
  /** Aborting it gives the call up, with the signal's reason. A command that the call waits for is ended. */
  signal?: AbortSignal | undefined;
}

/** How a command is run. */
export interface ExecOptions extends CallOptions {
  language?: Language;
  env?: Record<string, string>;
  workdir?: Path;
  stdin?: string | Uint8Array;
  /** Another user of the sandbox than its default one, by name or number. */
  user?: string;
}

/** For calls about files. */
export interface FileOptions extends CallOptions {
  /** Seconds for the whole of it; 600 unless told otherwise. */
  timeout?: number;
}

/** For calls that read a file. */
export interface RangeOptions extends FileOptions {
  /** Where to begin. */
  offset?: number;
  /** How many bytes at most; left out: to the end. */
  length?: number;
}

interface Wishes extends CallOptions {
  allowedHosts?: readonly string[];
  sessionId?: string;
  env?: Record<string, string>;
  image?: string;
  cpus?: number;
  memory?: number;
  disk?: number;
  /** Processes and threads. */
  pids?: number;
  /** Files and directories. */
  inodes?: number;
  /** Open files of one process. */
  openFiles?: number;
  /** Unused for so many seconds it ends. */
  ttl?: number;
}

/** A new session. */
export interface SessionOptions extends Wishes {
  /** gvisor unless told otherwise; "" is the strongest that works. One that is not there is an error. */
  runtimeClass?: string;
  /** Left out: the default list. Empty: nothing may be reached. */
  allowedHosts?: readonly string[];
  /** On top of the default list; not together with allowedHosts. */
  moreHosts?: readonly string[];
  tenantId?: string;
  manifest?: string;
  gitRepo?: string;
  gitRef?: string;
  /** It lasts until it is destroyed, and can be stopped and started. */
  persistent?: boolean;
  /** Variables that no disk keeps: a persistent session needs them again when it is started. */
  secrets?: Record<string, string>;
  /** To find it again. */
  labels?: Record<string, string>;
  /** Nothing can be written in it but /tmp. */
  readOnly?: boolean;
  /** Not even its root has capabilities. */
  powerless?: boolean;
}

/** What a stopped session is given when it is started. */
export interface StartOptions extends CallOptions {
  /** Further variables, or other values. */
  env?: Record<string, string>;
  /** All of its secrets. */
  secrets?: Record<string, string>;
}

/** What is left out it has as its parent, but for variables; more than its parent it never has. */
export interface SubAgentOptions extends Wishes {
  /** A label. */
  agentType?: string;
  /** Where in /workspace its commands start; made when it is not there. */
  workspacePath?: string;
  runtimeClass?: string;
  /** It sees the workspace and cannot change it. */
  readOnly?: boolean;
  /** Not even its root has capabilities. */
  powerless?: boolean;
}

/* eslint-disable-next-line @typescript-eslint/no-explicit-any -- the loader's messages have no types */
type Message = any;
type Pieces = AsyncIterable<Uint8Array> | Iterable<Uint8Array>;
type Method = (...words: unknown[]) => unknown;

const pathFields = (name: string, path: Path): Record<string, Path> =>
  typeof path === "string" ? { [name]: path } : { [`${name}_bytes`]: path };

/** A text has a length and letters, as a list has: `"x"` would be taken apart. */
function checkList(field: string, values: readonly unknown[] | undefined): void {
  if (values !== undefined && !Array.isArray(values)) {
    const parts = { code: "invalid_argument", field, hint: `give a list: [${JSON.stringify(values)}]` };
    throw new InvalidArgument(`${field} is no list`, parts);
  }
}

function wishes({ allowedHosts, ...options }: Wishes): Message {
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

function execRequest(sessionId: string, command: Command, timeout: number, options: ExecOptions, background = false): Message {
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

/**
 * Runs code in sandboxes, through the gateway of a machine or cluster.
 *
 * Without arguments and configuration it finds the daemon of this machine, and starts it when it is not there, also when
 * it ended meanwhile. A credential that is given is used or refused. A request that changes anything, or runs a command,
 * is sent once; one that was never sent, or only asks, is sent again, for 15 seconds to a gateway that had answered this
 * client before.
 */
export class SandboxClient {
  #wanted: Wanted;
  readonly #tenant: string;
  readonly #metadata = new Metadata();
  #open: Promise<{ client: Client; target: Target }> | undefined;
  #lastTarget: Target | undefined; // of a channel that failed
  #known = false; // whether the gateway has answered this client
  #session: Promise<string> | undefined; // the one that `run` made for itself
  #phase: "open" | "closing" | "closed" = "open";

  constructor(options: ClientOptions | string = {}) {
    const chosen = typeof options === "string" ? { endpoint: options } : options;
    this.#wanted = { endpoint: chosen.endpoint, apiKey: chosen.apiKey, profile: chosen.profile };
    this.#tenant = chosen.tenantId ?? "";
    if (chosen.onlyTenant && this.#tenant) {
      this.#metadata.set("sandbox-tenant", this.#tenant);
    }
  }

  /** Destroys the session that `run` made, and lets go of the gateway. The client cannot be used afterwards. */
  async close(): Promise<void> {
    const session = this.#session;
    this.#session = undefined;
    this.#phase = this.#phase === "closed" ? "closed" : "closing";
    try {
      if (session) {
        await this.destroySession(await session);
      }
    } catch (error) {
      // Gone already; or it was never made, and its caller has had that error.
      if (!(error instanceof SandboxError)) {
        throw error;
      }
    } finally {
      this.#phase = "closed";
      const open = this.#open;
      this.#open = undefined;
      (await open?.catch(() => undefined))?.client.close();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /**
   * Runs code in this client's own session, which the first run makes and `close` destroys. A session that has expired is
   * replaced by a new one; the code is run once in any case.
   */
  async run(code: Command, language: Language = "bash", timeout = 30, options: Omit<ExecOptions, "language"> = {}): Promise<RunResult> {
    const session = this.#ownSession();
    try {
      return await this.exec(await unlessAborted(session, options.signal), code, timeout, { ...options, language });
    } catch (error) {
      // These two mean that nothing was run.
      const gone = error instanceof NotFound || error instanceof Conflict;
      if (!gone || !["session_not_found", "session_destroying"].includes(error.code)) {
        throw error;
      }
    }
    if (this.#session === session) {
      this.#session = undefined;
    }
    return this.exec(await unlessAborted(this.#ownSession(), options.signal), code, timeout, { ...options, language });
  }

  /** Runs code, or with a list a program with exactly these arguments, to its end. */
  async exec(sessionId: string, command: Command, timeout = 30, options: ExecOptions = {}): Promise<RunResult> {
    return readRun(await this.#call("Exec", execRequest(sessionId, command, timeout, options), options, timeout + MARGIN));
  }

  /** Runs code; its output comes as it is written, both streams. Leaving the loop early ends the command. */
  execStream(sessionId: string, command: Command, timeout = 300, options: ExecOptions = {}): ExecStream {
    const request = execRequest(sessionId, command, timeout, options);
    return new ExecStream(() => this.#stream("ExecStream", request, options, timeout + MARGIN));
  }

  /**
   * Runs code whose input stays open: `write` pieces, `closeStdin`, and iterate over the output as it comes; `close` ends the
   * command. Returns when the command has started.
   */
  async execInteractive(sessionId: string, command: Command, timeout = 300, options: Omit<ExecOptions, "stdin"> = {}): Promise<InteractiveRun> {
    const request = execRequest(sessionId, command, timeout, options);
    const { signal } = options;
    const client = await this.#connectAwake(signal, MARGIN);
    const limits = { deadline: deadline(timeout + MARGIN) };
    const call = method(client, "ExecInteractive").call(client, this.#metadata, limits) as ClientDuplexStream<Message, Message>;
    const leave = follow(signal, call);
    call.once("close", leave);
    return InteractiveRun.begin(call, request, (error, runId) =>
      failWith(error as ServiceError, signal, findEffect("ExecInteractive"), runId),
    );
  }

  /**
   * Starts a run in the background, which goes on when this client is gone. Its handle has the output as it comes, `wait`,
   * `poll` and `kill`; the signal holds for the handle, too.
   */
  async start(sessionId: string, command: Command, timeout = 3600, options: Omit<ExecOptions, "stdin"> = {}): Promise<BackgroundRun> {
    const request = execRequest(sessionId, command, timeout, options, true);
    return this.#handle(readRun(await this.#call("Exec", request, options)), options);
  }

  /** The handle of a run in the background that any client has started. */
  async attach(runId: string, options: CallOptions = {}): Promise<BackgroundRun> {
    return this.#handle(await this.poll(runId, options), options);
  }

  /** How a run stands, with what it has written so far. */
  async poll(runId: string, options: CallOptions = {}): Promise<RunResult> {
    return this.#look(runId, {}, options);
  }

  async #look(runId: string, look: Look, options: CallOptions): Promise<RunResult> {
    return readRun((await this.#call("PollRun", { run_id: runId, ...look }, options, (look.wait ?? 0) + MARGIN)).run);
  }

  #handle(first: RunResult, options: CallOptions): BackgroundRun {
    const look = (wanted: Look) => this.#look(first.runId, wanted, options);
    return new BackgroundRun(first, { look, kill: () => this.kill(first.runId, options) });
  }

  /** Ends a run with everything it started. False: it had ended before, and nothing was done. */
  async kill(runId: string, options: CallOptions = {}): Promise<boolean> {
    return !(await this.#call("KillRun", { run_id: runId }, options)).had_ended;
  }

  /** Lists the commands that run in a session. */
  async ps(sessionId: string, options: CallOptions = {}): Promise<ProcessInfo[]> {
    return (await this.#call("Ps", { session_id: sessionId }, options)).processes.map(readProcess);
  }

  /** Lists the runs of a session, oldest first, without their output. */
  async log(sessionId: string, options: CallOptions = {}): Promise<RunResult[]> {
    return (await this.#call("Log", { session_id: sessionId }, options)).runs.map(readRun);
  }

  /** Installs Python packages in a session, from the package indexes that the gateway's machine uses. */
  async pipInstall(sessionId: string, packages: readonly string[], timeout = 300, options: CallOptions = {}): Promise<PipResult> {
    checkList("packages", packages);
    const request = { session_id: sessionId, packages, timeout };
    return readPip(await this.#call("PipInstall", request, options, timeout + MARGIN));
  }

  /** Makes a session and returns its id. */
  async createSession(options: SessionOptions = {}): Promise<string> {
    checkList("moreHosts", options.moreHosts);
    const request = {
      ...wishes(options),
      more_hosts: options.moreHosts ?? [],
      tenant_id: options.tenantId ?? this.#tenant,
      runtime_class: options.runtimeClass ?? "gvisor",
      manifest: options.manifest ?? "",
      git_repo: options.gitRepo ?? "",
      git_ref: options.gitRef ?? "",
      persistent: options.persistent ?? false,
      secrets: options.secrets ?? {},
      labels: options.labels ?? {},
      read_only: options.readOnly ?? false,
      powerless: options.powerless ?? false,
    };
    return (await this.#call("CreateSession", request, options, CREATE_SECONDS)).session_id;
  }

  /** Makes a session for a sub-agent, which shares its parent's workspace and ends with it, and returns its id. */
  async runSubAgent(parentSessionId: string, options: SubAgentOptions = {}): Promise<string> {
    const request = {
      ...wishes(options),
      parent_session_id: parentSessionId,
      agent_type: options.agentType ?? "",
      workspace_path: options.workspacePath ?? "",
      runtime_class: options.runtimeClass ?? "",
      read_only: options.readOnly ?? false,
      powerless: options.powerless ?? false,
    };
    return (await this.#call("RunSubAgent", request, options, CREATE_SECONDS)).session_id;
  }

  /** Returns a session, with what its sandbox was refused lately. */
  async getSession(sessionId: string, options: CallOptions = {}): Promise<SessionInfo> {
    return readSession((await this.#call("GetSession", { session_id: sessionId }, options)).session);
  }

  /** Lists the caller's sessions; with `allPhases` also those that have ended. */
  async listSessions(options: CallOptions & { allPhases?: boolean } = {}): Promise<SessionInfo[]> {
    const response = await this.#call("ListSessions", { phase: options.allPhases ? "all" : "active" }, options);
    return response.sessions.map(readSession);
  }

  /** Ends a session, with everything that runs in it and all its files. */
  async destroySession(sessionId: string, options: CallOptions = {}): Promise<void> {
    await this.#call("DestroySession", { session_id: sessionId }, options, CREATE_SECONDS);
  }

  /** Ends what runs in a persistent session; its files and configuration stay. Fine for one that is stopped. */
  async stopSession(sessionId: string, options: CallOptions = {}): Promise<SessionInfo> {
    return readSession((await this.#call("StopSession", { session_id: sessionId }, options, CREATE_SECONDS)).session);
  }

  /** Brings a stopped session back, with its files. Its secrets have to be given again. */
  async startSession(sessionId: string, options: StartOptions = {}): Promise<SessionInfo> {
    const request = { session_id: sessionId, env: options.env ?? {}, secrets: options.secrets ?? {} };
    return readSession((await this.#call("StartSession", request, options, CREATE_SECONDS)).session);
  }

  /** What sessions can be made of, besides the machine's own tools. */
  async listImages(options: CallOptions = {}): Promise<ImageInfo[]> {
    return (await this.#call("ListImages", {}, options)).images.map(readImage);
  }

  /** A new list, or changes to the one in force; returns the list that holds from now on. */
  async updateAllowedHosts(
    sessionId: string,
    change: { allowedHosts?: readonly string[]; add?: readonly string[]; remove?: readonly string[] },
    options: CallOptions = {},
  ): Promise<string[]> {
    for (const field of ["allowedHosts", "add", "remove"] as const) {
      checkList(field, change[field]);
    }
    const request = {
      session_id: sessionId,
      allowed_hosts: change.allowedHosts ?? [],
      clear: change.allowedHosts?.length === 0,
      add: change.add ?? [],
      remove: change.remove ?? [],
    };
    return (await this.#call("UpdateAllowedHosts", request, options)).allowed_hosts;
  }

  /**
   * Asks a person whether something may be done, and waits that long for the answer (0: not at all). Go on only when
   * `approved` is true. `expiresIn`: for how long it can be answered, where that is longer than the wait.
   */
  async confirmAction(sessionId: string, action: string, timeout = 30, options: CallOptions & { expiresIn?: number } = {}): Promise<Approval> {
    const request = { session_id: sessionId, action, timeout, expires_in: options.expiresIn ?? 0 };
    return readApproval((await this.#call("ConfirmAction", request, options, timeout + MARGIN)).approval);
  }

  /** The answer to an earlier question, or how it stands after that long. */
  async awaitApproval(approvalId: string, timeout = 30, options: CallOptions = {}): Promise<Approval> {
    const request = { approval_id: approvalId, timeout };
    return readApproval((await this.#call("ConfirmAction", request, options, timeout + MARGIN, "asks")).approval);
  }

  /** Answers another caller's approval, once. With an API key this needs the scope operator. */
  async approveAction(approvalId: string, approved = true, options: CallOptions & { reason?: string } = {}): Promise<Approval> {
    const request = { approval_id: approvalId, approved, reason: options.reason ?? "" };
    return readApproval((await this.#call("ApproveAction", request, options)).approval);
  }

  /** Those that can be answered, or all on record. */
  async listApprovals(options: CallOptions & { allStates?: boolean } = {}): Promise<Approval[]> {
    const response = await this.#call("ListApprovals", { status: options.allStates ? "all" : "pending" }, options);
    return response.approvals.map(readApproval);
  }

  /** Says whether sandboxes work at the gateway, and who is calling. */
  async status(options: CallOptions = {}): Promise<StatusInfo> {
    return readStatus(await this.#call("Status", {}, options));
  }

  /** Writes ("w") or appends ("a") text or bytes of any size, and says how many bytes. Directories are made. */
  async writeFile(
    sessionId: string,
    path: Path,
    content: string | Uint8Array,
    mode: "w" | "a" = "w",
    options: FileOptions = {},
  ): Promise<number> {
    const data = encode("content", content);
    const where = { session_id: sessionId, ...pathFields("path", path), mode };
    if (data.length <= SMALL) {
      return (await this.#call("WriteFile", { ...where, content: data }, options, options.timeout ?? FILE_SECONDS)).bytes;
    }
    return this.#upload(where, [data], options);
  }

  /** Reads a file of any size, or `length` bytes of it from `offset` on; fewer where it ends before. */
  async readBytes(sessionId: string, path: Path, options: RangeOptions = {}): Promise<Uint8Array> {
    const pieces: Uint8Array[] = [];
    for await (const piece of this.#download(sessionId, path, options)) {
      pieces.push(piece);
    }
    return Buffer.concat(pieces);
  }

  /** Reads a file that is text in UTF-8. */
  async readFile(sessionId: string, path: Path, options: FileOptions = {}): Promise<string> {
    const content = await this.readBytes(sessionId, path, options);
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(content);
    } catch (cause) {
      throw new NotText(`${String(path)} is not UTF-8`, { code: "not_text", hint: "use readBytes" }, { cause });
    }
  }

  /** Lists everything below a directory (the workspace) that was modified since then. */
  async listFiles(sessionId: string, since = 0, options: FileOptions & { path?: Path } = {}): Promise<FileInfo[]> {
    if (typeof since !== "number") {
      const hint = `listFiles(sessionId, 0, { path: ${JSON.stringify(since)} })`;
      throw new InvalidArgument("since is no time in seconds", { code: "invalid_argument", field: "since", hint });
    }
    const request = { session_id: sessionId, since, ...pathFields("path", options.path ?? "") };
    return (await this.#call("ListFiles", request, options, options.timeout ?? FILE_SECONDS)).files.map(readFileInfo);
  }

  /**
   * Copies a file or folder of this machine, or what a stream has, to `path` in the sandbox. No more than some MiB are in
   * memory. Links and special files of a folder are not copied: `skipped` names them.
   */
  async upload(sessionId: string, source: string | AsyncIterable<Uint8Array>, path: Path, options: FileOptions = {}): Promise<Transfer> {
    if (typeof source !== "string") {
      const header = { session_id: sessionId, ...pathFields("path", path), mode: "w" };
      return { bytes: await this.#upload(header, source, options), files: 1, skipped: [] };
    }
    const rest = countDown(options.timeout);
    const send = async (from: string, to: Path) => {
      const permissions = await findPermissions(from);
      const header = { session_id: sessionId, ...pathFields("path", to), mode: "w", permissions };
      return this.#upload(header, readPieces(from), { ...options, timeout: rest() });
    };
    if (!(await stat(source)).isDirectory()) {
      return { bytes: await send(source, path), files: 1, skipped: [] };
    }
    const { files, bare, skipped } = await listFolder(source);
    const top = Buffer.concat([encode("path", path), Buffer.from("/")]);
    let size = 0;
    for (const file of files) {
      size += await send(file.path, Buffer.concat([top, file.name]));
    }
    for (const name of files.length || bare.length ? bare : [Buffer.alloc(0)]) {
      const request = { session_id: sessionId, path_bytes: Buffer.concat([top, name]) };
      await this.#call("MakeDirectory", request, options, rest());
    }
    return { bytes: size, files: files.length, skipped };
  }

  /**
   * Copies a file of the sandbox, or a part of it, to a path of this machine or into a stream; or a folder with everything
   * below it to a path. No more than some MiB are in memory. A file has its name when it is complete. Links and special
   * files of a folder are not copied: `skipped` names them, and folders that cannot be read.
   */
  async download(sessionId: string, path: Path, target: string | Writable, options: RangeOptions = {}): Promise<Transfer> {
    if (typeof target !== "string") {
      return { bytes: await pour(this.#download(sessionId, path, options), target), files: 1, skipped: [] };
    }
    const rest = countDown(options.timeout);
    const part = options.offset || options.length !== undefined;
    const request = { session_id: sessionId, ...pathFields("path", path) };
    const { top, entries } = await this.#call("GetTree", request, options, rest());
    if (top.type !== "directory" || part) {
      const pieces = this.#download(sessionId, path, { ...options, timeout: rest() });
      return { bytes: await replaceFile(target, pieces, isProgram(top)), files: 1, skipped: [] };
    }
    const folder = await TargetFolder.open(target);
    const prefix = Buffer.concat([encode("path", path), Buffer.from("/")]);
    const copied: Transfer = { bytes: 0, files: 0, skipped: [] };
    for (const entry of entries) {
      const { rawPath: name } = readFileInfo(entry);
      if (entry.type === "directory") {
        await folder.make(name);
      }
      if (entry.unreadable || !["directory", "file"].includes(entry.type)) {
        copied.skipped.push(entry.path);
      } else if (entry.type === "file") {
        const pieces = this.#download(sessionId, Buffer.concat([prefix, name]), { ...options, timeout: rest() });
        copied.bytes += await folder.replace(name, pieces, isProgram(entry));
        copied.files += 1;
      }
    }
    return copied;
  }

  // The way there

  #ownSession(): Promise<string> {
    if (this.#phase !== "open") {
      return Promise.reject(describeClosed());
    }
    if (!this.#session) {
      const creating = this.createSession({ runtimeClass: "" });
      this.#session = creating;
      creating.catch(() => {
        if (this.#session === creating) {
          this.#session = undefined; // the next run may have more luck
        }
      });
    }
    return this.#session;
  }

  async #connect(): Promise<Client> {
    if (this.#phase === "closed") {
      throw describeClosed();
    }
    const known = this.#open;
    if (known) {
      const { client, target } = await known;
      if (Date.now() / 1000 < target.renewAt && !isGone(target)) {
        return client;
      }
    }
    if (this.#open === known) {
      const last = this.#lastTarget;
      this.#lastTarget = undefined;
      // The same gateway, by a new connection; or it is looked for.
      const found = last && Date.now() / 1000 < last.renewAt ? Promise.resolve(last) : findTarget(this.#wanted);
      // Calls that are under way on an older one go on; it is gone with the last of them.
      const opening = found.then((target) => {
        if (target.local) {
          // Its sessions are there, whatever is configured later.
          this.#wanted = { endpoint: LOCAL, apiKey: undefined, profile: undefined };
        }
        const client = new SandboxService(target.address, target.credentials(), { ...OPTIONS, ...target.options });
        return { client, target };
      });
      this.#open = opening;
      opening.catch(() => {
        if (this.#open === opening) {
          this.#open = undefined;
        }
      });
    }
    return (await this.#open!).client;
  }

  /**
   * Whether a call is sent once more, on a new channel: to the daemon of this machine, which is then started, or to another
   * gateway behind the same address.
   */
  async #forget(client: Client, failure: unknown, retry: Retry, signal: AbortSignal | undefined): Promise<boolean> {
    const local = this.#wanted.endpoint === LOCAL;
    const pause = isLost(failure) ? retry.choosePause(local, this.#known) : undefined;
    if (pause === undefined) {
      return false;
    }
    await unlessAborted(sleep(pause * 1000), signal);
    const opened = this.#open;
    const found = await opened?.catch(() => undefined);
    if (found?.client === client && this.#open === opened) {
      this.#open = undefined; // its backoff would hold the next attempt
      this.#lastTarget = local ? undefined : found.target;
    }
    return true;
  }

  async #call(
    name: string,
    request: Message,
    options: CallOptions,
    seconds = MARGIN,
    effect = findEffect(name),
  ): Promise<Message> {
    const retry = new Retry();
    for (;;) {
      const client = await unlessAborted(this.#connect(), options.signal);
      try {
        const answer = await this.#send(client, name, request, options, seconds, effect);
        this.#known = true;
        return answer;
      } catch (failure) {
        if (!(await this.#forget(client, failure, retry, options.signal))) {
          throw failure;
        }
      }
    }
  }

  async #send(
    client: Client,
    name: string,
    request: Message,
    { signal }: CallOptions,
    seconds: number,
    effect: Effect,
  ): Promise<Message> {
    return new Promise((resolve, reject) => {
      const done = (error: ServiceError | null, response: Message) => {
        leave();
        return error ? reject(failWith(error, signal, effect)) : resolve(response);
      };
      const limits = { deadline: deadline(seconds) };
      const leave = follow(signal, method(client, name).call(client, request, this.#metadata, limits, done) as ClientUnaryCall);
    });
  }

  /** For pieces that are sent once only: a daemon of this machine that is gone is started before the first. */
  async #connectAwake(signal: AbortSignal | undefined, timeout: number): Promise<Client> {
    const client = await unlessAborted(this.#connect(), signal);
    if (this.#wanted.endpoint !== LOCAL) {
      return client;
    }
    await this.#call("ListApprovals", { status: "pending" }, { signal }, timeout);
    return unlessAborted(this.#connect(), signal);
  }

  async #upload(header: Message, content: Pieces, options: FileOptions): Promise<number> {
    const { signal, timeout = FILE_SECONDS } = options;
    const client = await this.#connectAwake(signal, timeout);
    let call: ClientWritableStream<Message>;
    const answer = new Promise<Message>((resolve, reject) => {
      const done = (error: ServiceError | null, response: Message) =>
        error ? reject(failWith(error, signal, findEffect("UploadFile"))) : resolve(response);
      call = method(client, "UploadFile").call(client, this.#metadata, { deadline: deadline(timeout) }, done) as ClientWritableStream<Message>;
    });
    const leave = follow(signal, call!);
    let answered = false;
    const settled = answer.then(
      () => (answered = true),
      () => (answered = true),
    );
    try {
      call!.write({ header });
      for await (const piece of content) {
        for (let start = 0; start < piece.length && !answered; start += PIECE) {
          if (!call!.write({ content: piece.subarray(start, start + PIECE) })) {
            await Promise.race([once(call!, "drain"), settled]);
          }
        }
        if (answered) {
          break;
        }
      }
      call!.end();
      return (await answer).bytes;
    } finally {
      leave();
      call!.cancel(); // where the content could not be read to its end; after the answer it has no effect
    }
  }

  async *#download(sessionId: string, path: Path, options: RangeOptions): AsyncGenerator<Uint8Array> {
    const { offset = 0, length, timeout = FILE_SECONDS } = options;
    // On the wire no length is the whole file: of nothing at all, one byte is asked for and dropped.
    const request = { session_id: sessionId, ...pathFields("path", path), offset, length: length === 0 ? 1 : (length ?? 0) };
    for await (const piece of this.#stream("DownloadFile", request, options, timeout)) {
      if (length !== 0) {
        yield piece.content;
      }
    }
  }

  async *#stream(name: string, request: Message, { signal }: CallOptions, seconds: number): AsyncGenerator<Message> {
    let [begun, runId] = [false, ""];
    const retry = new Retry();
    for (;;) {
      const client = await unlessAborted(this.#connect(), signal);
      const limits = { deadline: deadline(seconds) };
      const call = method(client, name).call(client, request, this.#metadata, limits) as ClientReadableStream<Message>;
      const leave = follow(signal, call);
      try {
        for await (const message of call) {
          begun = this.#known = true;
          runId = message.started?.run_id ?? runId;
          yield message;
        }
        return;
      } catch (error) {
        const failure = failWith(error as ServiceError, signal, findEffect(name), runId);
        if (begun || !(await this.#forget(client, failure, retry, signal))) {
          throw failure;
        }
      } finally {
        leave();
        call.cancel(); // for a caller that leaves early; after the end it has no effect
      }
    }
  }
}

const isProgram = (info: Message): boolean => (info.permissions & 0o100) !== 0;

/** Says how many of the seconds are left. */
function countDown(timeout = FILE_SECONDS): () => number {
  const due = Date.now() / 1000 + timeout;
  return () => Math.max(0, due - Date.now() / 1000);
}

/** Writes pieces into a stream, as fast as it takes them, and leaves it open. */
async function pour(pieces: AsyncIterable<Uint8Array>, target: Writable): Promise<number> {
  let size = 0;
  for await (const piece of pieces) {
    await new Promise<void>((resolve, reject) => target.write(piece, (error) => (error ? reject(error) : resolve())));
    size += piece.length;
  }
  return size;
}

const describeClosed = () => new Conflict("the client is closed", { code: "client_closed", hint: "make another SandboxClient" });

/** grpc-js turns NaN and infinity into an exception that cannot be caught: the process would end. */
function deadline(seconds: number): Date {
  if (!(seconds >= 0 && seconds < 1e8)) {
    const hint = "seconds, more than 0 and at most 86400";
    throw new InvalidArgument("timeout is no number of seconds", { code: "invalid_argument", field: "timeout", hint });
  }
  return new Date(Date.now() + seconds * 1000);
}

const method = (client: Client, name: string): Method => (client as unknown as Record<string, Method>)[name]!;

/** The output of a run, piece by piece; after the last one `result` says how it ended. */
export class ExecStream implements AsyncIterable<Chunk> {
  readonly #start: () => AsyncGenerator<Message>;
  #started = false;
  #result: RunResult | undefined;

  constructor(start: () => AsyncGenerator<Message>) {
    this.#start = start;
  }

  /** Known as soon as the command has started. */
  runId = "";

  /** Without output, which has come already. */
  get result(): RunResult {
    if (!this.#result) {
      throw new Error("the run has not ended: read its output to the end first");
    }
    return this.#result;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Chunk> {
    if (this.#started) {
      throw new Error("a command is run once: its output cannot be read again");
    }
    this.#started = true;
    const reader = new ChunkReader();
    for await (const frame of this.#start()) {
      if (frame.started) {
        this.runId = frame.started.run_id;
      } else if (frame.output) {
        yield reader.read(frame.output.data, frame.output.stream === "STREAM_STDERR" ? "stderr" : "stdout");
      } else if (frame.result) {
        this.#result = readRun(frame.result);
      }
    }
    yield* reader.rest();
    if (!this.#result) {
      const parts = { code: "run_lost", hint: findHint("run_lost"), runId: this.runId };
      throw new RunLost("the stream ended before the run did", parts);
    }
  }
}

/** One command in a sandbox of its own, which is gone afterwards. */
export async function sandboxRun(code: Command, language: Language = "bash", timeout = 30): Promise<RunResult> {
  const client = new SandboxClient();
  try {
    return await client.run(code, language, timeout);
  } finally {
    await client.close();
  }
}

/** The client: every call of the gateway, and the session that `run` keeps for itself. */
import { stat } from "node:fs/promises";
import type { Writable } from "node:stream";

import { unlessAborted } from "./abort.js";
import { BackgroundRun, type Look } from "./background.js";
import { Connection, FILE_SECONDS, MARGIN, describeClosed } from "./connection.js";
import { Conflict, InvalidArgument, NotFound, NotText, SandboxError } from "./errors.js";
import { ExecStream } from "./exec_stream.js";
import type { InteractiveRun } from "./interactive.js";
import { TargetFolder, findPermissions, listFolder, readPieces, replaceFile } from "./local_files.js";
import {
  type Approval,
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
import type {
  CallOptions,
  ClientOptions,
  Command,
  ExecOptions,
  FileOptions,
  Language,
  Path,
  RangeOptions,
  SessionOptions,
  StartOptions,
  SubAgentOptions,
} from "./options.js";
import { type Message, checkList, execRequest, pathFields, wishes } from "./requests.js";

const SMALL = 4 << 20; // a file up to here goes in one message
const CREATE_SECONDS = 180;

/**
 * Runs code in sandboxes, through the gateway of a machine or cluster.
 *
 * Without arguments and configuration it finds the daemon of this machine, and starts it when it is not there, also when
 * it ended meanwhile. A credential that is given is used or refused. A request that changes anything, or runs a command,
 * is sent once; one that was never sent, or only asks, is sent again, for 15 seconds to a gateway that had answered this
 * client before.
 */
export class SandboxClient {
  readonly #connection: Connection;
  readonly #tenant: string;
  #session: Promise<string> | undefined; // the one that `run` made for itself
  #closing = false;

  constructor(options: ClientOptions | string = {}) {
    const { endpoint, apiKey, profile, tenantId = "", onlyTenant }: ClientOptions =
      typeof options === "string" ? { endpoint: options } : options;
    this.#tenant = tenantId;
    this.#connection = new Connection({ endpoint, apiKey, profile }, onlyTenant ? tenantId : "");
  }

  /** Destroys the session that `run` made, and lets go of the gateway. The client cannot be used afterwards. */
  async close(): Promise<void> {
    const session = this.#session;
    this.#session = undefined;
    this.#closing = true;
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
      await this.#connection.close();
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
    return readRun(await this.#connection.call("Exec", execRequest(sessionId, command, timeout, options), options, timeout + MARGIN));
  }

  /** Runs code; its output comes as it is written, both streams. Leaving the loop early ends the command. */
  execStream(sessionId: string, command: Command, timeout = 300, options: ExecOptions = {}): ExecStream {
    const request = execRequest(sessionId, command, timeout, options);
    return new ExecStream(() => this.#connection.stream("ExecStream", request, options, timeout + MARGIN));
  }

  /**
   * Runs code whose input stays open: `write` pieces, `closeStdin`, and iterate over the output as it comes; `close` ends the
   * command. Returns when the command has started.
   */
  async execInteractive(sessionId: string, command: Command, timeout = 300, options: Omit<ExecOptions, "stdin"> = {}): Promise<InteractiveRun> {
    const request = execRequest(sessionId, command, timeout, options);
    return this.#connection.interact(request, timeout + MARGIN, options);
  }

  /**
   * Starts a run in the background, which goes on when this client is gone. Its handle has the output as it comes, `wait`,
   * `poll` and `kill`; the signal holds for the handle, too.
   */
  async start(sessionId: string, command: Command, timeout = 3600, options: Omit<ExecOptions, "stdin"> = {}): Promise<BackgroundRun> {
    const request = execRequest(sessionId, command, timeout, options, true);
    return this.#handle(readRun(await this.#connection.call("Exec", request, options)), options);
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
    return readRun((await this.#connection.call("PollRun", { run_id: runId, ...look }, options, (look.wait ?? 0) + MARGIN)).run);
  }

  #handle(first: RunResult, options: CallOptions): BackgroundRun {
    const look = (wanted: Look) => this.#look(first.runId, wanted, options);
    return new BackgroundRun(first, { look, kill: () => this.kill(first.runId, options) });
  }

  /** Ends a run with everything it started. False: it had ended before, and nothing was done. */
  async kill(runId: string, options: CallOptions = {}): Promise<boolean> {
    return !(await this.#connection.call("KillRun", { run_id: runId }, options)).had_ended;
  }

  /** Lists the commands that run in a session. */
  async ps(sessionId: string, options: CallOptions = {}): Promise<ProcessInfo[]> {
    return (await this.#connection.call("Ps", { session_id: sessionId }, options)).processes.map(readProcess);
  }

  /** Lists the runs of a session, oldest first, without their output. */
  async log(sessionId: string, options: CallOptions = {}): Promise<RunResult[]> {
    return (await this.#connection.call("Log", { session_id: sessionId }, options)).runs.map(readRun);
  }

  /** Installs Python packages in a session, from the package indexes that the gateway's machine uses. */
  async pipInstall(sessionId: string, packages: readonly string[], timeout = 300, options: CallOptions = {}): Promise<PipResult> {
    checkList("packages", packages);
    const request = { session_id: sessionId, packages, timeout };
    return readPip(await this.#connection.call("PipInstall", request, options, timeout + MARGIN));
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
    return (await this.#connection.call("CreateSession", request, options, CREATE_SECONDS)).session_id;
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
    return (await this.#connection.call("RunSubAgent", request, options, CREATE_SECONDS)).session_id;
  }

  /** Returns a session, with what its sandbox was refused lately. */
  async getSession(sessionId: string, options: CallOptions = {}): Promise<SessionInfo> {
    return readSession((await this.#connection.call("GetSession", { session_id: sessionId }, options)).session);
  }

  /** Lists the caller's sessions; with `allPhases` also those that have ended. */
  async listSessions(options: CallOptions & { allPhases?: boolean } = {}): Promise<SessionInfo[]> {
    const response = await this.#connection.call("ListSessions", { phase: options.allPhases ? "all" : "active" }, options);
    return response.sessions.map(readSession);
  }

  /** Ends a session, with everything that runs in it and all its files. */
  async destroySession(sessionId: string, options: CallOptions = {}): Promise<void> {
    await this.#connection.call("DestroySession", { session_id: sessionId }, options, CREATE_SECONDS);
  }

  /** Ends what runs in a persistent session; its files and configuration stay. Fine for one that is stopped. */
  async stopSession(sessionId: string, options: CallOptions = {}): Promise<SessionInfo> {
    return readSession((await this.#connection.call("StopSession", { session_id: sessionId }, options, CREATE_SECONDS)).session);
  }

  /** Brings a stopped session back, with its files. Its secrets have to be given again. */
  async startSession(sessionId: string, options: StartOptions = {}): Promise<SessionInfo> {
    const request = { session_id: sessionId, env: options.env ?? {}, secrets: options.secrets ?? {} };
    return readSession((await this.#connection.call("StartSession", request, options, CREATE_SECONDS)).session);
  }

  /** What sessions can be made of, besides the machine's own tools. */
  async listImages(options: CallOptions = {}): Promise<ImageInfo[]> {
    return (await this.#connection.call("ListImages", {}, options)).images.map(readImage);
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
    return (await this.#connection.call("UpdateAllowedHosts", request, options)).allowed_hosts;
  }

  /**
   * Asks a person whether something may be done, and waits that long for the answer (0: not at all). Go on only when
   * `approved` is true. `expiresIn`: for how long it can be answered, where that is longer than the wait.
   */
  async confirmAction(sessionId: string, action: string, timeout = 30, options: CallOptions & { expiresIn?: number } = {}): Promise<Approval> {
    const request = { session_id: sessionId, action, timeout, expires_in: options.expiresIn ?? 0 };
    return readApproval((await this.#connection.call("ConfirmAction", request, options, timeout + MARGIN)).approval);
  }

  /** The answer to an earlier question, or how it stands after that long. */
  async awaitApproval(approvalId: string, timeout = 30, options: CallOptions = {}): Promise<Approval> {
    const request = { approval_id: approvalId, timeout };
    return readApproval((await this.#connection.call("ConfirmAction", request, options, timeout + MARGIN, "asks")).approval);
  }

  /** Answers another caller's approval, once. With an API key this needs the scope operator. */
  async approveAction(approvalId: string, approved = true, options: CallOptions & { reason?: string } = {}): Promise<Approval> {
    const request = { approval_id: approvalId, approved, reason: options.reason ?? "" };
    return readApproval((await this.#connection.call("ApproveAction", request, options)).approval);
  }

  /** Those that can be answered, or all on record. */
  async listApprovals(options: CallOptions & { allStates?: boolean } = {}): Promise<Approval[]> {
    const response = await this.#connection.call("ListApprovals", { status: options.allStates ? "all" : "pending" }, options);
    return response.approvals.map(readApproval);
  }

  /** Says whether sandboxes work at the gateway, and who is calling. */
  async status(options: CallOptions = {}): Promise<StatusInfo> {
    return readStatus(await this.#connection.call("Status", {}, options));
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
      return (await this.#connection.call("WriteFile", { ...where, content: data }, options, options.timeout ?? FILE_SECONDS)).bytes;
    }
    return this.#connection.upload(where, [data], options);
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
    return (await this.#connection.call("ListFiles", request, options, options.timeout ?? FILE_SECONDS)).files.map(readFileInfo);
  }

  /**
   * Copies a file or folder of this machine, or what a stream has, to `path` in the sandbox. No more than some MiB are in
   * memory. Links and special files of a folder are not copied: `skipped` names them.
   */
  async upload(sessionId: string, source: string | AsyncIterable<Uint8Array>, path: Path, options: FileOptions = {}): Promise<Transfer> {
    if (typeof source !== "string") {
      const header = { session_id: sessionId, ...pathFields("path", path), mode: "w" };
      return { bytes: await this.#connection.upload(header, source, options), files: 1, skipped: [] };
    }
    const rest = countDown(options.timeout);
    const send = async (from: string, to: Path) => {
      const permissions = await findPermissions(from);
      const header = { session_id: sessionId, ...pathFields("path", to), mode: "w", permissions };
      return this.#connection.upload(header, readPieces(from), { ...options, timeout: rest() });
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
      await this.#connection.call("MakeDirectory", request, options, rest());
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
    const { top, entries } = await this.#connection.call("GetTree", request, options, rest());
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

  #ownSession(): Promise<string> {
    if (this.#closing) {
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

  async *#download(sessionId: string, path: Path, options: RangeOptions): AsyncGenerator<Uint8Array> {
    const { offset = 0, length, timeout = FILE_SECONDS } = options;
    // On the wire no length is the whole file: of nothing at all, one byte is asked for and dropped.
    const request = { session_id: sessionId, ...pathFields("path", path), offset, length: length === 0 ? 1 : (length ?? 0) };
    for await (const piece of this.#connection.stream("DownloadFile", request, options, timeout)) {
      if (length !== 0) {
        yield piece.content;
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

/** One command in a sandbox of its own, which is gone afterwards. */
export async function sandboxRun(code: Command, language: Language = "bash", timeout = 30): Promise<RunResult> {
  const client = new SandboxClient();
  try {
    return await client.run(code, language, timeout);
  } finally {
    await client.close();
  }
}

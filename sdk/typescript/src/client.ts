/** The client: every call of the gateway, and the session that `run` keeps for itself. */
import {
  Client,
  type ClientReadableStream,
  type ClientWritableStream,
  Metadata,
  type ServiceError,
} from "@grpc/grpc-js";

import { OPTIONS, type Target } from "./channel.js";
import { SandboxService } from "./contract.js";
import { Conflict, InvalidArgument, NotFound, NotText, RunLost, SandboxError, translate } from "./errors.js";
import {
  type Approval,
  Chunk,
  type FileInfo,
  type ImageInfo,
  type PipResult,
  type RunResult,
  type SessionInfo,
  type StatusInfo,
  readApproval,
  readFileInfo,
  readImage,
  readPip,
  readRun,
  readSession,
  readStatus,
} from "./model.js";
import { type Wanted, findTarget } from "./target.js";

const SMALL = 4 << 20; // a file up to here goes in one message
const PIECE = 1 << 20;
const RUNS = new Set(["Exec", "ExecStream", "PipInstall"]);
const MARGIN = 30; // seconds for the way there and back, on top of what the command may take
const CREATE_SECONDS = 180;
const FILE_SECONDS = 600;

export type Language = "bash" | "python" | "node" | "ts";
/** Code for the language; or a program and its arguments, without a shell. */
export type Command = string | readonly (string | Uint8Array)[];
/** A path that is not UTF-8 is given as bytes. */
export type Path = string | Uint8Array;

export interface ClientOptions {
  endpoint?: string;
  /** Whom new sessions belong to. */
  tenantId?: string;
  /** No others than that tenant's sessions are meant, for who sees several tenants'. */
  onlyTenant?: boolean;
  apiKey?: string;
  profile?: string;
}

export interface ExecOptions {
  language?: Language;
  env?: Record<string, string>;
  workdir?: Path;
  stdin?: string | Uint8Array;
}

interface Wishes {
  allowedHosts?: readonly string[];
  sessionId?: string;
  env?: Record<string, string>;
  image?: string;
  cpus?: number;
  memory?: number;
  disk?: number;
  ttl?: number;
}

export interface SessionOptions extends Wishes {
  /** gvisor unless told otherwise; "" is the strongest that works. One that is not there is an error. */
  runtimeClass?: string;
  /** Left out: the default list. Empty: nothing may be reached. */
  allowedHosts?: readonly string[];
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

export interface StartOptions {
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
type Method = (...words: unknown[]) => unknown;

const bytes = (data: string | Uint8Array): Uint8Array => (typeof data === "string" ? Buffer.from(data, "utf8") : data);

const pathFields = (name: string, path: Path): Record<string, Path> =>
  typeof path === "string" ? { [name]: path } : { [`${name}_bytes`]: path };

const wishes = ({ cpus = 0, memory = 0, disk = 0, allowedHosts, ...options }: Wishes): Message => ({
  session_id: options.sessionId ?? "",
  allowed_hosts: allowedHosts ?? [],
  deny_all_hosts: allowedHosts?.length === 0, // this format cannot tell an empty list from none
  env: options.env ?? {},
  image: options.image ?? "",
  limits: { cpus, memory, disk },
  ttl: options.ttl ?? 0,
});

function execRequest(sessionId: string, command: Command, timeout: number, options: ExecOptions, background = false): Message {
  return {
    session_id: sessionId,
    ...(typeof command === "string"
      ? { command, language: options.language ?? "bash" }
      : { argv: command.map((word) => bytes(word)) }),
    timeout,
    env: options.env ?? {},
    ...pathFields("workdir", options.workdir ?? ""),
    stdin: bytes(options.stdin ?? ""),
    background,
  };
}

/**
 * Runs code in sandboxes, through the gateway of a machine or cluster.
 *
 * Without arguments and configuration it finds the daemon of this machine, and starts it when it is not there. Nothing
 * is ever sent twice.
 */
export class SandboxClient {
  readonly #wanted: Wanted;
  readonly #tenant: string;
  readonly #metadata = new Metadata();
  #open: Promise<{ client: Client; target: Target }> | undefined;
  #session: Promise<string> | undefined; // the one that `run` made for itself

  constructor(options: ClientOptions | string = {}) {
    const chosen = typeof options === "string" ? { endpoint: options } : options;
    this.#wanted = { endpoint: chosen.endpoint, apiKey: chosen.apiKey, profile: chosen.profile };
    this.#tenant = chosen.tenantId ?? "";
    if (chosen.onlyTenant && this.#tenant) {
      this.#metadata.set("sandbox-tenant", this.#tenant);
    }
  }

  /** Destroys the session that `run` made, and lets go of the gateway. */
  async close(): Promise<void> {
    const session = this.#session;
    this.#session = undefined;
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
      return await this.exec(await session, code, timeout, { ...options, language });
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
    return this.exec(await this.#ownSession(), code, timeout, { ...options, language });
  }

  /** Runs code, or with a list a program with exactly these arguments, to its end. */
  async exec(sessionId: string, command: Command, timeout = 30, options: ExecOptions = {}): Promise<RunResult> {
    return readRun(await this.#call("Exec", execRequest(sessionId, command, timeout, options), timeout + MARGIN));
  }

  /** Runs code; its output comes as it is written, both streams. Leaving the loop early ends the command. */
  execStream(sessionId: string, command: Command, timeout = 300, options: ExecOptions = {}): ExecStream {
    const request = execRequest(sessionId, command, timeout, options);
    return new ExecStream(() => this.#stream("ExecStream", request, timeout + MARGIN));
  }

  /** Starts a run in the background, which goes on when this client is gone; `poll` has its result. */
  async start(sessionId: string, command: Command, timeout = 3600, options: Omit<ExecOptions, "stdin"> = {}): Promise<RunResult> {
    return readRun(await this.#call("Exec", execRequest(sessionId, command, timeout, options, true)));
  }

  /** How a run stands, with what it has written so far. */
  async poll(runId: string): Promise<RunResult> {
    return readRun((await this.#call("PollRun", { run_id: runId })).run);
  }

  /** Ends a run with everything it started. */
  async kill(runId: string): Promise<void> {
    await this.#call("KillRun", { run_id: runId });
  }

  async pipInstall(sessionId: string, packages: readonly string[], timeout = 300): Promise<PipResult> {
    return readPip(await this.#call("PipInstall", { session_id: sessionId, packages, timeout }, timeout + MARGIN));
  }

  /** Makes a session and returns its id. */
  async createSession(options: SessionOptions = {}): Promise<string> {
    const request = {
      ...wishes(options),
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
    return (await this.#call("CreateSession", request, CREATE_SECONDS)).session_id;
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
    return (await this.#call("RunSubAgent", request, CREATE_SECONDS)).session_id;
  }

  async getSession(sessionId: string): Promise<SessionInfo> {
    return readSession((await this.#call("GetSession", { session_id: sessionId })).session);
  }

  async listSessions(options: { allPhases?: boolean } = {}): Promise<SessionInfo[]> {
    const response = await this.#call("ListSessions", { phase: options.allPhases ? "all" : "active" });
    return response.sessions.map(readSession);
  }

  async destroySession(sessionId: string): Promise<void> {
    await this.#call("DestroySession", { session_id: sessionId }, CREATE_SECONDS);
  }

  /** Ends what runs in a persistent session; its files and configuration stay. Fine for one that is stopped. */
  async stopSession(sessionId: string): Promise<SessionInfo> {
    return readSession((await this.#call("StopSession", { session_id: sessionId }, CREATE_SECONDS)).session);
  }

  /** Brings a stopped session back, with its files. Its secrets have to be given again. */
  async startSession(sessionId: string, options: StartOptions = {}): Promise<SessionInfo> {
    const request = { session_id: sessionId, env: options.env ?? {}, secrets: options.secrets ?? {} };
    return readSession((await this.#call("StartSession", request, CREATE_SECONDS)).session);
  }

  /** What sessions can be made of, besides the machine's own tools. */
  async listImages(): Promise<ImageInfo[]> {
    return (await this.#call("ListImages", {})).images.map(readImage);
  }

  /** A new list, or changes to the one in force; returns the list that holds from now on. */
  async updateAllowedHosts(
    sessionId: string,
    change: { allowedHosts?: readonly string[]; add?: readonly string[]; remove?: readonly string[] },
  ): Promise<string[]> {
    const request = {
      session_id: sessionId,
      allowed_hosts: change.allowedHosts ?? [],
      clear: change.allowedHosts?.length === 0,
      add: change.add ?? [],
      remove: change.remove ?? [],
    };
    return (await this.#call("UpdateAllowedHosts", request)).allowed_hosts;
  }

  /**
   * Asks a person whether something may be done, and waits that long for the answer (0: not at all). Go on only when
   * `approved` is true. `expiresIn`: for how long it can be answered, where that is longer than the wait.
   */
  async confirmAction(sessionId: string, action: string, timeout = 30, options: { expiresIn?: number } = {}): Promise<Approval> {
    const request = { session_id: sessionId, action, timeout, expires_in: options.expiresIn ?? 0 };
    return readApproval((await this.#call("ConfirmAction", request, timeout + MARGIN)).approval);
  }

  /** The answer to an earlier question, or how it stands after that long. */
  async awaitApproval(approvalId: string, timeout = 30): Promise<Approval> {
    const request = { approval_id: approvalId, timeout };
    return readApproval((await this.#call("ConfirmAction", request, timeout + MARGIN)).approval);
  }

  /** Answers another caller's approval, once. With an API key this needs the scope operator. */
  async approveAction(approvalId: string, approved = true, options: { reason?: string } = {}): Promise<Approval> {
    const request = { approval_id: approvalId, approved, reason: options.reason ?? "" };
    return readApproval((await this.#call("ApproveAction", request)).approval);
  }

  /** Those that can be answered, or all on record. */
  async listApprovals(options: { allStates?: boolean } = {}): Promise<Approval[]> {
    const response = await this.#call("ListApprovals", { status: options.allStates ? "all" : "pending" });
    return response.approvals.map(readApproval);
  }

  async status(): Promise<StatusInfo> {
    return readStatus(await this.#call("Status", {}));
  }

  /** Writes ("w") or appends ("a") text or bytes of any size, and says how many bytes. Directories are made. */
  async writeFile(sessionId: string, path: Path, content: string | Uint8Array, mode: "w" | "a" = "w"): Promise<number> {
    const data = bytes(content);
    const where = { session_id: sessionId, ...pathFields("path", path), mode };
    if (data.length <= SMALL) {
      return (await this.#call("WriteFile", { ...where, content: data }, FILE_SECONDS)).bytes;
    }
    return (await this.#upload("UploadFile", where, data)).bytes;
  }

  /** A file of any size. */
  async readBytes(sessionId: string, path: Path): Promise<Uint8Array> {
    const pieces: Uint8Array[] = [];
    for await (const piece of this.#stream("DownloadFile", { session_id: sessionId, ...pathFields("path", path) }, FILE_SECONDS)) {
      pieces.push(piece.content);
    }
    return Buffer.concat(pieces);
  }

  /** A file that is text in UTF-8. */
  async readFile(sessionId: string, path: Path): Promise<string> {
    const content = await this.readBytes(sessionId, path);
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(content);
    } catch (cause) {
      throw new NotText(`${String(path)} is not UTF-8`, { code: "not_text", hint: "use readBytes" }, { cause });
    }
  }

  /** Everything below a directory (the workspace) that was modified since then. */
  async listFiles(sessionId: string, since = 0, options: { path?: Path } = {}): Promise<FileInfo[]> {
    const request = { session_id: sessionId, since, ...pathFields("path", options.path ?? "") };
    return (await this.#call("ListFiles", request, FILE_SECONDS)).files.map(readFileInfo);
  }

  // The way there

  #ownSession(): Promise<string> {
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
    const known = this.#open;
    if (known) {
      const { client, target } = await known;
      if (Date.now() / 1000 < target.renewAt) {
        return client;
      }
    }
    if (this.#open === known) {
      // Calls that are under way on an older one go on; it is gone with the last of them.
      const opening = findTarget(this.#wanted).then((target) => {
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

  async #call(name: string, request: Message, seconds = MARGIN): Promise<Message> {
    const client = await this.#connect();
    return new Promise((resolve, reject) => {
      const done = (error: ServiceError | null, response: Message) =>
        error ? reject(translate(error, RUNS.has(name))) : resolve(response);
      method(client, name).call(client, request, this.#metadata, { deadline: deadline(seconds) }, done);
    });
  }

  async #upload(name: string, header: Message, data: Uint8Array): Promise<Message> {
    const client = await this.#connect();
    return new Promise((resolve, reject) => {
      const done = (error: ServiceError | null, response: Message) => (error ? reject(translate(error)) : resolve(response));
      const options = { deadline: deadline(FILE_SECONDS) };
      const call = method(client, name).call(client, this.#metadata, options, done) as ClientWritableStream<Message>;
      const pieces = function* () {
        yield { header };
        for (let start = 0; start < data.length; start += PIECE) {
          yield { content: data.subarray(start, start + PIECE) };
        }
      };
      const source = pieces();
      const send = () => {
        for (let next = source.next(); ; next = source.next()) {
          if (next.done) {
            call.end();
            return;
          }
          if (!call.write(next.value)) {
            call.once("drain", send);
            return;
          }
        }
      };
      send();
    });
  }

  async *#stream(name: string, request: Message, seconds: number): AsyncGenerator<Message> {
    const client = await this.#connect();
    const options = { deadline: deadline(seconds) };
    const call = method(client, name).call(client, request, this.#metadata, options) as ClientReadableStream<Message>;
    try {
      for await (const message of call) {
        yield message;
      }
    } catch (error) {
      throw translate(error as ServiceError, RUNS.has(name));
    } finally {
      call.cancel(); // for a caller that leaves early; after the end it has no effect
    }
  }
}

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
    for await (const frame of this.#start()) {
      if (frame.output) {
        yield new Chunk(frame.output.data, frame.output.stream === "STREAM_STDERR" ? "stderr" : "stdout");
      } else if (frame.result) {
        this.#result = readRun(frame.result);
      }
    }
    if (!this.#result) {
      throw new RunLost("the stream ended before the run did", { code: "run_lost", hint: "look at the log of the session" });
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

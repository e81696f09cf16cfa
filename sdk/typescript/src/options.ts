/** What callers of the client may give. */
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

/** What a session and a sub-agent are asked for with. */
export interface Wishes extends CallOptions {
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

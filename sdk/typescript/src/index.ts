export { BackgroundRun } from "./background.js";
export { SandboxClient, sandboxRun } from "./client.js";
export {
  Conflict,
  DeadlineExceeded,
  Failed,
  InternalError,
  InvalidArgument,
  NotFound,
  NotText,
  OutcomeUnknown,
  PermissionDenied,
  ResourceExhausted,
  RunLost,
  SandboxError,
  ServerNotTrusted,
  Unauthenticated,
  Unavailable,
  Unsupported,
} from "./errors.js";
export { ExecStream } from "./exec_stream.js";
export { InteractiveRun } from "./interactive.js";
export {
  type Approval,
  Chunk,
  type FileInfo,
  type ImageInfo,
  type PipResult,
  type ProcessInfo,
  type Refusal,
  type RunResult,
  type SessionInfo,
  type StatusInfo,
  type StreamName,
  type Transfer,
} from "./model.js";
export type {
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

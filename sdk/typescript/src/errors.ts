/**
 * What can go wrong. Which class it is follows from the status code by a table here, never from a name that came over
 * the wire.
 *
 * SandboxError             code, error, detail, hint, field, retryAfter, runId
 * ├─ InvalidArgument       the request is wrong; `field` says where
 * │   └─ NotText           the file is no UTF-8 text: readBytes takes it
 * ├─ NotFound              no such session, run or file, or it belongs to another caller
 * ├─ Conflict              the id is taken, or the state does not allow it
 * ├─ PermissionDenied      known, and not allowed
 * ├─ Unauthenticated       the key or certificate does not count (any more)
 * ├─ ResourceExhausted     a quota; `retryAfter` says when it may work
 * ├─ Unsupported           this gateway cannot do that
 * ├─ Unavailable           cannot be reached, or this machine does not have it: nothing was done
 * │   └─ ServerNotTrusted  not the gateway that it should be: nothing was sent
 * ├─ Failed                it was tried and did not work
 * ├─ OutcomeUnknown        the answer is lost: it may have been done
 * │   ├─ RunLost           the command ran or may have run, and how it ended is not known
 * │   └─ DeadlineExceeded  no answer in time
 * └─ InternalError         a bug on the other side
 */
import { status as Status, type ServiceError } from "@grpc/grpc-js";

import { decodeErrorDetail } from "./contract.js";
import { findHint } from "./hints.js";

/** Nothing was sent. */
export const UNREACHABLE = "unreachable";
/** It was sent, and the answer did not come. */
export const CONNECTION_LOST = "connection_lost";

/** What a call does at the gateway, which decides what a lost answer means: "asks" changes nothing, however often. */
export type Effect = "asks" | "changes" | "runs";

const ASKS = new Set([
  ...["GetSession", "ListSessions", "PollRun", "Ps", "Log", "ReadFile", "DownloadFile", "ListFiles", "GetTree"],
  ...["ListApprovals", "ListImages", "Status"],
]);
const RUNS = new Set(["Exec", "ExecStream", "ExecInteractive", "PipInstall"]);

/** A method that is not known here changes something. */
export function findEffect(method: string): Effect {
  return RUNS.has(method) ? "runs" : ASKS.has(method) ? "asks" : "changes";
}

/** The parts of an error besides its text. */
export interface ErrorParts {
  /** Stable and for programs. */
  code?: string;
  /** The cause. */
  detail?: string;
  /** What to do next. */
  hint?: string;
  /** The argument that is wrong. */
  field?: string;
  /** In how many seconds it may work. */
  retryAfter?: number;
  /** The run that it is about. */
  runId?: string;
}

/** Any error of the client. `code` is stable and for programs, `error` for people; `hint` says what to do next. */
export class SandboxError extends Error {
  /** What went wrong, for people. */
  readonly error: string;
  /** Stable and snake_case: what programs decide by. */
  readonly code: string;
  /** The cause, where there is more to say. */
  readonly detail: string;
  /** What to do next. */
  readonly hint: string;
  /** The argument that is wrong, if one is. */
  readonly field: string;
  /** In how many seconds it may work; 0 when waiting does not help. */
  readonly retryAfter: number;
  /** The run that it is about, where its id is known. */
  readonly runId: string;

  constructor(error: string, parts: ErrorParts = {}, options?: ErrorOptions) {
    const { code = "", detail = "", hint = "", field = "", retryAfter = 0, runId = "" } = parts;
    super([error, detail].filter(Boolean).join(": ") + (hint ? ` (${hint})` : ""), options);
    this.name = new.target.name;
    this.error = error;
    this.code = code;
    this.detail = detail;
    this.hint = hint;
    this.field = field;
    this.retryAfter = retryAfter;
    this.runId = runId;
  }
}

/** The request is wrong; `field` says where. Nothing was done. */
export class InvalidArgument extends SandboxError {}
/** The file is not text in UTF-8; `readBytes` reads it. */
export class NotText extends InvalidArgument {}
/** There is no such session, run or file, or it belongs to another caller. Nothing was done. */
export class NotFound extends SandboxError {}
/** The id is taken, or the state of the session, run or approval does not allow it. Nothing was done. */
export class Conflict extends SandboxError {}
/** The caller is known and may not do that, or the sandbox's own file system refuses. */
export class PermissionDenied extends SandboxError {}
/** The API key or the certificate is not valid, or not any more. Nothing was done. */
export class Unauthenticated extends SandboxError {}
/** A quota or a limit is reached; `retryAfter` says when it may work. */
export class ResourceExhausted extends SandboxError {}
/** The gateway does not know this call: it is older than this client. */
export class Unsupported extends SandboxError {}
/** The gateway cannot be reached, or the machine does not have what was asked for. Nothing was done. */
export class Unavailable extends SandboxError {}
/** The server is not the gateway that it should be. Nothing was sent. */
export class ServerNotTrusted extends Unavailable {}
/** It was tried and did not work. */
export class Failed extends SandboxError {}
/** The request was sent and its answer is lost: it may have been carried out. Look before you send it again. */
export class OutcomeUnknown extends SandboxError {}
/** The command ran or may have run, and how it ended is not known. `runId` names the run, where its id is known. */
export class RunLost extends OutcomeUnknown {}
/** There was no answer in time. A command may have run; the gateway ends it when its caller has left. */
export class DeadlineExceeded extends OutcomeUnknown {}
/** The gateway met an error of its own; its log has the cause. */
export class InternalError extends SandboxError {}

const BY_STATUS = new Map<Status, typeof SandboxError>([
  [Status.INVALID_ARGUMENT, InvalidArgument],
  [Status.OUT_OF_RANGE, InvalidArgument],
  [Status.NOT_FOUND, NotFound],
  [Status.ALREADY_EXISTS, Conflict],
  [Status.FAILED_PRECONDITION, Conflict],
  [Status.ABORTED, Failed],
  [Status.PERMISSION_DENIED, PermissionDenied],
  [Status.UNAUTHENTICATED, Unauthenticated],
  [Status.RESOURCE_EXHAUSTED, ResourceExhausted],
  [Status.UNIMPLEMENTED, Unsupported],
  [Status.UNAVAILABLE, Unavailable],
  [Status.DEADLINE_EXCEEDED, DeadlineExceeded],
  [Status.DATA_LOSS, RunLost],
]);

/** gRPC says one status for a connection that never came to be and for one that broke; these are its words for the first.
 * What has other words counts as broken, so that a command that may have run is never called one that did not. */
const NEVER_SENT = /no connection established|failed to connect|name resolution failed/i;

/** gRPC's own ends of a call that was sent: they say nothing about what the gateway did. */
const BROKEN = new Set<Status>([Status.UNAVAILABLE, Status.CANCELLED, Status.UNKNOWN, Status.INTERNAL]);

/** A call's failure as one of ours. What the gateway says about it is text and numbers, nothing else. `runId`: of the run
 * that the call had begun, where it was told. */
export function translate(failure: ServiceError, effect: Effect, runId = ""): SandboxError {
  const said = failure.details ?? "";
  const [value] = failure.metadata?.get("sandbox-error-bin") ?? [];
  const found = value instanceof Buffer ? decodeErrorDetail(value) : undefined;
  if (!found) {
    return translateConnection(failure, said, effect, runId);
  }
  const known = BY_STATUS.get(failure.code) ?? InternalError;
  const kind = known === RunLost && effect !== "runs" ? OutcomeUnknown : known;
  const parts = { ...found, hint: findHint(found.code, found.hint), runId: found.runId || runId };
  return new kind(found.error || said, parts, { cause: failure });
}

/** gRPC's own failure, without a word of the gateway. */
function translateConnection(failure: ServiceError, said: string, effect: Effect, runId: string): SandboxError {
  const because = { cause: failure };
  const make = (kind: typeof SandboxError, error: string, code: string, hint = findHint(code)) =>
    new kind(error, { code, detail: said, hint, runId: kind === RunLost ? runId : "" }, because);
  if (failure.code === Status.UNAVAILABLE && /certificate|handshake|altname/i.test(said)) {
    return make(ServerNotTrusted, "the server is not the gateway that it should be", "server_not_trusted");
  }
  if (failure.code === Status.UNAVAILABLE && NEVER_SENT.test(said)) {
    return make(Unavailable, "the gateway cannot be reached", UNREACHABLE);
  }
  if (BROKEN.has(failure.code)) {
    const error = "the gateway went away before it had answered";
    if (effect === "asks") {
      return make(Unavailable, error, CONNECTION_LOST, "Ask again.");
    }
    return effect === "runs" ? make(RunLost, error, "run_lost") : make(OutcomeUnknown, error, CONNECTION_LOST);
  }
  const code = (Status[failure.code] ?? "unknown").toLowerCase();
  const kind = BY_STATUS.get(failure.code) ?? InternalError;
  return new kind(said || code, { code, hint: findHint(code), runId }, because);
}

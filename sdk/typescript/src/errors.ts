/**
 * What can go wrong. Which class it is follows from the status code by a table here, never from a name that came over
 * the wire.
 *
 * SandboxError             code, error, detail, hint, field, retryAfter
 * ├─ InvalidArgument       the request is wrong; `field` says where
 * │   └─ NotText           the file is no UTF-8 text: readBytes takes it
 * ├─ NotFound              no such session, run or file, or it belongs to another caller
 * ├─ Conflict              the id is taken, or the state does not allow it
 * ├─ PermissionDenied      known, and not allowed
 * ├─ Unauthenticated       the key or certificate does not count (any more)
 * ├─ ResourceExhausted     a quota; `retryAfter` says when it may work
 * ├─ Unsupported           this gateway cannot do that
 * ├─ Unavailable           cannot be reached, or this machine does not have it: nothing ran
 * │   └─ ServerNotTrusted  not the gateway that it should be: nothing was sent
 * ├─ Failed                it was tried and did not work
 * ├─ DeadlineExceeded      no answer in time
 * ├─ RunLost               it ran, and how it ended is not known
 * └─ InternalError         a bug on the other side
 */
import { status as Status, type ServiceError } from "@grpc/grpc-js";

import { decodeErrorDetail } from "./contract.js";

export interface ErrorParts {
  code?: string;
  detail?: string;
  hint?: string;
  field?: string;
  retryAfter?: number;
}

/** `code` is stable and for programs, `error` for people; `hint` says what to do next. */
export class SandboxError extends Error {
  readonly error: string;
  readonly code: string;
  readonly detail: string;
  readonly hint: string;
  readonly field: string;
  readonly retryAfter: number;

  constructor(error: string, parts: ErrorParts = {}, options?: ErrorOptions) {
    const { code = "", detail = "", hint = "", field = "", retryAfter = 0 } = parts;
    super([error, detail].filter(Boolean).join(": ") + (hint ? ` (${hint})` : ""), options);
    this.name = new.target.name;
    this.error = error;
    this.code = code;
    this.detail = detail;
    this.hint = hint;
    this.field = field;
    this.retryAfter = retryAfter;
  }
}

export class InvalidArgument extends SandboxError {}
export class NotText extends InvalidArgument {}
export class NotFound extends SandboxError {}
export class Conflict extends SandboxError {}
export class PermissionDenied extends SandboxError {}
export class Unauthenticated extends SandboxError {}
export class ResourceExhausted extends SandboxError {}
export class Unsupported extends SandboxError {}
export class Unavailable extends SandboxError {}
export class ServerNotTrusted extends Unavailable {}
export class Failed extends SandboxError {}
export class DeadlineExceeded extends SandboxError {}
export class RunLost extends SandboxError {}
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

/** A call's failure as one of ours. What the gateway says about it is text and numbers, nothing else. `runs`: the call was
 * to run a command. */
export function translate(failure: ServiceError, runs = false): SandboxError {
  const kind = BY_STATUS.get(failure.code) ?? InternalError;
  const said = failure.details ?? "";
  const [value] = failure.metadata?.get("sandbox-error-bin") ?? [];
  const found = value instanceof Buffer ? decodeErrorDetail(value) : undefined;
  if (found) {
    return new kind(found.error || said, found, { cause: failure });
  }
  if (runs && failure.code === Status.UNAVAILABLE && !NEVER_SENT.test(said) && !/certificate|handshake|altname/i.test(said)) {
    const hint = "the command may have run, and may still: look at the log of the session";
    return new RunLost("the gateway went away before it had answered", { code: "run_lost", detail: said, hint }, { cause: failure });
  }
  if (failure.code === Status.UNAVAILABLE && /certificate|handshake|altname/i.test(said)) {
    const hint = "the address answers with another certificate than the one this client trusts: check address and key";
    const parts = { code: "server_not_trusted", detail: said, hint };
    return new ServerNotTrusted("the server is not the gateway that it should be", parts, { cause: failure });
  }
  const code = (Status[failure.code] ?? "unknown").toLowerCase();
  return new kind(said || code, { code }, { cause: failure });
}

/** AbortSignals: what a caller gives up, as `fetch` does it: with the signal's own reason. */
import { status as Status, type ServiceError } from "@grpc/grpc-js";

import { type Effect, translate } from "./errors.js";

/** Waits for work that others may wait for as well: it goes on when this caller gives up. */
export async function unlessAborted<T>(work: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  if (!signal) {
    return work;
  }
  work.catch(() => undefined); // a caller that has given up does not hear of it
  signal.throwIfAborted();
  return new Promise((resolve, reject) => {
    const leave = follow(signal, { cancel: () => reject(signal.reason) });
    work.then(resolve, reject).finally(leave);
  });
}

/** Cancels a call when the signal is aborted; returns what stops that. */
export function follow(signal: AbortSignal | undefined, call: { cancel(): void }): () => void {
  const cancel = () => call.cancel();
  if (signal?.aborted) {
    cancel();
  }
  signal?.addEventListener("abort", cancel, { once: true });
  return () => signal?.removeEventListener("abort", cancel);
}

/** The error of a call that failed, or was given up. */
export function failWith(failure: ServiceError, signal: AbortSignal | undefined, effect: Effect, runId = ""): unknown {
  return signal?.aborted && failure.code === Status.CANCELLED ? signal.reason : translate(failure, effect, runId);
}

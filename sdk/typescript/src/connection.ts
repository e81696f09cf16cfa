/** The way to the gateway: a channel that is opened when it is needed, and again when its peer is gone. */
import {
  type Client,
  type ClientDuplexStream,
  type ClientReadableStream,
  type ClientUnaryCall,
  type ClientWritableStream,
  Metadata,
  type ServiceError,
} from "@grpc/grpc-js";

import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";

import { failWith, follow, unlessAborted } from "./abort.js";
import { OPTIONS, type Target } from "./channel.js";
import { SandboxService } from "./contract.js";
import { LOCAL, type Wanted } from "./discovery.js";
import { Conflict, type Effect, InvalidArgument, findEffect } from "./errors.js";
import { InteractiveRun } from "./interactive.js";
import { PIECE } from "./local_files.js";
import type { CallOptions, FileOptions } from "./options.js";
import type { Message } from "./requests.js";
import { Retry, isLost } from "./retry.js";
import { findTarget, isGone } from "./target.js";

export const MARGIN = 30; // seconds for the way there and back, on top of what the command may take
export const FILE_SECONDS = 600;

type Pieces = AsyncIterable<Uint8Array> | Iterable<Uint8Array>;
type Method = (...words: unknown[]) => unknown;

/**
 * The calls of one client. A request that changes anything, or runs a command, is sent once; one that was never sent, or
 * only asks, is sent again, for 15 seconds to a gateway that had answered before.
 */
export class Connection {
  #wanted: Wanted;
  readonly #metadata = new Metadata();
  #open: Promise<{ client: Client; target: Target }> | undefined;
  #lastTarget: Target | undefined; // of a channel that failed
  #known = false; // whether the gateway has answered
  #closed = false;

  /** `onlyTenant`: no others than that tenant's sessions are meant. */
  constructor(wanted: Wanted, onlyTenant: string) {
    this.#wanted = wanted;
    if (onlyTenant) {
      this.#metadata.set("sandbox-tenant", onlyTenant);
    }
  }

  async close(): Promise<void> {
    this.#closed = true;
    const open = this.#open;
    this.#open = undefined;
    (await open?.catch(() => undefined))?.client.close();
  }

  async #connect(): Promise<Client> {
    if (this.#closed) {
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

  async call(
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
    await this.call("ListApprovals", { status: "pending" }, { signal }, timeout);
    return unlessAborted(this.#connect(), signal);
  }

  async upload(header: Message, content: Pieces, options: FileOptions): Promise<number> {
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

  /** A command whose input stays open. */
  async interact(request: Message, seconds: number, { signal }: CallOptions): Promise<InteractiveRun> {
    const client = await this.#connectAwake(signal, MARGIN);
    const limits = { deadline: deadline(seconds) };
    const call = method(client, "ExecInteractive").call(client, this.#metadata, limits) as ClientDuplexStream<Message, Message>;
    const leave = follow(signal, call);
    call.once("close", leave);
    return InteractiveRun.begin(call, request, (error, runId) =>
      failWith(error as ServiceError, signal, findEffect("ExecInteractive"), runId),
    );
  }

  async *stream(name: string, request: Message, { signal }: CallOptions, seconds: number): AsyncGenerator<Message> {
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

export const describeClosed = () => new Conflict("the client is closed", { code: "client_closed", hint: "make another SandboxClient" });

/** grpc-js turns NaN and infinity into an exception that cannot be caught: the process would end. */
function deadline(seconds: number): Date {
  if (!(seconds >= 0 && seconds < 1e8)) {
    const hint = "seconds, more than 0 and at most 86400";
    throw new InvalidArgument("timeout is no number of seconds", { code: "invalid_argument", field: "timeout", hint });
  }
  return new Date(Date.now() + seconds * 1000);
}

const method = (client: Client, name: string): Method => (client as unknown as Record<string, Method>)[name]!;

/** Runs with open input as their callers see them. */
import { once } from "node:events";

import type { ClientDuplexStream } from "@grpc/grpc-js";

import { InvalidArgument, RunLost } from "./errors.js";
import { PIECE } from "./local_files.js";
import { type Chunk, ChunkReader, type RunResult, encode, readRun } from "./model.js";

/* eslint-disable-next-line @typescript-eslint/no-explicit-any -- the loader's messages have no types */
type Message = any;
type Frames = AsyncIterator<Message>;
/** Turns the error of the call into one of ours. */
type Fail = (error: unknown, runId: string) => unknown;

/**
 * A run whose input stays open until `closeStdin`: write to it in pieces, and iterate over its output as it comes. `close`
 * ends the command, if it still runs; so does the signal.
 *
 * `write` waits while the command does not read. A command that answers a lot while it is written to is read from at the
 * same time.
 */
export class InteractiveRun implements AsyncIterable<Chunk> {
  /** Finds the run in the log of its session. */
  readonly runId: string;
  readonly #call: ClientDuplexStream<Message, Message>;
  readonly #frames: Frames;
  readonly #fail: Fail;
  readonly #over: Promise<void>;
  #ended = false;
  #closed = false;
  #result: RunResult | undefined;

  private constructor(runId: string, call: ClientDuplexStream<Message, Message>, frames: Frames, fail: Fail) {
    this.runId = runId;
    this.#call = call;
    this.#frames = frames;
    this.#fail = fail;
    this.#over = new Promise((resolve) => {
      for (const event of ["end", "error", "close"]) {
        call.once(event, () => {
          this.#ended = true;
          resolve();
        });
      }
    });
  }

  /** Made by `SandboxClient.execInteractive`: sends the command, and waits until it runs. */
  static async begin(call: ClientDuplexStream<Message, Message>, request: Message, fail: Fail): Promise<InteractiveRun> {
    call.on("error", () => undefined); // the iterator has it; without a listener it would end the process
    call.write({ start: request });
    const frames = call[Symbol.asyncIterator]() as Frames;
    try {
      const first = await frames.next();
      if (first.done) {
        throw describeLoss();
      }
      return new InteractiveRun(first.value.started.run_id, call, frames, fail);
    } catch (error) {
      throw error instanceof RunLost ? error : fail(error, "");
    }
  }

  /** Without output, which has come already. */
  get result(): RunResult {
    if (!this.#result) {
      throw new Error("the run has not ended: read its output to the end first");
    }
    return this.#result;
  }

  /** Writes text or bytes of any size. What a command does not read that has ended is dropped. */
  async write(data: string | Uint8Array): Promise<void> {
    if (this.#closed) {
      const parts = { code: "invalid_argument", field: "stdin", hint: "write before closeStdin()" };
      throw new InvalidArgument("the input is closed", parts);
    }
    const content = encode("data", data);
    for (let start = 0; start < content.length && !this.#ended; start += PIECE) {
      if (!this.#call.write({ stdin: content.subarray(start, start + PIECE) })) {
        await Promise.race([once(this.#call, "drain"), this.#over]);
      }
    }
  }

  /** The command sees the end of its input. Fine to call twice. */
  closeStdin(): void {
    if (!this.#closed) {
      this.#closed = true;
      this.#call.end();
    }
  }

  /** Ends the command, if it still runs. */
  close(): void {
    this.#call.cancel();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Chunk> {
    const reader = new ChunkReader();
    try {
      for (let next = await this.#frames.next(); !next.done; next = await this.#frames.next()) {
        if (next.value.output) {
          const { data, stream } = next.value.output;
          yield reader.read(data, stream === "STREAM_STDERR" ? "stderr" : "stdout");
        } else if (next.value.result) {
          this.#result = readRun(next.value.result);
        }
      }
    } catch (error) {
      throw this.#fail(error, this.runId);
    } finally {
      this.#ended = true;
    }
    yield* reader.rest();
    if (!this.#result) {
      throw describeLoss();
    }
  }
}

const describeLoss = () =>
  new RunLost("the stream ended before the run did", { code: "run_lost", hint: "look at log() of the session" });

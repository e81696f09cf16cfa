/** The output of a run that is read while it runs. */
import { RunLost } from "./errors.js";
import { findHint } from "./hints.js";
import { type Chunk, ChunkReader, type RunResult, readRun } from "./model.js";
import type { Message } from "./requests.js";

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

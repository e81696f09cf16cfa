/** Background runs as their callers see them. */
import { DeadlineExceeded } from "./errors.js";
import { type Chunk, ChunkReader, type RunResult } from "./model.js";

const PATIENCE = 20; // seconds of one call
const ALL = Number.MAX_SAFE_INTEGER; // more output than there is

/** Output that the caller has had, and for how many seconds to wait for more. */
export interface Look {
  stdout_from?: number;
  stderr_from?: number;
  wait?: number;
}

/** The calls of a client that a handle makes. */
export interface Calls {
  look(look: Look): Promise<RunResult>;
  kill(): Promise<boolean>;
}

/**
 * A run in the background: its output as it comes, its end, and a way to end it. It goes on when its client is gone;
 * `SandboxClient.attach` finds it again by its `runId`.
 *
 * Iterating yields the output of both streams from the beginning, and ends with the run. A reader that is too slow misses
 * the middle of what exceeds 1 MiB: `lost` counts these bytes.
 */
export class BackgroundRun implements AsyncIterable<Chunk> {
  /** Finds the run again, also from another client. */
  readonly runId: string;
  /** The session that it runs in. */
  readonly sessionId: string;
  /** Bytes of output that came faster than they were read. */
  lost = 0;
  readonly #calls: Calls;
  #last: RunResult;

  /** Made by `SandboxClient.start` and `SandboxClient.attach`. */
  constructor(first: RunResult, calls: Calls) {
    this.runId = first.runId;
    this.sessionId = first.sessionId;
    this.#last = first;
    this.#calls = calls;
  }

  /** running, completed, timed_out, killed, oom_killed or lost: when the run was last looked at. */
  get status(): string {
    return this.#last.status;
  }

  /** null while the run goes on, when it was last looked at, and when its end is not known. */
  get exitCode(): number | null {
    return this.#last.exitCode;
  }

  /** How the run stands, with its output so far. */
  async poll(): Promise<RunResult> {
    return this.#look({});
  }

  /** Waits until the run has ended, and returns its result. DeadlineExceeded after so many seconds: the run goes on. */
  async wait(timeout = Infinity): Promise<RunResult> {
    const due = Date.now() / 1000 + timeout;
    while (this.#last.status === "running") {
      const rest = due - Date.now() / 1000;
      await this.#look({ stdout_from: ALL, stderr_from: ALL, wait: Math.max(0, Math.min(PATIENCE, rest)) });
      if (Date.now() / 1000 >= due && this.#last.status === "running") {
        throw new DeadlineExceeded("the run has not ended", { code: "deadline_exceeded", hint: "it goes on: wait again, or kill it" });
      }
    }
    return this.poll();
  }

  /** Ends the run with everything that it started, and returns its result. Fine for one that has ended. */
  async kill(): Promise<RunResult> {
    await this.#calls.kill();
    return this.poll();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Chunk> {
    const reader = new ChunkReader();
    const had = { stdout: 0, stderr: 0 };
    for (let ended = false; !ended; ) {
      const seen = await this.#look({ stdout_from: had.stdout, stderr_from: had.stderr, wait: PATIENCE });
      ended = seen.status !== "running";
      const news = { stdout: [seen.rawStdout, seen.stdoutBytes], stderr: [seen.rawStderr, seen.stderrBytes] } as const;
      for (const stream of ["stdout", "stderr"] as const) {
        const [data, total] = news[stream];
        // While it runs, nothing means that the sandbox was too slow to tell: the next look has it.
        if (data.length || ended) {
          this.lost += Math.max(0, total - had[stream] - data.length);
          had[stream] = total;
        }
        if (data.length) {
          yield reader.read(data, stream);
        }
      }
    }
    yield* reader.rest();
  }

  async #look(look: Look): Promise<RunResult> {
    this.#last = await this.#calls.look(look);
    return this.#last;
  }
}

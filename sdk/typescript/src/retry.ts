/** How often a call is sent again that was never sent, or that only asks: nothing else is ever sent twice. */
import { CONNECTION_LOST, UNREACHABLE, Unavailable } from "./errors.js";

const PATIENCE = 15; // seconds in which another gateway takes the place of one that is gone
const FIRST = 0.05; // seconds between two attempts, which double
const MOST = 1;

/** Whether the connection failed, and the call may be sent again: `Unavailable` is what was never sent, or only asks. */
export const isLost = (failure: unknown): boolean =>
  failure instanceof Unavailable && [UNREACHABLE, CONNECTION_LOST].includes(failure.code);

/**
 * One call. At this machine's daemon, which is started, it is sent once more; at a gateway that has answered this client
 * before, until PATIENCE is over. An address that never answered is more likely wrong than away.
 */
export class Retry {
  #until = 0;
  #pause = FIRST;
  #again = false;

  /** Seconds until the next attempt; undefined: there is none. */
  choosePause(local: boolean, known: boolean): number | undefined {
    if (local) {
      const first = !this.#again;
      this.#again = true;
      return first ? 0 : undefined;
    }
    if (!known) {
      return undefined;
    }
    const now = performance.now() / 1000;
    this.#until ||= now + PATIENCE;
    const pause = this.#pause;
    this.#pause = Math.min(pause * 2, MOST);
    return now + pause < this.#until ? pause : undefined;
  }
}

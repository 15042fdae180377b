// The stream of events, kept open: after a break it is asked for anew, a little later each time, and begins with a snapshot.

import { ask, eventsOf, problemOf } from "../api.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;

export class Connection {
  /** `received(event)`; `changed(state, sentence)`: state is connecting, live, lost, busy (a server that says why not now) or refused. */
  constructor(received, changed) {
    this.received = received;
    this.changed = changed;
    this.stopping = null;
  }

  /** Begin, or begin anew with another key. */
  start() {
    this.stop();
    this.stopping = new AbortController();
    this.run(this.stopping.signal);
  }

  stop() {
    this.stopping?.abort();
  }

  async run(signal) {
    let waitMs = FIRST_WAIT_MS;
    this.changed("connecting", "connecting");
    while (!signal.aborted) {
      let problem = ["lost", "connection lost; trying again"];
      try {
        const response = await ask("v1/cache/events", { which: "map", signal });
        if ([401, 403, 404].includes(response.status)) {
          this.changed("refused", await problemOf(response));
          return;
        }
        if (!response.ok) {
          problem = ["busy", await problemOf(response)];
          waitMs = Math.max(waitMs, 1000 * Math.min(Number(response.headers.get("retry-after")) || 0, 60));
          throw new Error(problem[1]);
        }
        for await (const data of eventsOf(response)) {
          if (signal.aborted) return;
          const event = JSON.parse(data);
          if (event.type === "snapshot") {
            waitMs = FIRST_WAIT_MS;
            this.changed("live", "live");
          }
          this.received(event);
        }
      } catch (error) {
        if (signal.aborted) return;
        console.info("events:", error.message);
      }
      if (signal.aborted) return;
      this.changed(...problem);
      await new Promise((resolve) => setTimeout(resolve, waitMs * (0.75 + Math.random() / 2)));
      waitMs = Math.min(LONGEST_WAIT_MS, waitMs * 2);
    }
  }
}

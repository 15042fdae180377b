// The event stream, kept open: after a break it is requested again, with growing pauses, and starts with a snapshot.

import { aboutModel, ask, eventsOf, problemOf } from "../api.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 5000;
const LOOK_EVERY_MS = 250;
/** The server sends data at least once a second. After this silence it counts as lost; after a longer one, reconnect. */
const LOST_MS = 2600;
const GIVEN_UP_MS = 10_000;

export class Connection {
  /**
   * `received(event)`; `changed({name, says, sinceS, needsKey})`: name is connecting, live, lost, busy (the server gives
   * a reason) or refused; `sinceS` is the time of the last byte.
   */
  constructor(received, changed) {
    this.received = received;
    this.changed = changed;
    this.stopping = null;
    this.attempt = null;
    this.heardS = 0;
    this.name = "";
    setInterval(() => this.look(), LOOK_EVERY_MS);
  }

  /** Connect, or connect again with another key. */
  start() {
    this.stopping?.abort();
    this.stopping = new AbortController();
    this.run(this.stopping.signal);
  }

  tell(name, says, needsKey = false) {
    this.name = name;
    this.changed({ name, says, sinceS: this.heardS, needsKey });
  }

  /** Record received bytes. A stream that was only slow is live again. */
  heard() {
    this.heardS = Date.now() / 1000;
    if (this.name === "lost" && this.attempt?.live) this.tell("live", "live");
  }

  look() {
    const silentMs = Date.now() - 1000 * this.heardS;
    if (!this.attempt?.live) return;
    if (this.name === "live" && silentMs > LOST_MS) this.tell("lost", "no data from the server");
    if (silentMs > GIVEN_UP_MS) this.attempt.abort.abort();
  }

  async run(signal) {
    let waitMs = FIRST_WAIT_MS;
    this.tell("connecting", "connecting");
    while (!signal.aborted) {
      let problem = ["lost", "connection lost; trying again"];
      const attempt = (this.attempt = { live: false, abort: new AbortController() });
      signal.addEventListener("abort", () => attempt.abort.abort(), { once: true });
      try {
        const response = await ask(aboutModel("v1/cache/events"), { which: "map", signal: attempt.abort.signal });
        if ([401, 403, 404].includes(response.status)) {
          this.tell("refused", await problemOf(response, "map"), response.status === 401);
          return;
        }
        if (!response.ok) {
          problem = ["busy", await problemOf(response, "map")];
          waitMs = Math.max(waitMs, 1000 * Math.min(Number(response.headers.get("retry-after")) || 0, 60));
          throw new Error(problem[1]);
        }
        for await (const data of eventsOf(response, () => this.heard())) {
          if (signal.aborted) return;
          const event = JSON.parse(data);
          if (event.type === "snapshot") {
            waitMs = FIRST_WAIT_MS;
            attempt.live = true;
            this.tell("live", "live");
          }
          this.received(event);
        }
      } catch (error) {
        if (signal.aborted) return;
        console.info("events:", error.message);
      }
      if (signal.aborted) return;
      attempt.live = false;
      this.tell(...problem);
      await new Promise((resolve) => setTimeout(resolve, waitMs * (0.75 + Math.random() / 2)));
      waitMs = Math.min(LONGEST_WAIT_MS, waitMs * 2);
    }
  }
}

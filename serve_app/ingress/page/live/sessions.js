// The table of sessions. The page requests it only while it is open and visible.

import { aboutModel, ask, problemOf } from "../api.js";
import { byId, count, make, seconds } from "../dom.js";

const EVERY_MS = 2000;
const AFTER_TROUBLE_MS = 10_000;

const STATES = {
  running: () => "running",
  paused: (session) => `paused; its space is kept for ${seconds(Math.max(0, session.live_for_s))}`,
  waiting: (session) => `waiting for ${seconds(session.waited_s)}. ${session.why}`,
  left: (session) => `left ${seconds(session.idle_s)} ago`,
};

export class Sessions {
  /** `cache`: the live model, which has the names of replicas. */
  constructor(cache) {
    this.cache = cache;
    this.asked = 0;
    this.timer = 0;
    byId("sessions").addEventListener("toggle", () => this.look());
    document.addEventListener("visibilitychange", () => this.look());
  }

  /** Clear the data of the previous key, and ask again. */
  clear() {
    this.show([], "");
    this.look();
  }

  /** Ask now, and repeatedly while the table is visible. */
  async look() {
    clearTimeout(this.timer);
    const asked = (this.asked += 1);
    const { open, hidden } = byId("sessions");
    if (!open || hidden || document.hidden) return;
    let [sessions, note, waitMs] = [[], "", EVERY_MS];
    try {
      const response = await ask(aboutModel("v1/cache/sessions"), { which: "map" });
      if (response.status === 404) throw new Error("This server does not report sessions.");
      if (!response.ok) throw new Error(await problemOf(response, "map"));
      sessions = (await response.json()).sessions;
      note = summary(sessions);
    } catch (error) {
      note = error instanceof TypeError ? "The server cannot be reached." : error.message;
      waitMs = AFTER_TROUBLE_MS;
    }
    if (asked !== this.asked) return; // another key, or no longer visible
    this.show(sessions, note);
    this.timer = setTimeout(() => this.look(), waitMs);
  }

  show(sessions, note) {
    byId("sessions-note").textContent = note;
    byId("sessions-rows").replaceChildren(...sessions.map((session) => sessionRow(session, this.cache.names)));
  }
}

/** A row of a table of sessions. `named`: with its tenant. */
export function sessionRow(session, names, named = true) {
  const shared = session.tokens - session.own_tokens;
  const cells = [
    session.session || "unnamed",
    ...(named ? [session.tenant] : []),
    STATES[session.state]?.(session) ?? session.state,
    shared > 0 ? `${count(session.tokens)} (${count(shared)} shared)` : count(session.tokens),
    count(session.turns),
    names.replica(session.replica),
  ];
  return make("tr", { className: session.state, title: session.replica }, ...cells.map((text) => make("td", {}, text)));
}

function summary(sessions) {
  const states = Object.keys(STATES).map((state) => [sessions.filter((session) => session.state === state).length, state]);
  return states.filter(([number]) => number).map(([number, state]) => `${count(number)} ${state}`).join(", ") || "none";
}

// The lists under the map: all incidents, and a readable sample of the requests.

import { announcer, byId, make } from "./dom.js";
import { isIncident, keyOf } from "./words.js";

const MAX_INCIDENTS = 500;
const MAX_REQUESTS = 120;
const SAMPLE_EVERY_S = 0.5;
const SAY_EVERY_MS = 6000;
const MAX_SAID = 3;

export class Lists {
  /** `words`: describes events; `timeOf`: formats a time; `choose`: called with the selected event. */
  constructor(words, timeOf, choose) {
    this.words = words;
    const item = (event, line) =>
      make("li", { className: event.type }, make("button", { type: "button", onclick: () => choose(event) }, make("time", {}, timeOf(event.at_s)), make("span", {}, line)));
    this.incidents = new List(byId("incidents"), MAX_INCIDENTS, item);
    this.requests = new List(byId("requests"), MAX_REQUESTS, item);
    this.sampled = new Map();
    this.say = announcer(byId("lists-spoken"), SAY_EVERY_MS, summary);
  }

  clear() {
    this.incidents.clear();
    this.requests.clear();
    this.sampled.clear();
    byId("lists-spoken").replaceChildren();
  }

  /** Add an event, in order of time. `aloud`: also for screen readers; `own`: a request of this page. Lines appear with `render`. */
  add(event, { aloud = true, own = false } = {}) {
    const line = this.words.line(event);
    if (!line) return;
    const incident = isIncident(event);
    if (!incident && !own && !this.isNext(event)) return;
    (incident ? this.incidents : this.requests).add(event, line);
    if (aloud) this.say({ line, incident });
  }

  /** Whether enough time has passed since an event of this type was listed. */
  isNext({ type, at_s: atS }) {
    const since = atS - (this.sampled.get(type) ?? -Infinity);
    if (since >= 0 && since < SAMPLE_EVERY_S) return false;
    this.sampled.set(type, atS);
    return true;
  }

  render() {
    this.incidents.render();
    this.requests.render();
    byId("no-incident").hidden = this.incidents.size > 0;
    byId("no-request").hidden = this.requests.size > 0;
  }
}

class List {
  constructor(element, most, item) {
    this.element = element;
    this.most = most;
    this.item = item;
    this.known = new Map();
    this.waiting = [];
  }

  get size() {
    return this.known.size;
  }

  clear() {
    this.known.clear();
    this.waiting = [];
    this.element.replaceChildren();
  }

  /** Add an event. If its key is already listed, only a `move` replaces the entry, because it has more details. */
  add(event, line) {
    const key = keyOf(event);
    const before = this.known.get(key);
    if (before && event.type !== "move") return;
    const entry = { key, event, line, element: null, replaces: before?.element ?? null };
    this.known.set(key, entry);
    this.waiting = [...this.waiting.filter((other) => other.key !== key), entry];
    if (this.known.size > this.most) this.drop(this.known.keys().next().value);
  }

  drop(key) {
    this.known.get(key).element?.remove();
    this.known.delete(key);
    this.waiting = this.waiting.filter((other) => other.key !== key);
  }

  render() {
    if (!this.waiting.length) return;
    const { scrollTop: kept, scrollHeight: before } = this.element;
    for (const entry of this.waiting) {
      entry.element = this.item(entry.event, entry.line);
      if (entry.replaces?.isConnected) entry.replaces.replaceWith(entry.element);
      else this.element.prepend(entry.element);
    }
    this.waiting = [];
    // Older lines stay in view while they are read.
    if (kept > 4) this.element.scrollTop = kept + this.element.scrollHeight - before;
  }
}

/** One text for all lines since the last announcement: incidents in full, a count of the rest. */
function summary(lines) {
  const incidents = lines.filter(({ incident }) => incident);
  const rest = lines.length - Math.min(incidents.length, MAX_SAID);
  const said = incidents.slice(-MAX_SAID).map(({ line }) => line);
  if (rest === 1 && !incidents.length) said.push(lines[0].line);
  else if (rest > 0) said.push(`${rest} more events`);
  return said.join(". ");
}

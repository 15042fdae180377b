// The log beside the map: every event in words, the newest first; screen readers get a summary now and then.

import { announcer, byId, make } from "./dom.js";

const MAX_LINES = 200;
const SAY_EVERY_MS = 6000;
const MAX_SAID = 3;

export class Log {
  /** `words`: what events are in words; `timeOf`: a moment as text; `choose`: told the event that somebody asks about. */
  constructor(words, timeOf, choose) {
    this.words = words;
    this.timeOf = timeOf;
    this.choose = choose;
    this.waiting = [];
    this.say = announcer(byId("log-spoken"), SAY_EVERY_MS, summary);
  }

  clear() {
    this.waiting = [];
    byId("log").replaceChildren();
    byId("log-spoken").replaceChildren();
  }

  /** Add events in their order; `aloud`: also for screen readers. Lines appear with `render`. */
  add(event, aloud = true) {
    const line = this.words.line(event);
    if (!line) return;
    this.waiting.push({ event, line });
    if (this.waiting.length > MAX_LINES) this.waiting.shift();
    if (aloud) this.say(line);
  }

  render() {
    if (!this.waiting.length) return;
    const list = byId("log");
    const kept = list.scrollTop;
    const before = list.scrollHeight;
    for (const { event, line } of this.waiting) list.prepend(this.item(event, line));
    this.waiting = [];
    while (list.childElementCount > MAX_LINES) list.lastElementChild.remove();
    // Whoever reads older lines goes on reading them.
    if (kept > 4) list.scrollTop = kept + list.scrollHeight - before;
  }

  item(event, line) {
    const time = make("time", {}, this.timeOf(event.at_s));
    const text = make("span", { className: line.weighty ? "weighty" : "" }, line.text);
    return make("li", {}, make("button", { type: "button", onclick: () => this.choose(event) }, time, text));
  }
}

/** One text for what happened since the last: what weighs most in full, the rest counted. */
function summary(lines) {
  const weighty = lines.filter((line) => line.weighty);
  const rest = lines.length - Math.min(weighty.length, MAX_SAID);
  const said = weighty.slice(-MAX_SAID).map((line) => line.text);
  if (rest === 1 && !weighty.length) said.push(lines[0].text);
  else if (rest > 0) said.push(`${rest} more events`);
  return said.join(". ");
}

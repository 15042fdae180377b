// The alarms under the header: one line for each current problem. Past problems are in the list of incidents.

import { announcer, byId, capital, make, plural } from "../dom.js";
import { isQuiet } from "../live/cache.js";

const MAX_NAMED = 3;
const SAY_EVERY_MS = 3000;
const STARTS_WITHIN_S = 300;

export class Alarms {
  /** `cache`: the model that is shown; `timeOf`: formats a time; `policy`: the alarms of refusals, or null if none are told. */
  constructor(cache, timeOf, policy) {
    this.policy = policy;
    this.cache = cache;
    this.timeOf = timeOf;
    this.shown = "";
    this.said = new Set();
    this.say = announcer(byId("alarms-spoken"), SAY_EVERY_MS, (lines) => lines.join(" "));
  }

  /** `connection`: `{name, says, sinceS}` of the live stream, or null in a recording. */
  render(connection) {
    const alarms = [...cutOff(connection, this.timeOf), ...this.ofModel(connection)];
    const key = JSON.stringify(alarms);
    if (key === this.shown) return;
    this.shown = key;
    byId("alarms").hidden = !alarms.length;
    byId("alarms-list").replaceChildren(...alarms.map(line));
    for (const { id, text, lead } of alarms) if (!this.said.has(id)) this.say(`${lead?.text ?? ""}${text}`);
    this.said = new Set(alarms.map(({ id }) => id));
  }

  /** The alarms from events. Without a live stream there are none, because the data is outdated. */
  ofModel(connection) {
    if (connection && connection.name !== "live") return [];
    const { cache } = this;
    return [...this.dead(), ...refused(cache), ...this.quiet(), ...this.without(), ...missing(cache), ...errors(cache, connection && this.policy())];
  }

  dead() {
    const { cache, timeOf } = this;
    const dying = [...cache.replicas.values()].filter(({ state }) => state === "lost");
    const joining = [...cache.replicas.values()].filter(({ state }) => state === "joining");
    const more = joining.length ? ` ${this.named(joining)} ${joining.length > 1 ? "are" : "is"} joining.` : "";
    const gone = [...cache.lately(), ...dying];
    const lines = gone.map(({ replica, lost_at_s: atS }) => ({
      id: `lost ${replica}`,
      level: "bad",
      text: `${capital(cache.names.replica(replica))} was lost at ${timeOf(atS)}.${more}`,
    }));
    if (lines.length > MAX_NAMED) {
      const last = timeOf(Math.max(...gone.map(({ lost_at_s: atS }) => atS)));
      const text = `${plural(lines.length, "replica")} were lost, the last at ${last}.${more}`;
      lines.splice(0, lines.length, { id: `lost ${lines.length}`, level: "bad", text });
    }
    if (cache.replicas.size || !cache.model || cache.asleep()) return lines;
    if (cache.fromZero && cache.nowS - cache.scale.at_s < STARTS_WITHIN_S) {
      return [...lines, { id: "first", level: "policy", text: "No replica is running yet. Requests wait for the first one." }];
    }
    return [...lines, { id: "none", level: "bad", text: "No replica is running, so no request can be answered." }];
  }

  quiet() {
    const { cache } = this;
    const silent = [...cache.replicas.values()].filter(isQuiet);
    if (!silent.length) return [];
    const since = this.timeOf(Math.min(...silent.map((one) => one.reported_at_s)));
    const text = `${this.named(silent)} ${silent.length > 1 ? "have" : "has"} not reported since ${since}, and may be busy or gone.`;
    return [{ id: `quiet ${silent.map((one) => one.replica)}`, level: "warn", text }];
  }

  /** Capabilities that the replicas' version of vLLM does not allow. */
  without() {
    const less = [...this.cache.replicas.values()].filter(({ without }) => Array.isArray(without) && without.length);
    if (!less.length) return [];
    const names = [...new Set(less.flatMap(({ without }) => without))].sort().join(", ");
    const text = `${this.named(less)} ${less.length > 1 ? "go" : "goes"} without ${names}: vLLM differs there; the log says how.`;
    return [{ id: `without ${names}`, level: "warn", text }];
  }

  named(replicas) {
    if (replicas.length > MAX_NAMED) return plural(replicas.length, "replica");
    return capital(replicas.map(({ replica }) => this.cache.names.replica(replica)).join(" and "));
  }
}

/** The page shows outdated data. If it shows none, the map gives the reason. */
function cutOff(connection, timeOf) {
  if (!connection?.sinceS || !["lost", "busy"].includes(connection.name)) return [];
  const lost = connection.name === "lost";
  const why = lost ? "There is no connection to the server." : connection.says;
  const text = `${why} The page shows the state at ${timeOf(connection.sinceS)} and keeps trying.`;
  return [{ id: "server", level: lost ? "bad" : "warn", text }];
}

function refused({ configuration }) {
  return configuration.filter(({ accepted }) => !accepted).map(({ why }) => {
    const text = `A user_config was refused, so the previous settings stay in force: ${why}`;
    return { id: `configuration ${why}`, level: "bad", text };
  });
}

function missing({ ingresses: { all, heard } }) {
  if (heard !== null && heard >= all) return [];
  const text = heard === null ? "The other ingresses do not answer" : `${heard} of ${all} ingresses ${heard === 1 ? "answers" : "answer"}`;
  return [{ id: "ingresses", level: "warn", text: `${text}; the page does not show the requests of the others.` }];
}

/** `policy`: the alarms of refusals by tenant, or null: then the figures tell how many there were. */
function errors(cache, policy) {
  const { refused: limited, refusedBy, failed } = cache.lastMinute();
  const lines = [];
  if (failed) lines.push({ id: "failed", level: "bad", text: `${plural(failed, "request")} failed (5xx) in the last minute.` });
  if (policy) return [...lines, ...policy];
  const by = [...refusedBy].map(([reason, number]) => `${number} by ${reason}`).join(", ");
  if (limited) lines.push({ id: "refused", level: "policy", text: `${plural(limited, "request")} ${limited === 1 ? "was" : "were"} refused (429) in the last minute${by && `: ${by}`}.` });
  return lines;
}

function line({ level, lead, text }) {
  const button = lead && make("button", { type: "button", onclick: lead.choose }, lead.text);
  return make("li", { className: level }, mark(level), make("span", {}, button, text));
}

const mark = (level) => make("span", { className: "alarm-mark", "aria-hidden": "true" }, { bad: "!", policy: "–" }[level] ?? "?");

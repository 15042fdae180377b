// The model of the replicas' prefixes and the decisions, built from /v1/cache/events; docs/reference/api.md lists the fields.
// It has no access to the page. Events enter only through `apply`.

import { Names } from "./names.js";

const MAX_REPLICAS = 256;
const MAX_NODES = 1024;
const MAX_DECISIONS = 1500;
const MAX_FIGURES = 90;
const BUCKET_S = 10;
const MINUTE_BUCKETS = 6;
const LOST_SHOWN_S = 60;
const QUIET_S = 3;

/** Whether a replica is silent. It should report once a second. */
export const isQuiet = ({ state, report_age_s: age }) => state === "serving" && age > QUIET_S;

export class Cache {
  constructor() {
    this.nowS = 0;
    this.changes = 0;
    this.clear();
  }

  /** Forget everything, including names. */
  clear() {
    this.names = new Names();
    this.begin();
  }

  begin() {
    this.model = "";
    this.simulated = false;
    this.seesAll = false;
    this.needsKey = false;
    this.fromZero = false;
    this.scale = null;
    this.blockSize = 16;
    this.links = [];
    this.replicas = new Map();
    this.lost = new Map();
    this.nodes = new Map();
    this.totals = [];
    this.figures = new Map();
    this.minute = null;
    this.rates = {};
    this.decisions = [];
    this.configuration = [];
    this.ingresses = { all: 1, heard: 1 };
    this.memo = null;
  }

  /** A copy that later events do not change. */
  copy() {
    return Object.assign(new Cache(), structuredClone({ ...this, memo: null, names: null }), { names: this.names.copy() });
  }

  /** Apply an event. Returns the events to list; for a replica, only changes of its state. */
  apply(event) {
    this.nowS = event.type === "snapshot" ? event.at_s : Math.max(this.nowS, event.at_s);
    this.changes += 1;
    return HANDLERS[event.type]?.(this, event) ?? [];
  }

  /** The prefixes of a replica, each with the tokens that this replica holds of it. */
  tree(replicaId) {
    const held = [];
    for (const node of this.nodes.values()) {
      const tokens = node.holders[replicaId] ?? 0;
      if (tokens > 0) held.push({ ...node, tokens, start: node.prefix_tokens - node.tokens });
    }
    return held;
  }

  /** The colour group of a prefix: null for a public one, else its tenant, or its root if there is only one tenant. */
  groupOf(node) {
    if (node.kind === "public") return null;
    return this.summary().tenants.size > 1 ? node.tenant : this.rootOf(node);
  }

  rootOf(node) {
    let root = node;
    // Bounded, because a file may have cycles of parents.
    for (let steps = 0; steps < MAX_NODES; steps += 1) {
      const above = this.nodes.get(root.parent);
      if (!above || above.kind === "public") break;
      root = above;
    }
    return root.id;
  }

  /** The groups on the map, largest first: `[group, name]`. */
  groups() {
    return this.summary().groups;
  }

  summary() {
    if (this.memo?.changes === this.changes) return this.memo;
    const nodes = [...this.nodes.values()];
    const tenants = new Set(nodes.filter((node) => node.kind !== "public").map((node) => node.tenant));
    this.memo = { changes: this.changes, tenants, groups: [], words: this.names.words(this.nodes) };
    const tokens = new Map();
    for (const node of nodes) {
      const held = Object.values(node.holders).reduce((sum, part) => sum + part, 0);
      if (held) tokens.set(this.groupOf(node), (tokens.get(this.groupOf(node)) ?? 0) + held);
    }
    const name = (group) => (group === null ? "public" : tenants.size > 1 ? group : this.nameOf(this.nodes.get(group)));
    this.memo.groups = [...tokens].sort((one, other) => other[1] - one[1]).map(([group]) => [group, name(group)]);
    return this.memo;
  }

  nameOf(node) {
    return node.label || this.summary().words.get(node.id) || this.names.node(node);
  }

  /** A short label that fits into a bar. */
  labelOf(node) {
    const { words, tenants } = this.summary();
    if (node.label || words.has(node.id)) return node.label || words.get(node.id);
    if (node.kind === "conversation") return "";
    return node.tenant && tenants.size > 1 ? node.tenant : this.nameOf(node);
  }

  /** Name the prefix of a request of this page. The decision identifies it. */
  sent(decision, system, question) {
    if (!decision.node) return;
    this.names.sent(decision.node, system, question);
    this.changes += 1;
  }

  /** Whether the model has no replica because no request needs one. */
  asleep() {
    return this.fromZero && !this.replicas.size && !this.scale?.target;
  }

  /** Replicas that died within the last minute. */
  lately() {
    return [...this.lost.values()].filter(({ at_s: atS }) => atS > this.nowS - LOST_SHOWN_S && atS <= this.nowS);
  }

  /** A replica's cached tokens: from its blocks if it reports them, else from the visible prefixes. */
  tokensOf(replica) {
    if (replica.blocks_reusable !== undefined) return replica.blocks_reusable * this.blockSize;
    return this.tree(replica.replica).reduce((sum, node) => sum + node.tokens, 0);
  }

  /** The capacity of a replica's pool in tokens, or null if it is not reported. */
  capacityOf(replica) {
    return replica.blocks_total === undefined ? null : replica.blocks_total * this.blockSize;
  }

  /** The cached tokens, and the reused share of the prompts of the last minute, or since the start if there were none. */
  vitals() {
    const ofMinute = this.lastMinute().sum;
    const lately = ofMinute("prompt_tokens") > 0;
    const sum = lately ? ofMinute : (field) => this.totals.reduce((total, one) => total + (one[field] ?? 0), 0);
    let cached = 0;
    for (const replica of this.replicas.values()) cached += this.tokensOf(replica);
    return { cached, lately, reused: sum("prompt_tokens") ? sum("cached_tokens") / sum("prompt_tokens") : null };
  }

  /** The numbers of answered, refused (429) and failed (5xx) requests of the last minute, its length in seconds, and a sum of any field. */
  lastMinute() {
    const firstS = Math.floor(this.nowS / BUCKET_S) * BUCKET_S - (MINUTE_BUCKETS - 1) * BUCKET_S;
    const recent = [...this.figures.values()].filter(({ at_s: atS }) => atS >= firstS && atS <= this.nowS);
    const sum = (field) => recent.reduce((total, row) => total + (row[field] ?? 0), 0);
    const refusedBy = new Map();
    for (const [by, count] of recent.flatMap((row) => Object.entries(row.refused_by ?? {}))) refusedBy.set(by, (refusedBy.get(by) ?? 0) + count);
    return { requests: sum("requests"), refused: sum("refused"), refusedBy, failed: sum("failed"), overS: Math.max(1, this.nowS - firstS), sum };
  }

  /** `atS`: the time of the event. With the report's age it gives the time of the report. */
  keepReplica(told, atS) {
    if (!this.replicas.has(told.replica) && this.replicas.size >= MAX_REPLICAS) return;
    const age = told.report_age_s ?? null;
    const heardS = age === null ? null : atS - age;
    this.replicas.set(told.replica, { ...told, reported_at_s: heardS, lost_at_s: told.state === "lost" ? (heardS ?? atS) : null });
    this.lost.delete(told.replica);
  }

  /** Remove a replica that is gone. `told`: its event. */
  dropReplica(told) {
    const before = this.replicas.get(told.replica);
    const lost = told.lost ?? (before !== undefined && before.state !== "leaving");
    const sinceS = told.at_s - (lost ? (told.report_age_s ?? 0) : 0);
    if (lost) this.lost.set(told.replica, { ...before, ...told, state: "lost", lost_at_s: sinceS });
    if (this.lost.size > MAX_REPLICAS) this.lost.delete(this.lost.keys().next().value);
    this.replicas.delete(told.replica);
    return { ...told, lost, at_s: sinceS };
  }

  keepFigures({ figures, minute }) {
    for (const row of rows(figures)) this.figures.set(row.at_s, row);
    while (this.figures.size > MAX_FIGURES) this.figures.delete(this.figures.keys().next().value);
    if (minute) this.minute = minute;
  }

  /** Throws TypeError for anything but nodes: a recording may contain anything. */
  keepNodes(nodes) {
    for (const node of nodes) {
      if (typeof node.id !== "string" || typeof node.holders !== "object" || !Number.isFinite(node.prefix_tokens - node.tokens)) {
        throw new TypeError("a prefix without id, tokens or holders");
      }
      if (this.nodes.has(node.id) || this.nodes.size < MAX_NODES) this.nodes.set(node.id, { ...node, holders: { ...node.holders } });
    }
  }

  keepDecision(decision) {
    this.decisions.push(decision);
    if (this.decisions.length > MAX_DECISIONS) this.decisions.splice(0, MAX_DECISIONS / 3);
  }
}

/** A list of objects, empty for a missing value. Throws TypeError for anything else: a recording may contain anything. */
function rows(value) {
  for (const row of value ?? []) {
    if (typeof row !== "object" || row === null) throw new TypeError("a list with an item that is not an object");
  }
  return [...(value ?? [])];
}

const moved = (scale) => scale && scale.from !== scale.target;

/** The messages about a configuration, each as an event. */
const refusals = (list, { at_s }) => list.map((row) => ({ at_s, ...row, type: "configuration" }));

/** Handlers by event type. Unknown types of a later server are ignored. Any word may be a type, so there is no prototype. */
const HANDLERS = {
  __proto__: null,
  /** A snapshot repeats earlier events. The lists ignore those that they already have. */
  snapshot(cache, event) {
    cache.begin();
    cache.model = event.model ?? "";
    cache.simulated = Boolean(event.simulated);
    cache.seesAll = event.viewer === "operator";
    cache.needsKey = Boolean(event.keys);
    cache.fromZero = Boolean(event.from_zero);
    cache.scale = event.scale ?? null;
    cache.blockSize = event.block_size ?? cache.blockSize;
    cache.links = [...(event.links ?? [])];
    cache.ingresses = { all: event.ingresses ?? 1, heard: event.ingresses_heard ?? (event.ingresses_heard === null ? null : (event.ingresses ?? 1)) };
    const before = rows(event.incidents);
    const gone = before.filter(({ type }) => type === "replica_left").map((left) => cache.dropReplica(left));
    for (const replica of rows(event.replicas)) cache.keepReplica(replica, event.at_s);
    cache.keepNodes(rows(event.prefixes));
    cache.totals = rows(event.totals);
    cache.keepFigures(event);
    cache.rates = { ...event.rates };
    for (const decision of rows(event.decisions)) cache.keepDecision(decision);
    const refused = rows(event.refusals).map((row) => ({ type: "refusal", ...row }));
    const missed = rows(event.misses).map((row) => ({ type: "miss", ...row }));
    cache.configuration = refusals(rows(event.configuration), event);
    const moves = rows(event.moves).map((move) => ({ type: "move", ...move }));
    const scale = moved(event.scale) ? [{ type: "scale", ...event.scale }] : [];
    const rest = before.filter(({ type }) => type !== "replica_left");
    return [...gone, ...rest, ...moves, ...scale, ...cache.configuration, ...cache.decisions, ...refused, ...missed].sort((one, other) => one.at_s - other.at_s);
  },
  replica(cache, event) {
    const before = cache.replicas.get(event.replica)?.state ?? "joining";
    cache.keepReplica(event, event.at_s);
    const { replica, state } = event;
    if (state === "lost" && before !== "lost") return [{ type: "replica_left", replica, lost: true, at_s: cache.replicas.get(replica).lost_at_s }];
    return state === "serving" && before === "joining" ? [{ type: "joined", at_s: event.at_s, replica }] : [];
  },
  replica_left(cache, event) {
    const told = cache.dropReplica(event);
    for (const node of cache.nodes.values()) delete node.holders[event.replica];
    return [told];
  },
  prefixes(cache, event) {
    cache.keepNodes(event.nodes);
  },
  prefixes_gone(cache, event) {
    for (const id of event.ids) cache.nodes.delete(id);
  },
  totals(cache, event) {
    cache.totals = rows(event.totals);
    cache.keepFigures(event);
  },
  configuration(cache, event) {
    const known = new Set(cache.configuration.map(({ why }) => why));
    cache.configuration = refusals(rows(event.configuration), event);
    return cache.configuration.filter(({ why }) => !known.has(why));
  },
  ingresses_heard(cache, event) {
    cache.ingresses.heard = event.ingresses_heard;
    return [{ ...event, ingresses: cache.ingresses.all }];
  },
  decision(cache, event) {
    cache.keepDecision(event);
    return [event];
  },
  refusal: (_, event) => [event],
  miss: (_, event) => [event],
  evictions: (_, event) => [event],
  pulls: (_, event) => [event],
  move: (_, event) => [event],
  reset: (_, event) => [event],
  scale(cache, event) {
    cache.scale = event;
    return moved(event) ? [event] : [];
  },
};

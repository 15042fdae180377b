// What the replicas hold and what was decided, as the events of /v1/cache/events tell it; docs/reference/api.md has their fields.
// Knows no element of the page. `apply` is the only way in which it changes.

const MAX_REPLICAS = 256;
const MAX_NODES = 1024;
const MAX_DECISIONS = 1500;
const WINDOW_S = 60;
const KINDS = { public: "public prompt", system: "system prompt", conversation: "conversation" };

export class Cache {
  constructor() {
    this.nowS = 0;
    this.changes = 0;
    this.clear();
  }

  clear() {
    this.model = "";
    this.simulated = false;
    this.seesAll = false;
    this.blockSize = 16;
    this.replicas = new Map();
    this.nodes = new Map();
    this.totals = [];
    this.decisions = [];
    this.memo = null;
  }

  /** A copy that later events leave alone. */
  copy() {
    return Object.assign(new Cache(), structuredClone({ ...this, memo: null }));
  }

  /** Take an event in. Returns what of it is worth telling: events, of a replica only what changed. */
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

  /** As whose a prefix is coloured: null for public ones, its tenant, or its first part where there is one tenant only. */
  groupOf(node) {
    if (node.kind === "public") return null;
    return this.summary().tenants.size > 1 ? node.tenant : this.rootOf(node);
  }

  rootOf(node) {
    let root = node;
    // Bounded, whatever a file says of parents.
    for (let steps = 0; steps < MAX_NODES; steps += 1) {
      const above = this.nodes.get(root.parent);
      if (!above || above.kind === "public") break;
      root = above;
    }
    return root.id;
  }

  /** The groups that are on the map, the largest first: `[group, name]`. */
  groups() {
    return this.summary().groups;
  }

  summary() {
    if (this.memo?.changes === this.changes) return this.memo;
    const nodes = [...this.nodes.values()];
    const tenants = new Set(nodes.filter((node) => node.kind !== "public").map((node) => node.tenant));
    this.memo = { changes: this.changes, tenants, groups: [] };
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
    if (node.label) return node.label;
    const whose = node.tenant !== null && this.summary().tenants.size > 1 ? `${node.tenant}’s ` : "";
    return `${whose}${KINDS[node.kind] ?? "prefix"} ${node.id.slice(0, 4)}`;
  }

  /** What fits into a bar. */
  labelOf(node) {
    if (node.label) return node.label;
    if (node.kind === "conversation") return "";
    return this.summary().tenants.size > 1 ? (node.tenant ?? "") : (KINDS[node.kind] ?? "");
  }

  /** Tokens that a replica has cached: all where it tells its blocks, else those of the prefixes that are seen. */
  tokensOf(replica) {
    if (replica.blocks_reusable !== undefined) return replica.blocks_reusable * this.blockSize;
    return this.tree(replica.replica).reduce((sum, node) => sum + node.tokens, 0);
  }

  /** Figures of now: tokens cached; of the last minute's prompts, or of all where none came, the share that was reused. */
  vitals() {
    let recent = this.decisions.filter((decision) => decision.at_s > this.nowS - WINDOW_S);
    const perMinute = recent.length;
    if (!perMinute) recent = this.totals;
    const sum = (field) => recent.reduce((total, one) => total + (one[field] ?? 0), 0);
    let cached = 0;
    for (const replica of this.replicas.values()) cached += this.tokensOf(replica);
    return { cached, perMinute, reused: sum("prompt_tokens") ? sum("cached_tokens") / sum("prompt_tokens") : null };
  }

  keepReplica(told) {
    if (this.replicas.has(told.replica) || this.replicas.size < MAX_REPLICAS) this.replicas.set(told.replica, told);
  }

  /** Throws TypeError for what is no node: a recording may hold anything. */
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

/** A list of objects, none for nothing. Throws TypeError for anything else: a recording may hold anything. */
function rows(value) {
  for (const row of value ?? []) {
    if (typeof row !== "object" || row === null) throw new TypeError("a list with something else than objects");
  }
  return [...(value ?? [])];
}

/** By an event's type, whatever words it is; what a later server says more is passed over. */
const HANDLERS = {
  __proto__: null,
  snapshot(cache, event) {
    cache.clear();
    cache.model = event.model ?? "";
    cache.simulated = Boolean(event.simulated);
    cache.seesAll = event.viewer === "operator";
    cache.blockSize = event.block_size ?? cache.blockSize;
    for (const replica of rows(event.replicas)) cache.keepReplica(replica);
    cache.keepNodes(rows(event.prefixes));
    cache.totals = rows(event.totals);
    for (const decision of rows(event.decisions)) cache.keepDecision(decision);
  },
  replica(cache, event) {
    const before = cache.replicas.get(event.replica)?.state;
    cache.keepReplica(event);
    return event.state === before ? [] : [event];
  },
  replica_left(cache, event) {
    cache.replicas.delete(event.replica);
    for (const node of cache.nodes.values()) delete node.holders[event.replica];
    return [event];
  },
  prefixes(cache, event) {
    cache.keepNodes(event.nodes);
  },
  prefixes_gone(cache, event) {
    for (const id of event.ids) cache.nodes.delete(id);
  },
  totals(cache, event) {
    cache.totals = rows(event.totals);
  },
  decision(cache, event) {
    cache.keepDecision(event);
    return [event];
  },
  evictions: (_, event) => [event],
  pulls: (_, event) => [event],
  move: (_, event) => [event],
  reset: (_, event) => [event],
  scale: (_, event) => (event.from === event.target ? [] : [event]),
  skipped: (_, event) => [event],
};

// Events in words: a line for a list; a heading, sentences and facts for the panel of details.

import { capital, count, percent, plural, seconds } from "./dom.js";

const REASONS = {
  cached: "It held the longest part of the prompt, and its queue was worth the wait.",
  in_flight: "It was already computing a prompt with the same prefix.",
  cold: "No replica held any part of the prompt, and this one scored best.",
  load_spill: "The replicas that held more of the prompt were too busy.",
  only_replica: "It was the only replica that could take the request.",
  round_robin: "It was next in turn.",
  power_of_two: "It had fewer requests than another randomly chosen replica.",
  placement: "It comes first in the order of the prompt’s placement key, and was within its load limit.",
  fallback: "It had the least queued work.",
};
const INCIDENTS = new Set(["joined", "replica_left", "move", "scale", "reset", "configuration", "ingresses_heard"]);
const MARKED = new Set(["replica_left", "move", "reset", "configuration"]);

/** Whether an event belongs to the list of incidents. The others belong to the list of requests. */
export const isIncident = (event) => INCIDENTS.has(event.type) && !joinedAlone(event);

/** Whether a replica joined while no other had anything to copy, as at the first start. */
const joinedAlone = ({ type, kind, blocks, peers_lost: lost, skipped_blocks: skipped }) =>
  type === "move" && kind === "prewarm" && !blocks && !lost && !Object.keys(skipped ?? {}).length;

/** Whether a recording marks this event: a change of replicas or settings, or a reset. */
export const isMarked = (event) => MARKED.has(event.type) || (event.type === "scale" && event.from !== event.target);

/** The subject of an event: a later one with the same key adds to the same subject. */
export function keyOf(event) {
  if (event.type === "decision") return event.request;
  if (event.type === "refusal") return ["refusal", event.tenant, event.limit, event.at_s].join(" ");
  if (event.type === "miss") return `miss ${event.request}`;
  const about = event.type === "move" ? (event.kind === "handover" ? "handover" : "joined") : event.type;
  const once = ["joined", "handover", "replica_left"].includes(about);
  return [about, event.replica ?? event.why ?? "", once ? "" : event.at_s].join(" ");
}

export class Words {
  /** `cache`: the model with the names of replicas and prefixes; `timeOf`: formats a time. */
  constructor(cache, timeOf) {
    this.cache = cache;
    this.timeOf = timeOf;
  }

  /** A line for a list, or null if the event has none. */
  line(event) {
    return SAYS[event.type]?.(event, this.cache) ?? null;
  }

  heading(event) {
    return event.type === "decision" ? `Why ${this.cache.names.replica(event.replica)}` : (this.line(event) ?? event.type);
  }

  sentences(event) {
    if (event.type === "decision") return [REASONS[event.reason], missed(event), pulled(event, this.cache)];
    return [event.why ?? EXPLAINS[event.type]?.(event) ?? ""];
  }

  facts(event) {
    const id = event.replica ? [["replica id", event.replica]] : [];
    return [...(FACTS[event.type]?.(event, this.cache) ?? []), ["at", this.timeOf(event.at_s)], ...id];
  }
}

const Replica = (event, cache) => capital(cache.names.replica(event.replica));

const SAYS = {
  decision(event, cache) {
    const share = event.prompt_tokens ? event.cached_tokens / event.prompt_tokens : 0;
    const tenant = event.tenant && event.tenant !== "default" ? `${event.tenant}: ` : "";
    return `${tenant}${plural(event.prompt_tokens, "token")} to ${cache.names.replica(event.replica)}, ${share ? `${percent(share)} reused` : "cold"}`;
  },
  refusal: (event) => `${event.tenant}: refused by ${event.limit}`,
  miss(event) {
    const tenant = event.tenant && event.tenant !== "default" ? `${event.tenant}: ` : "";
    return `${tenant}${plural(event.lost_tokens, "token")} computed again (${event.reason.replaceAll("_", " ")})`;
  },
  joined: (event, cache) => `${Replica(event, cache)} joined`,
  replica_left: (event, cache) => `${Replica(event, cache)} ${event.lost ? "was lost" : "left"}`,
  evictions: (event, cache) => `${Replica(event, cache)} evicted ${plural(event.blocks * cache.blockSize, "token")} to make room`,
  pulls: (event, cache) => `${Replica(event, cache)} pulled ${plural(event.tokens, "token")} from another replica in ${seconds(event.seconds)}`,
  move(event, cache) {
    if (joinedAlone(event)) return null;
    const held = plural(event.blocks * cache.blockSize, "token");
    if (event.kind === "handover") return `${Replica(event, cache)} handed over ${event.blocks ? held : "nothing"} before it left`;
    return `${Replica(event, cache)} joined ${event.blocks ? `warm: it copied ${held} from other replicas` : "cold: it copied nothing"}`;
  },
  reset: (event) => `The caches were reset${event.complete ? "" : ", but not on every replica"}`,
  scale: (event) => `The autoscaler scales from ${event.from} to ${plural(event.target, "replica")}`,
  configuration: (event) => (event.accepted ? "A user_config moved tenants to other trust groups" : "A user_config was refused"),
  ingresses_heard({ ingresses_heard: heard, ingresses }) {
    if (heard === null) return "The other ingresses do not answer";
    return heard < ingresses ? `${heard} of ${ingresses} ingresses ${heard === 1 ? "answers" : "answer"}` : "All ingresses answer";
  },
};

const EXPLAINS = {
  refusal: (event) => event.remedy,
  miss: (event) => capital(event.advice ?? ""),
  evictions: () => "The pool was full, so unused blocks were evicted. Pinned prefixes stay.",
  pulls: () => "Pulling the KV of a prefix from another replica costs less than computing it.",
  move: () => "A joining replica copies the most requested prefixes. A leaving one hands over prefixes that no other replica holds.",
  joined: () => "It now takes requests.",
  replica_left: (event) =>
    event.lost
      ? "It died, or its network failed. Its cache is gone. Its requests continued on other replicas."
      : "It finished its requests and stopped. Its cache is gone, except for prefixes that it handed over.",
  ingresses_heard: () => "The page does not show the requests of an ingress that does not answer.",
};

const tokens = (number) => (number === undefined || number === null ? null : plural(number, "token"));
const time = (value, word) => (value > 0 ? `${seconds(value)}${word ? ` (${word})` : ""}` : null);

const FACTS = {
  decision: (event, cache) => [
    ["reused", `${count(event.cached_tokens)} of ${tokens(event.prompt_tokens)}`],
    ["first token", time(event.ttft_s, cache.simulated ? "simulated" : "")],
    ["expected", time(event.estimated_ttft_s, "estimated")],
    ["without a cache", event.cached_tokens ? time(event.cold_ttft_s, "estimated") : null],
    ["queued", tokens(event.queued_tokens)],
    ["tenant", event.tenant],
    ["prefix", cache.nodes.has(event.node) ? cache.nameOf(cache.nodes.get(event.node)) : null],
    ["reason", event.reason],
    ["request", event.request],
  ],
  refusal: (event) => [
    ["tenant", event.tenant],
    ["limit", event.limit],
    ["place", event.place],
    ["used", event.used === null || event.used === undefined ? null : `${count(event.used)} of ${count(event.most)}`],
  ],
  miss: (event) => [
    ["reason", event.reason],
    ["lost", tokens(event.lost_tokens)],
    ["part", event.part],
    ["line", event.line],
    ["tenant", event.tenant],
    ["request", event.request],
  ],
  pulls: (event) => [["outcomes", Object.entries(event.pulls ?? {}).map(([outcome, times]) => `${times} ${outcome}`).join(", ")], ["tokens", tokens(event.tokens)]],
  evictions: (event) => [["blocks", count(event.blocks)], ["over", time(event.seconds)]],
  configuration: (event) => [["reported by", event.processes ? `${event.processes} of the replicas and ingresses` : null]],
  move: (event) => [
    ["state", event.state],
    ["blocks", event.blocks],
    ["bytes", event.bytes ? count(event.bytes) : null],
    ["peers", event.peers],
    ["saves", event.saves],
    ["took", time(event.seconds)],
    ...Object.entries(event.skipped_blocks ?? {}).map(([why, blocks]) => [`not moved, ${why.replaceAll("_", " ")}`, plural(blocks, "block")]),
  ],
  // The autoscaler's own inputs, each under its field name.
  scale: (event) => Object.entries(event).filter(([name, value]) => !["type", "at_s", "why"].includes(name) && typeof value !== "object"),
};

function missed(event) {
  const more = event.best_cached_tokens - event.selected_cached_tokens;
  return more > 0 ? `Another replica held ${plural(more, "more token")} of the prompt.` : "";
}

function pulled(event, cache) {
  if (!event.pull_from || !event.pull_tokens) return "";
  return `It was told to pull the first ${plural(event.pull_tokens, "token")} from ${cache.names.replica(event.pull_from)}.`;
}

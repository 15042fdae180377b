// Events in words: a line for a list, and heading, sentences and facts for whoever asks for more.

import { capital, count, percent, plural, seconds } from "./dom.js";

const REASONS = {
  cached: "It held the longest part of the prompt, and the work queued there was worth the wait.",
  in_flight: "It was computing a prompt that begins the same, and would soon hold it.",
  cold: "No replica held any of the prompt, and this one scored best.",
  load_spill: "The replicas that held more of it were busier than what they held was worth.",
  hot_prefix: "The prefix is asked for more than its holders should carry, so one more holds it.",
  only_replica: "It was the only replica that could take the request.",
  round_robin: "It was its turn.",
  power_of_two: "Of two replicas drawn at random it had fewer requests.",
  placement: "It comes first in the order of the prompt’s placement key, and was within its load bound.",
  fallback: "It had the least queued work.",
};
const INCIDENTS = new Set(["joined", "replica_left", "move", "scale", "reset", "configuration", "ingresses_heard"]);
const MARKED = new Set(["replica_left", "move", "reset", "configuration"]);

/** Whether an event is kept in the list of incidents; the others are requests and what came of them. */
export const isIncident = (event) => INCIDENTS.has(event.type);

/** Whether an event belongs among the marks of a recording: replicas came or went, or everything was forgotten. */
export const isMarked = (event) => MARKED.has(event.type) || (event.type === "scale" && event.from !== event.target);

/** What an event is about: a later one with the same key says more of the same. */
export function keyOf(event) {
  if (event.type === "decision") return event.request;
  const about = event.type === "move" ? (event.kind === "handover" ? "handover" : "joined") : event.type;
  const once = ["joined", "handover", "replica_left"].includes(about);
  return [about, event.replica ?? event.why ?? "", once ? "" : event.at_s].join(" ");
}

export class Words {
  /** `cache`: the model whose replicas and prefixes are named; `timeOf`: a moment as text. */
  constructor(cache, timeOf) {
    this.cache = cache;
    this.timeOf = timeOf;
  }

  /** A line for a list; null for an event that is none to read. */
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
    const id = event.replica ? [["id of the replica", event.replica]] : [];
    return [...(FACTS[event.type]?.(event, this.cache) ?? []), ["at", this.timeOf(event.at_s)], ...id];
  }
}

const Replica = (event, cache) => capital(cache.names.replica(event.replica));

const SAYS = {
  decision(event, cache) {
    const share = event.prompt_tokens ? event.cached_tokens / event.prompt_tokens : 0;
    const whose = event.tenant && event.tenant !== "default" ? `${event.tenant}: ` : "";
    return `${whose}${plural(event.prompt_tokens, "token")} to ${cache.names.replica(event.replica)}, ${share ? `${percent(share)} reused` : "cold"}`;
  },
  joined: (event, cache) => `${Replica(event, cache)} joined`,
  replica_left: (event, cache) => `${Replica(event, cache)} ${event.lost ? "was lost" : "left"}`,
  evictions: (event, cache) => `${Replica(event, cache)} evicted ${plural(event.blocks * cache.blockSize, "token")} for newer ones`,
  pulls: (event, cache) => `${Replica(event, cache)} copied ${plural(event.tokens, "token")} from another replica in ${seconds(event.seconds)}`,
  move(event, cache) {
    const held = plural(event.blocks * cache.blockSize, "token");
    if (event.kind === "handover") return `${Replica(event, cache)} handed over ${event.blocks ? held : "nothing"} before it left`;
    return `${Replica(event, cache)} joined ${event.blocks ? `warm: it copied ${held} of others` : "cold: it copied nothing"}`;
  },
  reset: (event) => `The caches were told to forget everything${event.complete ? "" : "; not all did"}`,
  scale: (event) => `The autoscaler goes from ${event.from} to ${plural(event.target, "replica")}`,
  configuration: (event) => (event.accepted ? "A user_config is in force that moves tenants" : "A user_config was refused"),
  ingresses_heard({ ingresses_heard: heard, ingresses }) {
    if (heard === null) return "The other ingresses do not answer";
    return heard < ingresses ? `${heard} of ${ingresses} ingresses ${heard === 1 ? "answers" : "answer"}` : "All ingresses answer";
  },
};

const EXPLAINS = {
  evictions: () => "The pool was full: what was used least gave room. Pinned prefixes are passed by.",
  pulls: () => "Copying the KV of a prefix costs less than computing it, where another replica holds it.",
  move: () => "A replica that joins copies what will be asked of it; one that leaves hands on what others lack.",
  joined: () => "It takes requests now.",
  replica_left: (event) =>
    event.lost
      ? "It died, or the network to it did. What it held is gone with it; its requests went on at other replicas."
      : "It was stopped, and ended its requests first. What it held is gone with it, unless it was handed over.",
  ingresses_heard: () => "Requests of an ingress that does not answer are missing here.",
};

const tokens = (number) => (number === undefined || number === null ? null : plural(number, "token"));
const time = (value, word) => (value > 0 ? `${seconds(value)}${word ? ` (${word})` : ""}` : null);

const FACTS = {
  decision: (event, cache) => [
    ["reused", `${count(event.cached_tokens)} of ${tokens(event.prompt_tokens)}`],
    ["first token", time(event.ttft_s, cache.simulated ? "simulated" : "")],
    ["expected", time(event.estimated_ttft_s, "estimated")],
    ["had it been cold", event.cached_tokens ? time(event.cold_ttft_s, "estimated") : null],
    ["queued there", tokens(event.queued_tokens)],
    ["tenant", event.tenant],
    ["prefix", cache.nodes.has(event.node) ? cache.nameOf(cache.nodes.get(event.node)) : null],
    ["reason", event.reason],
    ["request", event.request],
  ],
  pulls: (event) => [["outcomes", Object.entries(event.pulls ?? {}).map(([outcome, times]) => `${times} ${outcome}`).join(", ")], ["tokens", tokens(event.tokens)]],
  evictions: (event) => [["blocks", count(event.blocks)], ["over", time(event.seconds)]],
  configuration: (event) => [["said by", event.processes ? `${event.processes} of the replicas and ingresses` : null]],
  move: (event) => [
    ["state", event.state],
    ["blocks", event.blocks],
    ["bytes", event.bytes ? count(event.bytes) : null],
    ["peers", event.peers],
    ["saves", event.saves],
    ["took", time(event.seconds)],
    ...Object.entries(event.skipped_blocks ?? {}).map(([why, blocks]) => [`not moved, ${why.replaceAll("_", " ")}`, plural(blocks, "block")]),
  ],
  // The numbers behind a decision are the autoscaler's own; each is shown under its name.
  scale: (event) => Object.entries(event).filter(([name, value]) => !["type", "at_s", "why"].includes(name) && typeof value !== "object"),
};

function missed(event) {
  const more = event.best_cached_tokens - event.selected_cached_tokens;
  return more > 0 ? `Another replica held ${plural(more, "token")} more of it.` : "";
}

function pulled(event, cache) {
  if (!event.pull_from || !event.pull_tokens) return "";
  return `It was to copy the first ${plural(event.pull_tokens, "token")} from ${cache.names.replica(event.pull_from)}.`;
}

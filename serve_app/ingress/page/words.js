// Events in words: a line for the log, and heading, sentences and facts for whoever asks for more.

import { count, percent, plural, seconds } from "./dom.js";

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
const STATES = { joining: "joins", serving: "serves", leaving: "is leaving: it gets no new request" };
const WEIGHTY = new Set(["replica", "replica_left", "scale", "move", "reset"]);
const MARKED = new Set(["replica_left", "move", "reset"]);

/** Whether an event belongs among the marks of a recording: replicas came or went, or everything was forgotten. */
export const isMarked = (event) => MARKED.has(event.type) || (event.type === "scale" && event.from !== event.target);

export class Words {
  /** `cache`: the model whose replicas and prefixes are named. */
  constructor(cache) {
    this.cache = cache;
  }

  /** `{text, weighty}` for the log; null for an event that is none to read. */
  line(event) {
    const text = SAYS[event.type]?.(event, this.cache);
    return text ? { text, weighty: WEIGHTY.has(event.type) } : null;
  }

  heading(event) {
    return event.type === "decision" ? `Why replica ${event.replica}` : (this.line(event)?.text ?? event.type);
  }

  sentences(event) {
    if (event.type === "decision") return [REASONS[event.reason], missed(event), pulled(event)];
    return [event.why ?? EXPLAINS[event.type] ?? ""];
  }

  facts(event) {
    return (FACTS[event.type] ?? (() => []))(event, this.cache);
  }
}

const SAYS = {
  decision(event) {
    const share = event.prompt_tokens ? event.cached_tokens / event.prompt_tokens : 0;
    const whose = event.tenant && event.tenant !== "default" ? `${event.tenant}: ` : "";
    return `${whose}${plural(event.prompt_tokens, "token")} to ${event.replica}, ${share ? `${percent(share)} reused` : "cold"}`;
  },
  replica: (event) => `Replica ${event.replica} ${STATES[event.state] ?? event.state}`,
  replica_left: (event) => `Replica ${event.replica} is gone`,
  evictions: (event, cache) => `${event.replica} evicted ${plural(event.blocks * cache.blockSize, "token")} for newer ones`,
  pulls: (event) => `${event.replica} copied ${plural(event.tokens, "token")} from another replica in ${seconds(event.seconds)}`,
  move(event, cache) {
    const held = plural(event.blocks * cache.blockSize, "token");
    if (event.kind === "handover") return `${event.replica} handed ${held} over before it left`;
    return `${event.replica} joined warm, with ${held} of others`;
  },
  reset: (event) => `The caches were told to forget everything${event.complete ? "" : "; not all did"}`,
  scale: (event) => `The autoscaler goes from ${event.from} to ${plural(event.target, "replica")}`,
  skipped: (event) => `${plural(event.decisions, "decision")} more than can be shown`,
};

const EXPLAINS = {
  evictions: "The pool was full: what was used least gave room. Pinned prefixes are passed by.",
  pulls: "Copying the KV of a prefix costs less than computing it, where another replica holds it.",
  move: "A replica that joins takes over what will be asked of it; one that leaves hands on what others lack.",
  replica_left: "It ended, or it died; what it held is gone with it, unless it was handed over.",
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
  replica: (event) => [["state", event.state]],
  pulls: (event) => [["outcomes", Object.entries(event.pulls ?? {}).map(([outcome, times]) => `${times} ${outcome}`).join(", ")], ["tokens", tokens(event.tokens)]],
  evictions: (event) => [["blocks", count(event.blocks)], ["over", time(event.seconds)]],
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

function pulled(event) {
  return event.pull_from && event.pull_tokens ? `It was to copy the first ${plural(event.pull_tokens, "token")} from ${event.pull_from}.` : "";
}

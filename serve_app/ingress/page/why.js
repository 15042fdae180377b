// The panel with details and reasons: of a decision, a prefix, a replica or any other event. Text only.

import { ask, problemOf } from "./api.js";
import { byId, capital, count, make, percent, plural, seconds } from "./dom.js";

const STATES = {
  joining: "It is joining, and has not reported yet.",
  leaving: "It is leaving: it gets no new requests, and hands over prefixes that no other replica holds.",
  lost: "It was lost: it died, or its network failed. Its cache is gone.",
};
const HINT = "Select a bar, a replica or a line of a list to see its details.";

export class Why {
  constructor(cache, words) {
    this.cache = cache;
    this.words = words;
    this.asked = 0;
    this.cameFrom = null;
    byId("why").addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this.cameFrom?.isConnected) this.cameFrom.focus();
      else byId("replicas").focus();
    });
  }

  /** Show a heading, sentences and facts, and move the focus there. `rest`: nodes that follow. */
  show(heading, sentences, facts, ...rest) {
    this.asked += 1;
    if (!byId("why").contains(document.activeElement)) this.cameFrom = document.activeElement;
    const list = make("dl");
    for (const [name, value] of facts) {
      if (value !== null && value !== undefined && value !== "") list.append(make("dt", {}, name), make("dd", {}, String(value)));
    }
    byId("why-body").replaceChildren(make("h4", {}, heading), ...sentences.filter(Boolean).map((text) => make("p", {}, text)), list, ...rest);
    byId("why-body").scrollTop = 0;
    byId("why").focus({ preventScroll: false });
  }

  clear() {
    this.asked += 1;
    byId("why-body").replaceChildren(make("p", { className: "note" }, HINT));
  }

  event(event) {
    this.show(this.words.heading(event), this.words.sentences(event), this.words.facts(event));
  }

  /** `node`: the part of it that the replica holds. */
  prefix(replicaId, node) {
    const { cache } = this;
    const reach = node.start + node.tokens;
    const whole = cache.nodes.get(node.id);
    const part = node.tokens < whole.tokens ? `${count(node.tokens)} of the ${count(whole.tokens)}` : count(node.tokens);
    this.show(
      cache.nameOf(node),
      [
        `${capital(cache.names.replica(replicaId))} can reuse the first ${plural(reach, "token")} of every prompt that starts like this. It holds ${part} tokens of this part.`,
        node.pinned ? "It is pinned: it was saved, and will not be evicted." : null,
        node.kind === "public" ? "It is a registered public prompt, which all tenants share." : null,
      ],
      [
        ["tenant", node.kind === "public" ? "all (public)" : node.tenant],
        ["held by", Object.keys(node.holders).map((id) => cache.names.replica(id)).join(", ")],
        ["requests", count(node.requests)],
        ["cache hits", node.requests ? `${count(node.hits)} (${percent(node.hits / node.requests)})` : null],
        ["last used", `${seconds(Math.max(0, cache.nowS - node.last_used_at_s))} ago`],
        ["id", node.id],
      ],
    );
  }

  replica(replica) {
    const { blocks_total: blocks } = replica;
    const { cache } = this;
    const share = (part) => (blocks ? `${plural(part * cache.blockSize, "token")} (${percent(part / blocks)})` : null);
    const number = (value, word) => (value === undefined ? null : plural(value, word));
    this.show(
      capital(cache.names.replica(replica.replica)),
      [replica.full ? "It is full: it gets no new request until one ends." : null, STATES[replica.state]],
      [
        ["node", replica.node],
        ["GPU", replica.gpu],
        ["engine", replica.simulated ? "simulated: no model runs; times come from a cost model" : replica.engine],
        ["running", number(replica.running, "sequence")],
        ["waiting", number(replica.waiting, "sequence")],
        ["prefill queued", number(replica.queued_tokens, "token")],
        ["prefill rate", replica.prefill_tokens_per_s ? `${count(replica.prefill_tokens_per_s)} tokens/s${replica.simulated ? ", simulated" : ""}` : null],
        ["in use", share(replica.blocks_used)],
        ["cached", share(replica.blocks_reusable)],
        ["free", share(replica.blocks_free)],
        ["pinned", replica.blocks_pinned ? plural(replica.blocks_pinned * cache.blockSize, "token") : null],
        ...Object.entries(replica.tier_blocks ?? {}).map(([tier, held]) => [`in the ${tier} tier`, plural(held * cache.blockSize, "token")]),
        ["id", replica.replica],
      ],
    );
  }

  /** The reason for the replica of a request of this page. Keys with access also get an explanation of `body` as of now. */
  async request(body, decision) {
    if (decision) this.event(decision);
    else this.show("Why this replica", ["The page did not receive the decision: the map is not connected, or its key belongs to another tenant."], []);
    if (!this.cache.seesAll) return;
    const asked = this.asked;
    const question = { ...body };
    for (const field of ["stream", "stream_options"]) delete question[field];
    if (decision?.tenant) question.tenant = decision.tenant;
    let table;
    try {
      const response = await ask("v1/cache/explain", { which: "map", body: question });
      table = response.ok ? explained(await response.json(), this.cache) : make("p", { className: "note" }, await problemOf(response, "map"));
    } catch {
      return; // the panel already shows the decision
    }
    if (asked === this.asked) byId("why-body").append(table);
  }
}

function explained(document, cache) {
  const prompt = document.prompts[0];
  const because = prompt.winners[document.policy]?.because;
  const rows = prompt.replicas.slice(0, 32).map((replica, at) =>
    make("tr", { className: at ? "" : "first" }, ...[
      cache.names.replica(replica.replica_id),
      `${count(replica.cached_tokens)} of ${count(prompt.prompt_tokens)}`,
      count(replica.queued_prefill_tokens),
      seconds(replica.estimated_ttft_s),
    ].map((text) => make("td", {}, text))),
  );
  const head = make("tr", {}, ...["replica", "cached", "queued", "estimated TTFT"].map((text) => make("th", { scope: "col" }, text)));
  return make("div", {}, make("p", {}, `If it were sent again now: ${because ?? ""}`), make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

// The figures in the header: current ones, and the last 15 minutes from the server.

import { brief, byId, compact, count, drawn, make, number, percent } from "../dom.js";
import { isQuiet } from "../live/cache.js";
import { draw } from "./spark.js";

const BUCKET_S = 10;
const BUCKETS = 90;
const MAX_RATES = 8;

/** Show the figures of a model. */
export function drawVitals(cache) {
  const known = cache.replicas.size > 0 || cache.model !== "";
  const { cached, lately, reused } = cache.vitals();
  const capacity = [...cache.replicas.values()].reduce((sum, replica) => sum + (cache.capacityOf(replica) ?? 0), 0);
  const all = [...cache.replicas.values(), ...cache.lately()];
  const there = all.filter((replica) => replica.state !== "lost" && !isQuiet(replica)).length;
  const of = there < all.length ? ` of ${count(all.length)}` : "";
  set("replicas", known ? `${count(there)}${of}` : "–", all.length === 1 ? "replica" : "replicas");
  byId("vital-replicas").classList.toggle("wrong", there < all.length);
  set("cached", known ? `${compact(cached)}${capacity ? ` of ${compact(capacity)}` : ""}` : "–", "tokens cached");
  set("reused", reused === null ? "–" : percent(reused), `prompts reused${reused === null ? "" : lately ? ", last minute" : ", since the start"}`);
  const buckets = quarter(cache);
  const { requests, refused, failed, overS, sum } = cache.lastMinute();
  const rate = requests / overS;
  set("rate", cache.figures.size ? number(rate) : "–", "requests/s");
  curve("rate", buckets, [(row, overBucketS) => (row ? row.requests : 0) / overBucketS], (most) => `at most ${number(most)} per second`);
  const { ttft_p50_s: half, ttft_p95_s: most } = (requests && cache.minute) || {};
  set("ttft", half ? `${brief(half)} · ${brief(most)}` : "–", `TTFT p50 · p95${cache.simulated ? ", simulated" : ""}`);
  curve("ttft", buckets, [(row) => row?.ttft_p50_s ?? null, (row) => row?.ttft_p95_s ?? null], (longest) => `p95 at most ${brief(longest)}`);
  const counted = { errors: [failed, "failed"], refused: [refused, "refused"] }; // by faults, and by policy
  for (const [name, [total, field]] of Object.entries(counted)) {
    set(name, cache.figures.size ? count(total) : "–", `${name}, last minute`);
    byId(`vital-${name}`).classList.toggle("wrong", total > 0);
    byId(`spark-${name}`).classList.toggle("wrong", [...cache.figures.values()].some((row) => row[field]));
    curve(name, buckets, [(row) => row?.[field] ?? 0], (worst) => `at most ${count(worst)} in ${BUCKET_S} s`);
  }
  drawRates(cache, buckets, sum, overS);
}

/** Show counters as rates, each with its curve. The server names them and their labels. */
function drawRates(cache, buckets, sum, overS) {
  for (const old of document.querySelectorAll(".vital-more")) if (!(old.dataset.name in cache.rates)) old.remove();
  for (const [name, label] of Object.entries(cache.rates).slice(0, MAX_RATES)) {
    if (!byId(`vital-${name}`)) {
      const svg = drawn("svg", { class: "spark", id: `spark-${name}`, role: "img", preserveAspectRatio: "none" });
      const value = make("dd", {}, make("span", { id: `vital-${name}` }), " ", svg);
      byId("vitals").append(make("div", { className: "vital-more", "data-name": name }, make("dt", { id: `vital-${name}-label` }), value));
    }
    set(name, cache.figures.size ? number(sum(name) / overS) : "–", String(label));
    curve(name, buckets, [(row, overBucketS) => (row?.[name] ?? 0) / overBucketS], (most) => `at most ${number(most)} per second`);
  }
}

/** The rows of the last 15 minutes (undefined: no requests), each with its duration in seconds. */
function quarter(cache) {
  const last = Math.floor(cache.nowS / BUCKET_S) * BUCKET_S;
  return Array.from({ length: BUCKETS }, (_, at) => {
    const atS = last - (BUCKETS - 1 - at) * BUCKET_S;
    return [cache.figures.get(atS), atS === last ? Math.max(1, cache.nowS - last) : BUCKET_S];
  });
}

function curve(name, buckets, lines, says) {
  const values = lines.map((value) => buckets.map((bucket) => value(...bucket)));
  const key = JSON.stringify(values);
  const svg = byId(`spark-${name}`);
  if (drawnBefore.get(svg) === key) return;
  drawnBefore.set(svg, key);
  draw(svg, values, `The last 15 minutes: ${says(Math.max(0, ...values.at(-1).filter((value) => value !== null)))}`);
}

const drawnBefore = new WeakMap();

function set(name, value, label) {
  const [shown, told] = [byId(`vital-${name}`), byId(`vital-${name}-label`)];
  if (shown.textContent !== value) shown.textContent = value;
  if (told.textContent !== label) told.textContent = label;
}

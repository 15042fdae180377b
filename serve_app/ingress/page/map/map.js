// The map: one card per replica, with the replica's prefixes as a tree of bars. It draws only the cache model's data.

import { byId, capital, compact, count, make, percent, plural } from "../dom.js";
import { isQuiet } from "../live/cache.js";
import { layout, MAX_LEAVES, roundUp } from "./layout.js";
import { walk } from "./keys.js";

const ROW_PX = 30;
const MIN_TREE_PX = 96;
const MAX_TREE_PX = 230;
const DENSE_FROM = 9;
const DENSE_PX = 130;
const MANY_FROM = 25;
const MANY_PX = 66;
const LABEL_PX = 14;
const FADE_MS = 400;
const MIN_TOKENS = 128;
const LABEL_FROM = 0.2;
const DENSE_LABEL_FROM = 0.35;

export class CacheMap {
  /** `cache`: the model; `colours`: of tenants; `timeOf`: formats a time; `choose`: called with the selected `{replica, node}`. */
  constructor(cache, colours, timeOf, choose) {
    this.cache = cache;
    this.timeOf = timeOf;
    this.choose = choose;
    this.stale = false;
    this.colours = colours;
    this.cards = new Map();
    this.chosen = "";
    byId("replicas").addEventListener("keydown", (event) => walk(event));
    byId("replicas").addEventListener("click", (event) => this.chose(event.target));
    byId("colour").addEventListener("change", (event) => {
      this.colours.by = event.target.value;
      this.render();
    });
  }

  chose(target) {
    const bar = target.closest(".bar");
    const card = target.closest(".replica");
    if (!card || !(bar || target.closest(".replica-name"))) return;
    this.chosen = bar ? `${card.dataset.id} ${bar.dataset.id}` : "";
    for (const other of byId("replicas").querySelectorAll(".bar")) {
      other.setAttribute("aria-selected", String(other === bar));
    }
    this.choose({ replica: card.dataset.id, node: bar?.dataset.id ?? null });
  }

  /** `stale`: whether the data may be outdated. */
  render(stale = this.stale) {
    this.stale = stale;
    const replicas = [...this.cache.replicas.values(), ...this.cache.lately()];
    this.colours.learn(this.cache.groups().map(([group]) => group));
    const trees = new Map(replicas.map(({ replica }) => [replica, layout(this.cache.tree(replica), MAX_LEAVES)]));
    const dense = replicas.length >= DENSE_FROM;
    const scale = {
      dense,
      tokens: roundUp(Math.max(MIN_TOKENS, ...[...trees.values()].map((tree) => tree.tokens))),
      height: Math.min(MAX_TREE_PX, Math.max(MIN_TREE_PX, ROW_PX * Math.max(1, ...[...trees.values()].map((tree) => tree.leaves)))),
    };
    scale.shown = dense ? Math.min(replicas.length < MANY_FROM ? DENSE_PX : MANY_PX, scale.height) : scale.height;
    const grid = byId("replicas");
    grid.classList.toggle("dense", dense);
    grid.style.setProperty("--card", dense ? "9.5rem" : "12.5rem");
    grid.style.setProperty("--tree-height", `${scale.shown}px`);
    for (const replica of replicas) this.card(replica.replica).update(replica, trees.get(replica.replica), scale, this);
    for (const [id, card] of this.cards) {
      if (replicas.some(({ replica }) => replica === id)) continue;
      this.cards.delete(id);
      fadeOut(card.element, "gone");
    }
    byId("colour-by").textContent = this.cache.summary().tenants.size > 1 ? "Tenant" : "Prompt";
    byId("legend").replaceChildren(...this.colours.legend(this.cache.groups()));
    byId("pool-legend").hidden = replicas.every((replica) => replica.blocks_total === undefined);
  }

  card(id) {
    let card = this.cards.get(id);
    if (!card) {
      card = new Card(id, this.cache.names.replica(id));
      this.cards.set(id, card);
      byId("replicas").append(card.element);
    }
    return card;
  }

  /** Highlight a replica and one of its prefixes. */
  pulse(replicaId, nodeId) {
    const card = this.cards.get(replicaId);
    if (!card) return;
    restart(card.element, "chosen", 700);
    const bar = card.bars.get(nodeId);
    if (bar) restart(bar, "hit", 900);
  }

  elementOf(replicaId) {
    return this.cards.get(replicaId)?.element ?? null;
  }
}

class Card {
  constructor(id, name) {
    this.bars = new Map();
    this.name = make("button", { type: "button", className: "replica-name", title: name }, name);
    this.state = make("span", { className: "replica-state" });
    this.place = make("p", { className: "replica-place" });
    this.pool = make("div", { className: "pool", role: "img" }, ...["used", "cached", "free"].map((part) => make("span", { className: `pool-${part}` })));
    this.owners = make("div", { className: "owners", role: "img" });
    this.load = make("p", { className: "replica-load" }, make("span"), make("span"));
    this.tree = make("div", { className: "tree", role: "tree", "aria-label": `Prefixes of ${name}` });
    this.axis = make("p", { className: "axis", "aria-hidden": "true" }, make("span", {}, "prompt’s start"), make("span"), make("span"));
    const head = make("div", { className: "replica-head" }, this.name, this.state);
    const parts = [head, this.place, this.pool, this.owners, this.load, this.tree, this.axis];
    this.element = make("section", { className: "replica entering", "data-id": id, "aria-label": capital(name) }, ...parts);
  }

  update(replica, tree, scale, map) {
    this.element.classList.toggle("leaving", replica.state === "leaving" || replica.state === "joining");
    this.element.classList.toggle("lost", replica.state === "lost");
    this.state.textContent = stateOf(replica, map);
    this.place.textContent = [replica.node, replica.gpu && `GPU ${replica.gpu}`].filter(Boolean).join(" · ");
    this.place.hidden = !this.place.textContent;
    this.place.title = this.place.textContent;
    this.fill(replica, map.cache);
    this.own(replica, map);
    const waiting = replica.waiting ? `, ${count(replica.waiting)} waiting` : "";
    const left = tree.left ? `${plural(tree.left, "older path")} not shown` : "";
    this.load.children[1].textContent = replica.running === undefined ? left : `${count(replica.running)} running${waiting}${left && `; ${left}`}`;
    this.axis.children[1].textContent = compact(scale.tokens / 2);
    this.axis.children[2].textContent = `${compact(scale.tokens)} tokens`;
    this.draw(replica, tree, scale, map);
  }

  /** The pool, in tokens. */
  fill(replica, cache) {
    const { blocks_used: used, blocks_reusable: cached, blocks_free: free } = replica;
    const capacity = cache.capacityOf(replica);
    this.pool.hidden = capacity === null;
    this.load.hidden = replica.state === "lost";
    this.load.children[0].textContent = `${compact(cache.tokensOf(replica))}${capacity ? ` of ${compact(capacity)}` : ""} tokens cached`;
    if (capacity === null) return;
    [used, cached, free].forEach((blocks, part) => (this.pool.children[part].style.flexGrow = String(blocks)));
    const [inUse, reusable, empty] = [used, cached, free].map((blocks) => count(blocks * cache.blockSize));
    this.pool.title = `KV pool of ${count(capacity)} tokens: ${inUse} in use, ${reusable} cached, ${empty} free`;
    this.pool.setAttribute("aria-label", this.pool.title);
  }

  /** The pool by owner, on the scale of the whole pool. */
  own(replica, { cache, colours }) {
    const owners = Object.entries(replica.blocks_by_owner ?? {});
    this.owners.hidden = !owners.length || replica.state === "lost";
    if (this.owners.hidden) return;
    const held = owners.reduce((sum, [, blocks]) => sum + blocks, 0);
    while (this.owners.childElementCount > owners.length + 1) this.owners.lastChild.remove();
    while (this.owners.childElementCount < owners.length + 1) this.owners.append(make("span"));
    [...owners, [null, Math.max(0, replica.blocks_total - held)]].forEach(([owner, blocks], at) => {
      const part = this.owners.children[at];
      part.style.flexGrow = String(blocks);
      part.className = owner === null ? "pool-free" : "";
      if (owner !== null) colours.swatch(part, owner === "(public)" ? null : owner);
    });
    const says = owners.map(([owner, blocks]) => `${owner} ${percent(blocks / replica.blocks_total)}`).join(", ");
    this.owners.title = `Of the pool: ${says}`;
    this.owners.setAttribute("aria-label", this.owners.title);
  }

  draw(replica, tree, scale, map) {
    const rows = Math.max(tree.leaves, scale.height / ROW_PX);
    const gone = new Set(this.bars.keys());
    let focusable = null;
    for (const bar of tree.bars) {
      const { node } = bar;
      gone.delete(node.id);
      let element = this.bars.get(node.id);
      if (!element) {
        element = make("div", { className: "bar fresh", role: "treeitem", tabIndex: -1, "data-id": node.id }, make("span"));
        this.bars.set(node.id, element);
        this.tree.append(element);
      }
      place(element, bar, rows, scale);
      element.classList.toggle("pinned", node.pinned);
      map.colours.paint(element, map.cache.groupOf(node), map.cache.nowS - node.last_used_at_s);
      const name = map.cache.nameOf(node);
      const wide = node.tokens / scale.tokens > (scale.dense ? DENSE_LABEL_FROM : LABEL_FROM) && (bar.leaves / rows) * scale.shown > LABEL_PX;
      element.firstChild.textContent = wide ? map.cache.labelOf(node) : "";
      const says = `${name}, ${plural(node.tokens, "token")}${node.pinned ? ", pinned" : ""}`;
      if (element.getAttribute("aria-label") !== says) element.setAttribute("aria-label", says);
      element.title = `${says}; ${node.id}`;
      element.setAttribute("aria-level", String(bar.level));
      element.setAttribute("aria-selected", String(map.chosen === `${replica.replica} ${node.id}`));
      if (element.tabIndex === 0) focusable = element;
    }
    for (const id of gone) {
      const element = this.bars.get(id);
      this.bars.delete(id);
      if (element === document.activeElement) this.name.focus();
      fadeOut(element, "out");
    }
    if (!focusable && tree.bars.length) this.bars.get(tree.bars[0].node.id).tabIndex = 0;
  }
}

function stateOf(replica, { stale, timeOf }) {
  if (replica.state === "lost") return `lost ${timeOf(replica.lost_at_s)}`;
  if (stale) return `was ${replica.state}`;
  if (isQuiet(replica)) return "no reports";
  return replica.full ? "full" : replica.state;
}

function place(element, bar, rows, scale) {
  const { style } = element;
  style.left = `${(100 * bar.node.start) / scale.tokens}%`;
  style.width = `max(6px, calc(${(100 * bar.node.tokens) / scale.tokens}% - 1px))`;
  style.top = `${(100 * bar.first) / rows}%`;
  style.height = `max(2px, calc(${(100 * bar.leaves) / rows}% - ${rows > 30 ? 0.5 : 2}px))`;
}

function fadeOut(element, className) {
  element.classList.add(className);
  element.inert = true;
  element.setAttribute("aria-hidden", "true");
  setTimeout(() => element.remove(), FADE_MS);
}

const timers = new WeakMap();

function restart(element, className, forMs) {
  clearTimeout(timers.get(element));
  element.classList.remove("entering", "fresh", className);
  void element.offsetWidth; // restarts the animation
  element.classList.add(className);
  timers.set(element, setTimeout(() => element.classList.remove(className), forMs));
}

// The colour of a prefix: by tenant (by prompt if there is only one tenant), or by last use.

import { make } from "../dom.js";

const HUES = [250, 155, 320, 25, 195, 95, 285, 60];
const SLOTS = 2 * HUES.length; // plain, then striped
const PUBLIC_HUE = 75;
const AGES = [
  [10, "in the last 10 s"],
  [60, "in the last minute"],
  [600, "in the last 10 minutes"],
  [Infinity, "longer ago"],
];
const MAX_KEYS = 10;

export class Colours {
  constructor() {
    this.by = "tenant";
    this.slots = new Map();
    this.known = "";
    this.tenants = [];
    this.groups = [];
  }

  /** All tenants of the server, as far as they are told, beside those on the map. */
  learnTenants(names) {
    this.tenants = names;
    this.assign();
  }

  /** The groups on the map; null is public. */
  learn(groups) {
    this.groups = groups.filter((group) => group !== null);
    this.assign();
  }

  /**
   * Give each name the slot of its hash, or the next free one, in the order of hashes: the same names have the same colours
   * in every tab and after every load, in whatever order they come, and few names never share one.
   */
  assign() {
    const names = [...new Set([...this.tenants, ...this.groups])].sort();
    if (names.join("\n") === this.known) return;
    this.known = names.join("\n");
    this.slots = new Map();
    const taken = new Set();
    for (const [name, hash] of names.map((one) => [one, hashOf(one)]).sort((one, other) => one[1] - other[1])) {
      let slot = hash % HUES.length;
      for (let tries = 0; taken.has(slot) && taken.size < SLOTS && tries < SLOTS; tries += 1) slot = (slot + 1) % (taken.size < HUES.length ? HUES.length : SLOTS);
      taken.add(slot);
      this.slots.set(name, slot);
    }
  }

  /** Colour an element for a prefix. `group`: selects the colour; null for public. */
  paint(element, group, ageS) {
    const age = this.by === "age";
    element.classList.toggle("hue", !age);
    AGES.forEach((_, step) => element.classList.toggle(`age-${step}`, age && step === stepOf(ageS)));
    if (age) element.classList.remove("striped");
    else this.swatch(element, group);
  }

  /** Colour an element for a tenant or another group, whatever else is chosen. */
  swatch(element, group) {
    element.classList.add("hue");
    element.classList.toggle("striped", group !== null && this.slotOf(group) >= HUES.length);
    element.style.setProperty("--h", String(this.hue(group)));
  }

  slotOf(group) {
    return this.slots.get(group) ?? hashOf(group) % HUES.length;
  }

  hue(group) {
    return group === null ? PUBLIC_HUE : HUES[this.slotOf(group) % HUES.length];
  }

  /** The entries of the legend. `groups`: `[group, name]` of the prefixes shown. */
  legend(groups) {
    if (this.by === "age") {
      return [make("li", {}, "Last used:"), ...AGES.map(([, says], step) => entry(says, (swatch) => swatch.classList.add(`age-${step}`)))];
    }
    const shown = groups.slice(0, MAX_KEYS).map(([group, name]) =>
      entry(name, (swatch) => this.swatch(swatch, group)),
    );
    if (groups.length > MAX_KEYS) shown.push(make("li", {}, `and ${groups.length - MAX_KEYS} more`));
    return shown;
  }
}

const stepOf = (ageS) => AGES.findIndex(([limit]) => ageS < limit);

function entry(name, paint) {
  const swatch = make("span", { className: "swatch", "aria-hidden": "true" });
  paint(swatch);
  return make("li", {}, swatch, name);
}

/** FNV-1a, 32 bits, of a name's UTF-16 units. */
function hashOf(name) {
  let hash = 0x811c9dc5;
  for (let at = 0; at < name.length; at += 1) hash = Math.imul(hash ^ name.charCodeAt(at), 0x01000193) >>> 0;
  return (hash ^ (hash >>> 16)) >>> 0;
}

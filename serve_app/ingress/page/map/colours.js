// The colour of a prefix: by tenant (by prompt if there is only one tenant), or by last use.

import { make } from "../dom.js";

const HUES = [250, 155, 320, 25, 195, 95, 285, 60];
const PUBLIC_HUE = 75;
const AGES = [
  [10, "in the last 10 s"],
  [60, "in the last minute"],
  [600, "in the last 10 minutes"],
  [Infinity, "longer ago"],
];
const MAX_KEYS = 10;
const MAX_GROUPS = 2048; // more than the map ever shows: a page may stay open for weeks

export class Colours {
  constructor() {
    this.by = "tenant";
    this.order = new Map();
    this.next = 0;
  }

  /** Colour an element for a prefix. `group`: selects the colour; null for public. */
  paint(element, group, ageS) {
    const age = this.by === "age";
    element.classList.toggle("hue", !age);
    AGES.forEach((_, step) => element.classList.toggle(`age-${step}`, age && step === stepOf(ageS)));
    if (!age) element.style.setProperty("--h", String(this.hue(group)));
  }

  hue(group) {
    if (group === null) return PUBLIC_HUE;
    if (!this.order.has(group)) {
      this.order.set(group, this.next++);
      if (this.order.size > MAX_GROUPS) this.order.delete(this.order.keys().next().value);
    }
    return HUES[this.order.get(group) % HUES.length];
  }

  /** The entries of the legend. `groups`: `[group, name]` of the prefixes shown. */
  legend(groups) {
    if (this.by === "age") {
      return [make("li", {}, "Last used:"), ...AGES.map(([, says], step) => entry(says, (swatch) => swatch.classList.add(`age-${step}`)))];
    }
    const shown = groups.slice(0, MAX_KEYS).map(([group, name]) =>
      entry(name, (swatch) => {
        swatch.classList.add("hue");
        swatch.style.setProperty("--h", String(this.hue(group)));
      }),
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

// Curves between replicas show pulled KV. With reduced motion there are none.

import { drawn } from "../dom.js";

const STAYS_MS = 1600;
const MAX_ARCS = 24;
const NAME_PX = 22;

/** Draw a curve between two cards. Draws nothing if one is missing. */
export function arc(svg, from, to) {
  if (!from || !to || from === to || svg.childElementCount >= MAX_ARCS) return;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const box = svg.getBoundingClientRect();
  const [one, other] = [from, to].map((element) => {
    const { left, top, width } = element.getBoundingClientRect();
    return { x: left - box.left + width / 2, y: top - box.top + NAME_PX };
  });
  const lift = one.y === other.y ? -Math.max(40, Math.abs(one.x - other.x) * 0.2) : 0;
  const d = `M${one.x},${one.y} C${one.x},${one.y - lift} ${other.x},${other.y - lift} ${other.x},${other.y}`;
  const path = drawn("path", { d, pathLength: "1", class: "arc" });
  svg.append(path);
  setTimeout(() => path.remove(), STAYS_MS);
}

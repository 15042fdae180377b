// A small curve of the last 15 minutes.

import { drawn } from "../dom.js";

const WIDTH = 90;
const HEIGHT = 20;

/** Draw lines of values (null: a gap) on one scale into an `svg`. `says`: its description in words. */
export function draw(svg, lines, says) {
  const most = Math.max(...lines.flat().filter((value) => value !== null), 0) || 1;
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("aria-label", says);
  svg.replaceChildren(
    drawn("title", {}, says),
    drawn("path", { class: "spark-base", d: `M0,${HEIGHT - 0.5}H${WIDTH}` }),
    ...lines.map((values, at) => drawn("path", { class: `spark-${at}`, d: path(values, most) })),
  );
}

function path(values, most) {
  const step = WIDTH / values.length;
  let open = false;
  return values.map((value, at) => {
    if (value === null) {
      open = false;
      return "";
    }
    const y = (HEIGHT - 1.5 - (HEIGHT - 3) * (value / most)).toFixed(1);
    const from = (at * step).toFixed(1);
    const piece = `${open ? "L" : "M"}${from},${y}H${((at + 1) * step).toFixed(1)}`; // a single bucket is visible too
    open = true;
    return piece;
  }).join("");
}

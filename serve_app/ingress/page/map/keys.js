// Keys in the trees: up and down go through the bars, right and left follow a path, Enter shows details.

export function walk(event) {
  const bar = event.target.closest(".bar");
  if (!bar) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    bar.click();
    return;
  }
  const next = neighbour(bar, event.key);
  if (next === undefined) return;
  event.preventDefault();
  if (next) {
    bar.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

/** The bar that a key leads to; null at the end, undefined for a key without meaning here. */
function neighbour(bar, key) {
  const bars = inOrder(bar.parentElement);
  const at = bars.indexOf(bar);
  const level = levelOf(bar);
  switch (key) {
    case "ArrowDown":
      return bars[at + 1] ?? null;
    case "ArrowUp":
      return bars[at - 1] ?? null;
    case "ArrowRight":
      return bars[at + 1] && levelOf(bars[at + 1]) > level ? bars[at + 1] : null;
    case "ArrowLeft":
      return bars.slice(0, at).findLast((other) => levelOf(other) < level) ?? null;
    case "Home":
      return bars[0];
    case "End":
      return bars.at(-1);
    default:
      return undefined;
  }
}

const levelOf = (bar) => Number(bar.getAttribute("aria-level"));

/** The bars of a tree in reading order: from top to bottom, then from left to right. */
function inOrder(tree) {
  const bars = [...tree.querySelectorAll(".bar:not(.out)")];
  const top = new Map(bars.map((bar) => [bar, parseFloat(bar.style.top)]));
  return bars.sort((one, other) => top.get(one) - top.get(other) || levelOf(one) - levelOf(other));
}

// Positions of the bars in one replica's tree. Pure functions.

export const MAX_LEAVES = 64;

/**
 * Lay out a tree of prefixes: x and width are tokens, y and height are leaves.
 *
 * `nodes`: `{id, parent, start, tokens, last_used_at_s}`, in any order. Returns `{bars, leaves, tokens, left}`; `left`
 * counts the omitted leaves. The least recently used ones are omitted, so that a tree has at most `maxLeaves`.
 */
export function layout(nodes, maxLeaves = MAX_LEAVES) {
  const known = new Map(nodes.map((node) => [node.id, node]));
  const children = new Map();
  for (const node of nodes) {
    const under = known.has(node.parent) ? node.parent : null;
    if (!children.has(under)) children.set(under, []);
    children.get(under).push(node);
  }
  const ends = nodes.filter((node) => !children.has(node.id));
  const shown = new Set();
  for (const end of [...ends].sort((one, other) => other.last_used_at_s - one.last_used_at_s).slice(0, maxLeaves)) {
    for (let node = end; node && !shown.has(node.id); node = known.get(node.parent)) shown.add(node.id);
  }
  const bars = [];
  let tokens = 0;
  let leaves = 0;
  // Not recursive: a conversation can be thousands of parts long.
  const open = (children.get(null) ?? []).filter((node) => shown.has(node.id)).reverse().map((node) => ({ node, level: 1 }));
  while (open.length) {
    const { node, level } = open.pop();
    const bar = { node, level, first: leaves, leaves: 0 };
    bars.push(bar);
    tokens = Math.max(tokens, node.start + node.tokens);
    const below = (children.get(node.id) ?? []).filter((child) => shown.has(child.id));
    if (!below.length) leaves += 1;
    for (const child of below.reverse()) open.push({ node: child, level: level + 1 });
  }
  for (let at = bars.length - 1, end = leaves; at >= 0; at -= 1) {
    // In depth-first order, the deeper bars that follow a bar are its descendants.
    bars[at].leaves = Math.max(1, lastLeaf(bars, at, end) - bars[at].first);
  }
  return { bars, leaves, tokens, left: ends.length - ends.filter((end) => shown.has(end.id)).length };
}

function lastLeaf(bars, at, end) {
  for (let next = at + 1; next < bars.length; next += 1) {
    if (bars[next].level <= bars[at].level) return bars[next].first;
  }
  return end;
}

/** Round up to a short number, such as 1.5 or 2 times a power of ten: the end of an axis. */
export function roundUp(tokens) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, tokens)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((end) => end >= tokens) ?? tokens;
}

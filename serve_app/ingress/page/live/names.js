// Readable names: replicas by the id that metrics and /v1/cache/state have, too; prompts of this page by their first words, and others by kind and tenant.

const MAX_NAMES = 2048;
const MAX_SAID = 256;
const MAX_CHARACTERS = 44;
const KINDS = { public: "public prompt", system: "system prompt", conversation: "conversation" };

export class Names {
  constructor() {
    this.numbered = new Map();
    this.counts = new Map();
    this.said = new Map();
  }

  /** A copy that later names do not change. */
  copy() {
    return Object.assign(new Names(), structuredClone({ ...this }));
  }

  replica(id) {
    return `replica ${id}`;
  }

  /** Remember the text of a request of this page, because events have none. `id`: the deepest prefix of its prompt. */
  sent(id, system, question) {
    keep(this.said, id, { system: firstWords(system), question: firstWords(question) }, MAX_SAID);
  }

  /** The first words of prefixes by id, if this page sent them. */
  words(nodes) {
    const words = new Map();
    for (const [id, { system, question }] of this.said) {
      const node = nodes.get(id);
      const above = nodes.get(node?.parent);
      if (node?.kind === "conversation") words.set(id, question);
      const spoken = [node, above].find((one) => one?.kind === "system");
      if (spoken && system) words.set(spoken.id, system);
    }
    return words;
  }

  /** The name of a prefix with unknown text: its kind and tenant, with a number from the second one on. */
  node(node) {
    const tenant = node.tenant && node.tenant !== "default" ? ` of ${node.tenant}` : "";
    const number = this.numberOf(node);
    return `${KINDS[node.kind] ?? "prefix"}${number > 1 ? ` ${number}` : ""}${tenant}`;
  }

  numberOf({ id, kind, tenant }) {
    if (!this.numbered.has(id)) {
      const group = `${kind} ${tenant}`;
      const number = (this.counts.get(group) ?? 0) + 1;
      keep(this.counts, group, number, MAX_NAMES);
      keep(this.numbered, id, number, MAX_NAMES);
    }
    return this.numbered.get(id);
  }
}

/** Set an entry, and forget the oldest beyond `most`: a page may stay open for weeks. */
function keep(map, key, value, most) {
  map.set(key, value);
  if (map.size > most) map.delete(map.keys().next().value);
}

function firstWords(text) {
  const line = text.replace(/\s+/g, " ").trim();
  if (line.length <= MAX_CHARACTERS) return line && `“${line}”`;
  const cut = line.slice(0, MAX_CHARACTERS);
  return `“${cut.slice(0, Math.max(cut.lastIndexOf(" "), MAX_CHARACTERS / 2))} …”`;
}

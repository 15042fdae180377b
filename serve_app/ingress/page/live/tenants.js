// The table of tenants, and what is behind a row: its requests, refusals, misses and sessions. Asked for only while visible.

import { ask, problemOf } from "../api.js";
import { brief, byId, compact, count, make, money, number, percent, plural } from "../dom.js";
import { Detail } from "./tenant.js";

const EVERY_MS = 2000;
const AFTER_TROUBLE_MS = 10_000;
const FIND_FROM = 13;
const MOST_REFUSALS = 3;

const pair = (half, most) => (half === null ? "–" : `${brief(half)} · ${brief(most)}`);
const limits = ({ refused_by: by }) => (by[0] ? `${by[0].limit}${by.length > 1 ? " …" : ""}` : "");
const left = (budget) => (budget ? `${percent(budget.left / budget.limit)} of ${(budget.unit === "money" ? money : compact)(budget.limit)}` : "–");

/** Columns: `by`: the value to sort by; `says`: the text, with `more` on a wide screen; `bad`, `policy`: to look at; `wide`: only there, and `spare` only on a wider one. */
const COLUMNS = [
  { name: "requests/s", by: (row) => row.requests_per_s, says: (row) => number(row.requests_per_s) },
  { name: "tokens in/s", wide: true, spare: true, by: (row) => row.prompt_tokens_per_s, says: (row) => compact(row.prompt_tokens_per_s) },
  { name: "cached/s", wide: true, spare: true, by: (row) => row.cached_tokens_per_s, says: (row) => compact(row.cached_tokens_per_s) },
  { name: "out/s", wide: true, spare: true, by: (row) => row.output_tokens_per_s, says: (row) => compact(row.output_tokens_per_s) },
  { name: "hit rate", wide: true, by: (row) => row.hit_rate ?? -1, says: (row) => (row.hit_rate === null ? "–" : percent(row.hit_rate)) },
  { name: "TTFT p50 · p95", by: (row) => row.ttft_p95_s ?? -1, says: (row) => pair(row.ttft_p50_s, row.ttft_p95_s) },
  { name: "end to end p50 · p95", wide: true, spare: true, by: (row) => row.e2e_p95_s ?? -1, says: (row) => pair(row.e2e_p50_s, row.e2e_p95_s) },
  { name: "refused", by: (row) => row.refused, says: (row) => count(row.refused), more: limits, policy: (row) => row.refused > 0 },
  { name: "failed", wide: true, by: (row) => row.failed, says: (row) => count(row.failed), bad: (row) => row.failed > 0 },
  { name: "cache held of share", by: (row) => row.kv_tokens ?? -1, says: held, policy: (row) => row.kv_tokens > row.kv_share_tokens },
  { name: "budget left", wide: true, by: (row) => (row.budget ? -row.budget.left / row.budget.limit : -2), says: (row) => left(row.budget), policy: (row) => row.budget?.left <= 0.2 * row.budget?.limit },
  { name: "cost today", wide: true, optional: (row) => row.today, by: (row) => row.today?.cost ?? -1, says: (row) => (row.today ? money(row.today.cost) : "–") },
  { name: "saved today", wide: true, optional: (row) => row.today, by: (row) => row.today?.saved ?? -1, says: (row) => (row.today ? money(row.today.saved) : "–") },
];

const width = (column) => [column?.wide && "wide", column?.spare && "spare"].filter(Boolean).join(" ");

function held({ kv_tokens: kept, kv_share_tokens: share }) {
  if (kept === undefined) return "–";
  return share ? `${compact(kept)} of ${compact(share)}` : compact(kept);
}

export class Tenants {
  /** `colours`: of tenants; `words`, `timeOf`: for requests; `choose`: called with a selected request; `changed`: with new rows. */
  constructor(cache, colours, words, timeOf, choose, changed) {
    this.colours = colours;
    this.changed = changed;
    this.asked = 0;
    this.timer = 0;
    this.rows = [];
    this.lines = new Map();
    this.sort = null;
    this.off = false;
    this.detail = new Detail(cache, words, timeOf, choose);
    this.said = null;
    byId("tenants-window").addEventListener("change", () => this.look());
    byId("tenants-find").addEventListener("input", () => this.show());
    document.addEventListener("visibilitychange", () => this.look());
  }

  /** Refusals of the last minute by tenant and limit, or null: this server tells none. */
  get refusals() {
    return this.said?.refusals ?? null;
  }

  /** Clear the data of the previous key, and ask again. */
  clear() {
    this.rows = [];
    this.said = null;
    this.close();
    this.show();
    this.look();
  }

  /** Whether a recording is shown, which has no table. */
  pause(off) {
    if (off === this.off) return;
    this.off = off;
    byId("tenants").hidden = off || !this.rows.length;
    this.look();
  }

  /** Ask now, and repeatedly while the page is visible. */
  async look() {
    clearTimeout(this.timer);
    const asked = (this.asked += 1);
    if (this.off || document.hidden) return;
    let waitMs = EVERY_MS;
    let said = null;
    let note = "";
    try {
      const response = await ask(`v1/tenants/stats?window_s=${byId("tenants-window").value}`, { which: "map" });
      if (response.ok) said = await response.json();
      else if (this.rows.length) note = await problemOf(response, "map");
    } catch {
      note = "The server cannot be reached.";
    }
    if (asked !== this.asked) return; // another key, another span, or no longer visible
    if (said) {
      this.said = said;
      this.rows = said.data;
    } else {
      waitMs = AFTER_TROUBLE_MS;
      this.said = null;
    }
    byId("tenants-note").textContent = note;
    this.changed();
    this.show();
    this.detail.look();
    this.timer = setTimeout(() => this.look(), waitMs);
  }

  /** Open a tenant's row, or close it. */
  toggle(tenant) {
    if (this.detail.tenant === tenant) this.close();
    else this.open(tenant);
  }

  open(tenant) {
    const row = this.rows.find((one) => one.tenant === tenant);
    if (!row) return;
    byId("tenants-find").value = "";
    this.detail.open(row);
    this.show();
    this.lines.get(tenant).button.focus();
    this.lines.get(tenant).element.scrollIntoView({ block: "nearest" });
  }

  close() {
    this.detail.close();
    this.show();
  }

  show() {
    byId("tenants").hidden = this.off || !this.rows.length;
    const operator = this.said?.viewer !== "tenant";
    byId("tenants-title").textContent = operator ? "Tenants" : "Your use";
    byId("tenants-finder").hidden = this.rows.length < FIND_FROM;
    byId("tenants").classList.toggle("many", this.rows.length >= FIND_FROM);
    const columns = COLUMNS.filter(({ optional }) => !optional || this.rows.some(optional));
    this.head(columns);
    const wanted = byId("tenants-find").value.trim().toLowerCase();
    const rows = this.ordered().filter(({ tenant }) => !wanted || tenant.toLowerCase().includes(wanted));
    const gone = new Set(this.lines.keys());
    const elements = [];
    for (const row of rows) {
      gone.delete(row.tenant);
      let line = this.lines.get(row.tenant);
      if (!line) this.lines.set(row.tenant, (line = new Line(row.tenant, () => this.toggle(row.tenant))));
      line.update(row, columns, this.detail.tenant === row.tenant, this.colours);
      elements.push(line.element);
      if (this.detail.tenant === row.tenant) {
        this.detail.update(row, columns);
        elements.push(this.detail.element);
      }
    }
    for (const tenant of gone) this.lines.delete(tenant);
    place(byId("tenants-rows"), elements);
    byId("tenants-none").hidden = rows.length > 0;
  }

  ordered() {
    if (!this.sort) return this.rows;
    const { column, down } = this.sort;
    if (!column) return [...this.rows].sort((one, other) => (down ? -1 : 1) * one.tenant.localeCompare(other.tenant));
    return [...this.rows].sort((one, other) => (down ? 1 : -1) * (column.by(other) - column.by(one)));
  }

  head(columns) {
    const row = byId("tenants-head");
    const names = ["tenant", ...columns.map(({ name }) => name)].join();
    if (row.dataset.names !== names) {
      row.dataset.names = names;
      const cell = (name, column) => {
        const button = make("button", { type: "button", title: `Sort by ${name}` }, name);
        button.addEventListener("click", () => {
          const again = this.sort?.name === name;
          this.sort = { name, column, down: again ? !this.sort.down : Boolean(column) };
          this.show();
        });
        return make("th", { scope: "col", className: width(column), "data-name": name }, button);
      };
      row.replaceChildren(cell("tenant", null), ...columns.map((column) => cell(column.name, column)));
    }
    for (const th of row.children) {
      if (this.sort?.name === th.dataset.name) th.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
  }
}

class Line {
  constructor(tenant, toggle) {
    this.swatch = make("span", { className: "swatch", "aria-hidden": "true" });
    this.button = make("button", { type: "button", className: "tenant-name", "aria-expanded": "false", onclick: toggle }, this.swatch, make("span", {}, tenant));
    this.name = make("th", { scope: "row" }, this.button);
    this.element = make("tr", { "data-tenant": tenant }, this.name);
  }

  update(row, columns, open, colours) {
    colours.swatch(this.swatch, row.tenant);
    this.button.setAttribute("aria-expanded", String(open));
    this.element.classList.toggle("idle", !(row.requests || row.refused || row.failed));
    while (this.element.cells.length > columns.length + 1) this.element.lastChild.remove();
    while (this.element.cells.length < columns.length + 1) this.element.append(make("td"));
    columns.forEach((column, at) => {
      const cell = this.element.cells[at + 1];
      const more = column.more?.(row) ?? "";
      const text = column.says(row);
      if (cell.dataset.says !== text + more) cell.replaceChildren(text, more && make("span", { className: "wide spare" }, ` ${more}`));
      cell.dataset.says = text + more;
      cell.className = [width(column), column.bad?.(row) ? "bad" : "", column.policy?.(row) ? "policy" : ""].filter(Boolean).join(" ");
    });
  }
}

/** Put elements into a parent in this order, without taking any out that stays: the focus stays, too. */
function place(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((element, at) => {
    if (parent.children[at] !== element) parent.insertBefore(element, parent.children[at] ?? null);
  });
}

/** Alarms of refusals by policy: each names the tenant, the limit and the remedy. `open`: opens a tenant's row. */
export function refusalAlarms(rows, open) {
  const lines = rows.slice(0, MOST_REFUSALS).map(({ tenant, limit, requests, remedy }) => ({
    id: `refused ${tenant} ${limit}`,
    level: "policy",
    lead: { text: tenant, choose: () => open(tenant) },
    text: `: ${plural(requests, "request")} refused (429) in the last minute by ${limit}. ${remedy}`,
  }));
  const rest = rows.slice(MOST_REFUSALS);
  if (rest.length) {
    const more = rest.reduce((sum, { requests }) => sum + requests, 0);
    const tenants = new Set(rest.map(({ tenant }) => tenant)).size;
    lines.push({ id: "refused rest", level: "policy", text: `${plural(more, "more request")} of ${plural(tenants, "tenant")} refused (429); sort the table by “refused”.` });
  }
  return lines;
}

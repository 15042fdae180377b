// What is behind a tenant's row: why requests were refused or missed, the latest ones, and its sessions.

import { aboutModel, ask, problemOf } from "../api.js";
import { count, make, money, plural } from "../dom.js";
import { sessionRow } from "./sessions.js";

const MOST_SESSIONS = 50;

export class Detail {
  constructor(cache, words, timeOf, choose) {
    this.cache = cache;
    this.words = words;
    this.timeOf = timeOf;
    this.choose = choose;
    this.tenant = null;
    this.asked = 0;
    this.facts = make("dl");
    this.refused = new Part("Refused, by limit", "None in this time.");
    this.missed = new Part("Cache misses, by cause", "None in this time.");
    this.requests = new Part("Latest requests", "None since the server started.");
    this.sessions = new Part("Sessions", "None now.");
    const parts = [this.refused, this.missed, this.requests, this.sessions].map(({ element }) => element);
    this.parts = make("div", { className: "tenant-parts" }, ...parts, make("section", { className: "tenant-part" }, this.facts));
    this.cell = make("td", {}, this.parts);
    this.element = make("tr", { className: "tenant-detail" }, this.cell);
  }

  open(row) {
    this.tenant = row.tenant;
    for (const part of [this.requests, this.sessions]) part.clear();
    this.parts.setAttribute("aria-label", `Details of ${row.tenant}`);
    this.parts.setAttribute("role", "group");
    this.look();
  }

  close() {
    this.tenant = null;
    this.asked += 1;
  }

  /** Show what the row itself tells. */
  update(row, columns) {
    this.cell.colSpan = columns.length + 1;
    this.facts.replaceChildren(...facts(row, columns).flatMap(([name, value, className]) => [make("dt", { className }, name), make("dd", { className }, value)]));
    const cause = (lead, requests, more) => make("li", {}, make("b", {}, lead), ` ${plural(requests, "request")}${more ?? ""}`);
    this.refused.show(row.refused_by.map(({ place, limit, requests, remedy }) => cause(limit, requests, `, in the ${place}. ${remedy}`)));
    this.missed.show(row.missed_by.map(({ reason, requests, lost_tokens: lost, remedy }) => cause(reason.replaceAll("_", " "), requests, `${lost ? `, ${plural(lost, "token")} computed again` : ""}. ${remedy}`)));
  }

  /** Ask for the latest requests and the sessions of the open row. */
  async look() {
    const { tenant } = this;
    const asked = (this.asked += 1);
    if (tenant === null) return;
    const name = encodeURIComponent(tenant);
    const [requests, sessions] = await Promise.all([
      told(`v1/tenants/${name}/requests`, ({ data }) => data.map((event) => this.request(event))),
      told(aboutModel("v1/cache/sessions", { tenant }), (document) => this.table(document.sessions.filter((one) => one.tenant === tenant))),
    ]);
    if (asked !== this.asked) return; // another row
    this.requests.show(requests);
    this.sessions.show(sessions);
  }

  request(event) {
    const line = make("span", {}, this.words.line(event) ?? event.type);
    const button = make("button", { type: "button", onclick: () => this.choose(event) }, make("time", {}, this.timeOf(event.at_s)), line);
    return make("li", { className: event.type }, button);
  }

  table(sessions) {
    if (!sessions.length) return [];
    const head = make("tr", {}, ...["session", "state", "tokens", "turns", "replica"].map((text) => make("th", { scope: "col" }, text)));
    const rows = sessions.slice(0, MOST_SESSIONS).map((session) => sessionRow(session, this.cache.names, false));
    return [make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))];
  }
}

/** A list under a heading. New content replaces the old only if its text differs, so that a reader keeps the focus. */
class Part {
  constructor(title, none) {
    this.none = none;
    this.list = make("ul", { tabIndex: 0, "aria-label": title });
    this.element = make("section", { className: "tenant-part" }, make("h3", {}, title), this.list);
    this.clear();
  }

  clear() {
    this.known = null;
    this.list.replaceChildren(make("li", { className: "note" }, "…"));
  }

  show(items) {
    const known = items.map((item) => (typeof item === "string" ? item : item.textContent)).join("\n");
    if (known === this.known) return;
    this.known = known;
    const texts = items.map((item) => (typeof item === "string" ? make("li", { className: "note" }, item) : item.tagName === "TABLE" ? make("li", {}, item) : item));
    this.list.replaceChildren(...(texts.length ? texts : [make("li", { className: "note" }, this.none)]));
  }
}

function facts(row, columns) {
  const { budget } = row;
  const more = [
    ["requests", count(row.requests)],
    ["tokens in, cached, out", [row.prompt_tokens, row.cached_tokens, row.output_tokens].map(count).join(", ")],
  ];
  const amount = budget?.unit === "money" ? money : count;
  if (budget) more.push(["budget", `${amount(budget.used)} of ${amount(budget.limit)} ${budget.unit} used this ${budget.period}; it ends ${budget.ends_at.replace("T", " ").replace(":00Z", " UTC")}${budget.hard ? "" : "; nothing is refused then"}`]);
  return [...columns.filter(({ wide }) => wide).map((column) => [column.name, column.says(row), column.spare ? "narrow spared" : "narrow"]), ...more];
}

/** The items of an answer, or the sentence of a problem. */
async function told(path, items) {
  try {
    const response = await ask(path, { which: "map" });
    if (response.ok) return items(await response.json());
    return [response.status === 404 ? "This server does not tell." : await problemOf(response, "map")];
  } catch {
    return ["The server cannot be reached."];
  }
}

// Links to the API and the metrics. Where they need a key, which no link can send, the page asks itself and shows the answer.

import { ask, problemOf } from "../api.js";
import { byId, make } from "../dom.js";

const KEPT_MS = 60_000;
let open = [];

/** `links`: the paths that need no key. */
export const drawLinks = (links) => (open = links);

/** `show(heading, sentences, facts)`: shows text in the panel of details. */
export function wireLinks(show) {
  byId("link-docs").addEventListener("click", async (event) => {
    if (open.includes("docs")) return;
    event.preventDefault();
    const document = await asked("openapi.json", "The API", show);
    if (document) show("The API", [`${document.info.title} speaks OpenAI’s and Anthropic’s API; here are all paths.`], routes(document));
  });
  byId("link-metrics").addEventListener("click", async (event) => {
    if (open.includes("metrics")) return;
    event.preventDefault();
    const text = await asked("metrics", "Metrics", show);
    if (!text) return;
    const url = URL.createObjectURL(new Blob([text], { type: "text/plain;charset=utf-8" }));
    const link = make("a", { href: url, target: "_blank", rel: "noopener" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), KEPT_MS);
  });
}

/** The answer for the key of the map: JSON or text, or null after a problem, which is shown. */
async function asked(path, heading, show) {
  try {
    const response = await ask(path, { which: "map" });
    if (response.ok) return await (path.endsWith("json") ? response.json() : response.text());
    show(heading, [await problemOf(response, "map")], []);
  } catch {
    show(heading, ["The server cannot be reached."], []);
  }
  return null;
}

function routes({ paths }) {
  return Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, { summary, description }]) => [`${method.toUpperCase()} ${path}`, (description ?? summary ?? "").split("\n")[0]]),
  );
}

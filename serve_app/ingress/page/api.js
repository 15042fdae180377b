// Requests to this page's server, with the keys of this tab. Paths are relative, so that proxies work.

const NAMES = { chat: "warmpath.key", map: "warmpath.map-key" };
const held = { chat: "", map: "" };

for (const which of Object.keys(NAMES)) {
  try {
    held[which] = sessionStorage.getItem(NAMES[which]) ?? "";
  } catch {
    // Without storage, a key lives as long as the page.
  }
}

/** The key for `chat` or for the `map`. Without its own key, the map uses the chat's. */
export const keyOf = (which) => held[which] || (which === "map" ? held.chat : "");
export const ownKey = (which) => held[which];

export function setKey(which, key) {
  held[which] = key.trim();
  try {
    if (held[which]) sessionStorage.setItem(NAMES[which], held[which]);
    else sessionStorage.removeItem(NAMES[which]);
  } catch {
    // As above.
  }
}

let mapped = "";

/** Show the replicas of the model with this name, if the server has several. */
export const mapModel = (name) => (mapped = name);

/** The path of a report about the mapped model; before one is chosen, about the first. */
export function aboutModel(path, query = {}) {
  const asked = new URLSearchParams({ ...query, ...(mapped ? { model: mapped } : {}) }).toString();
  return asked ? `${path}?${asked}` : path;
}

/** Send a request. `which`: selects the key; `body`: sent as JSON. */
export function ask(path, { which = "chat", body, signal } = {}) {
  const headers = { accept: "application/json, text/event-stream" };
  if (keyOf(which)) headers.authorization = `Bearer ${keyOf(which)}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  return fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "same-origin",
    redirect: "error",
  });
}

const narrow = matchMedia("(max-width: 900px)");

/** The place to enter a missing key. */
export const askForKey = () => `Paste your API key ${narrow.matches ? "above, under “Model and keys”" : "on the left"}.`;

/** The message of an error response, as a sentence. `which`: selects the key of the request. */
export async function problemOf(response, which = "chat") {
  if (response.status === 401 && !keyOf(which)) return askForKey(); // the server's message is for programs
  try {
    const said = (await response.json()).error?.message;
    if (said) return inHere(String(said).slice(0, 600));
  } catch {
    // Not JSON: a proxy answered.
  }
  return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
}

/** A message about a key, without what programs do with it: a reader has a field for it. */
const inHere = (said) => said.replace(/[;,] send (?:it|a valid one|the key) as `Authorization: Bearer KEY`/, `. ${askForKey().slice(0, -1)}`);

const MAX_EVENT_CHARACTERS = 32 << 20;

/** Yield the data of each server-sent event of a response. Calls `heard` for any bytes. Throws on an event without an end. */
export async function* eventsOf(response, heard = () => undefined) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  let size = 0;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      if (size + rest.length > MAX_EVENT_CHARACTERS) throw new Error("The server sent an event without an end.");
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
          size = 0;
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
          size += line.length;
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

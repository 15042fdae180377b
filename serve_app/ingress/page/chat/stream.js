// One streamed answer of the API.

import { ask, eventsOf, problemOf } from "../api.js";

/**
 * Yield `{text, reasoning}` of a streamed chat. `told` has callbacks: `sent()`, `began(id)` for each chunk, `warning(text)`,
 * `used(usage)`, `ended(reason)`. Throws an Error with a sentence.
 */
export async function* streamed(body, signal, told) {
  told.sent();
  const response = await ask("v1/chat/completions", { body, signal });
  if (!response.ok) throw new Error(await problemOf(response));
  told.warning(response.headers.get("x-warmpath-warning"));
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    told.began(String(chunk.id).replace("chatcmpl-", ""));
    if (chunk.usage) told.used(chunk.usage);
    const choice = chunk.choices?.[0];
    if (choice?.finish_reason) told.ended(choice.finish_reason);
    const text = choice?.delta?.content ?? "";
    const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
    if (text || reasoning) yield { text, reasoning };
  }
  throw new Error("The answer ended too early.");
}

/** The number of tokens of a chat's prompt, or null if the server does not tell. */
export async function countTokens({ model, messages }, signal) {
  const system = messages.filter(({ role }) => role === "system").map(({ content }) => content).join("\n");
  const rest = messages.filter(({ role }) => role !== "system");
  try {
    const response = await ask("v1/messages/count_tokens", { body: { model, messages: rest, ...(system ? { system } : {}) }, signal });
    return response.ok ? ((await response.json()).input_tokens ?? null) : null;
  } catch {
    return null; // the caller has a guess
  }
}

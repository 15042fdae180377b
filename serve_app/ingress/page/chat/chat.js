// The conversation: what is asked, what streams back, and under each answer what of its prompt was reused.

import { ask, eventsOf, problemOf } from "../api.js";
import { byId, count, make } from "../dom.js";
import { Reuse } from "./reuse.js";

const MAX_TURNS = 200;
const FOLLOWS_PX = 60;

export class Chat {
  /** `cache`: what is known of the replicas; `explain`: shows why a request went where it went. */
  constructor(cache, explain) {
    this.cache = cache;
    this.explain = explain;
    this.messages = [];
    this.answers = new Map();
    this.running = null;
    this.measured = { tokensPerS: 0 };
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("say").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.querySelector(".chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.clear());
  }

  /** An event about a request of this page adds to what stands under its answer. */
  told(event) {
    if (event.type === "decision") this.answers.get(event.request.split(".")[0])?.told(event);
  }

  clear() {
    this.stop();
    this.messages = [];
    this.answers.clear();
    byId("turns").replaceChildren();
    byId("welcome").hidden = false;
    byId("say").focus();
  }

  stop() {
    this.running?.abort();
  }

  async send() {
    const text = byId("say").value.trim();
    if (!text || this.running) return;
    byId("welcome").hidden = true;
    byId("say").value = "";
    this.turn("user", text);
    this.messages.push({ role: "user", content: text });
    const system = byId("system").value.trim();
    const body = {
      model: byId("model").value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      max_tokens: Math.max(1, Number(byId("max-tokens").value) || 1),
      temperature: 0, // the same question has the same answer, from the cache or not
      stream: true,
      stream_options: { include_usage: true },
    };
    await this.answer(body);
  }

  async answer(body) {
    const { turn, said } = this.turn("assistant", "");
    const reuse = new Reuse(this.cache, this.measured, () => this.explain(body, reuse.decision));
    turn.classList.add("running");
    turn.setAttribute("aria-busy", "true");
    this.running = new AbortController();
    this.buttons();
    let text = "";
    try {
      for await (const piece of streamed(body, this.running.signal, reuse, (id) => this.remember(id, reuse))) {
        const follows = this.follows();
        text += piece;
        said.append(piece);
        if (follows) this.toEnd();
      }
      byId("spoken").textContent = `The answer: ${text.slice(0, 1000)}. ${reuse.sentence()}`;
    } catch (error) {
      if (this.running.signal.aborted) reuse.stopped();
      else this.failed(turn, error);
    } finally {
      this.running = null;
      turn.classList.remove("running");
      turn.removeAttribute("aria-busy");
      this.buttons();
    }
    // What was shown is what the model is told it said; of nothing nothing remains.
    if (text) this.messages.push({ role: "assistant", content: text });
    else this.messages.pop();
    const follows = this.follows();
    turn.append(reuse.element);
    if (follows) this.toEnd();
  }

  failed(turn, error) {
    turn.classList.add("failed");
    const message = error instanceof TypeError ? "The server cannot be reached." : error.message;
    turn.append(make("p", { className: "trouble", role: "alert" }, message));
  }

  turn(role, text) {
    const said = make("p", { className: "said" }, text);
    const who = make("span", { className: "unseen" }, role === "user" ? "You said: " : "The model answered: ");
    const turn = make("li", { className: `turn ${role}` }, who, said);
    byId("turns").append(turn);
    while (byId("turns").childElementCount > MAX_TURNS) byId("turns").firstElementChild.remove();
    this.toEnd();
    return { turn, said };
  }

  /** Events name a request by its answer's id; the decision of a fast one may have come before the answer. */
  remember(id, reuse) {
    this.answers.set(id, reuse);
    const seen = this.cache.decisions.find((decision) => decision.request.split(".")[0] === id);
    if (seen) reuse.told(seen);
    if (this.answers.size > MAX_TURNS) this.answers.delete(this.answers.keys().next().value);
  }

  follows() {
    const talk = byId("talk");
    return talk.scrollHeight - talk.scrollTop - talk.clientHeight < FOLLOWS_PX;
  }

  toEnd() {
    byId("talk").scrollTop = byId("talk").scrollHeight;
  }

  buttons() {
    const focused = document.activeElement;
    byId("send").hidden = Boolean(this.running);
    byId("stop").hidden = !this.running;
    if (focused === byId("stop") || focused === byId("send")) byId("say").focus();
  }
}

/** Yield the text of a streamed answer; `reuse` learns its times and usage, `named` its id. Throws what went wrong, as a sentence. */
async function* streamed(body, signal, reuse, named) {
  reuse.sent();
  const response = await ask("v1/chat/completions", { body, signal });
  if (!response.ok) throw new Error(await problemOf(response));
  reuse.warning(response.headers.get("x-warmpath-warning"));
  let ended = false;
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (reuse.began()) named(String(chunk.id).replace("chatcmpl-", ""));
    if (chunk.usage) reuse.used(chunk.usage);
    const text = chunk.choices?.[0]?.delta?.content;
    if (text) yield text;
  }
  if (!ended) throw new Error("The answer broke off.");
}

/** Say in the settings' headings what is chosen there. */
export function describeSystem(text) {
  byId("system-note").textContent = text ? `${count(text.length)} characters` : "none";
}


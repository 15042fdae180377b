// The conversation: questions, streamed answers, and the reused part of the prompt under each answer.

import { byId, count } from "../dom.js";
import { Reading } from "./reading.js";
import { Reuse } from "./reuse.js";
import { countTokens, streamed } from "./stream.js";
import { Turn } from "./turn.js";

const MAX_REQUESTS = 200;
const FOLLOWS_PX = 60;

export class Chat {
  /** `cache`: the model of the replicas; `explain`: shows the reason for a request's replica. */
  constructor(cache, explain) {
    this.cache = cache;
    this.explain = explain;
    this.messages = [];
    this.requests = new Map();
    this.running = null;
    this.last = null;
    this.measured = { tokensPerS: 0 };
    this.read = { system: "", tokens: 0 };
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

  /** Whether a decision is about a request of this page. */
  owns(event) {
    return event.type === "decision" && this.requests.has(answerOf(event));
  }

  /** Take a decision about a request of this page: it completes the line under the answer, and identifies the prompt's prefix. */
  told(event) {
    if (!this.owns(event)) return;
    const { reuse, system, question } = this.requests.get(answerOf(event));
    this.cache.sent(event, system, question);
    reuse.told(event);
  }

  clear() {
    this.stop();
    this.messages = [];
    this.requests.clear();
    this.last = null;
    this.read = { system: "", tokens: 0 };
    byId("turns").replaceChildren();
    byId("welcome").hidden = false;
    byId("say").focus();
  }

  stop() {
    this.running?.abort();
  }

  body(system) {
    return {
      model: byId("model").value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      max_tokens: Math.max(1, Number(byId("max-tokens").value) || 1),
      temperature: 0, // the same question gets the same answer, with or without the cache
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  async send() {
    const text = byId("say").value.trim();
    if (!text || this.running) return;
    byId("welcome").hidden = true;
    byId("say").value = "";
    this.last?.close();
    new Turn("user", text);
    this.messages.push({ role: "user", content: text });
    const system = byId("system").value.trim();
    const turn = (this.last = new Turn("assistant", ""));
    this.toEnd();
    await this.answer(turn, this.body(system), system);
    if (turn !== this.last) return; // a new conversation
    // The model gets the text that was shown as its own answer. An empty answer removes the question.
    if (turn.text) this.messages.push({ role: "assistant", content: turn.text });
    else this.messages.pop();
  }

  /** Continue the last answer, which was cut off. */
  async goOn(system) {
    const turn = this.last;
    if (this.running || this.messages.at(-1)?.role !== "assistant") return;
    turn.uncut();
    await this.answer(turn, { ...this.body(system), continue_final_message: true, add_generation_prompt: false }, system);
    if (turn === this.last) this.messages.at(-1).content = turn.text;
  }

  async answer(turn, body, system) {
    const reuse = new Reuse(this.cache, this.measured, () => this.explain(body, reuse.decision));
    const reading = this.reading(body, system);
    let cut = false;
    let failed = false;
    const told = {
      sent: () => reuse.sent(),
      warning: (text) => reuse.warning(text),
      began: (id) => reuse.began() && this.remember(id, reuse, system),
      used: (usage) => {
        reuse.used(usage);
        turn.tokens += usage.completion_tokens ?? body.max_tokens;
        this.read = { system, tokens: (usage.prompt_tokens ?? 0) + (usage.completion_tokens ?? 0) };
      },
      ended: (reason) => (cut = reason === "length"),
    };
    turn.running(true);
    turn.element.append(reading.element);
    const running = (this.running = new AbortController());
    this.buttons();
    try {
      for await (const piece of streamed(body, running.signal, told)) {
        reading.end();
        const follows = this.follows();
        turn.add(piece);
        if (follows) this.toEnd();
      }
      byId("spoken").textContent = `The answer: ${turn.text.slice(0, 1000)}. ${reuse.sentence()}${cut ? " It was cut off." : ""}`;
    } catch (error) {
      if (running.signal.aborted) reuse.stopped();
      else failed = turn.failed(error instanceof TypeError ? "The server cannot be reached." : error.message);
    } finally {
      reading.end();
      turn.thought();
      turn.running(false);
      this.running = null;
      this.buttons();
    }
    const follows = this.follows();
    if (cut) turn.cut(turn.tokens || body.max_tokens, () => this.goOn(system));
    turn.under(reuse.element);
    if (follows || failed) this.toEnd(); // what failed is seen, wherever one was reading
  }

  reading(body, system) {
    const rates = [...this.cache.replicas.values()].map((replica) => replica.prefill_tokens_per_s ?? 0);
    return new Reading({
      characters: body.messages.reduce((sum, { content }) => sum + content.length, 0),
      known: this.read.system === system ? this.read.tokens : 0,
      rate: this.measured.tokensPerS || Math.max(0, ...rates),
      ask: () => countTokens(body, this.running?.signal),
      say: (text) => (byId("spoken").textContent = text),
    });
  }

  /** Remember a request by its answer's id, which events contain. A fast request's decision may arrive before its answer. */
  remember(id, reuse, system) {
    this.requests.set(id, { reuse, system, question: this.messages[0]?.content ?? "" });
    const seen = this.cache.decisions.find((decision) => answerOf(decision) === id);
    if (seen) this.told(seen);
    if (this.requests.size > MAX_REQUESTS) this.requests.delete(this.requests.keys().next().value);
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

/** The id of a decision's answer. Events have one id per choice. */
const answerOf = (decision) => String(decision.request).split(".")[0];

/** Show the length of the system prompt in its heading. */
export function describeSystem(text) {
  byId("system-note").textContent = text ? `${count(text.length)} characters` : "none";
}

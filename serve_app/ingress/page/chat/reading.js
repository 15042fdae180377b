// The placeholder of an answer while its prompt is read: the number of tokens, and the estimated progress.

import { count, make } from "../dom.js";

const SHOWN_AFTER_MS = 400;
const LOOK_EVERY_MS = 200;
const FEW_TOKENS = 64;
const CHARACTERS_A_TOKEN = 4;
/** The limit of the estimated progress. The rate comes from another prompt, so the bar is never full. */
const MOST = 0.95;

export class Reading {
  /**
   * `known`: tokens of the prompt that were read before; `rate`: tokens per second, or 0 if unknown; `ask`: returns the
   * number of tokens; `say`: called once with the sentence.
   */
  constructor({ characters, known, rate, ask, say }) {
    this.known = known;
    this.rate = rate;
    this.say = say;
    this.tokens = Math.round(characters / CHARACTERS_A_TOKEN);
    this.guessed = true;
    this.words = make("span");
    this.bar = make("progress", { max: 1, value: 0, "aria-label": "Estimated progress of reading the prompt" });
    this.element = make("p", { className: "reading", hidden: true }, this.words, this.bar);
    this.startMs = performance.now();
    this.begin = setTimeout(() => this.show(ask), SHOWN_AFTER_MS);
  }

  async show(ask) {
    this.element.hidden = false;
    this.draw();
    this.timer = setInterval(() => this.draw(), LOOK_EVERY_MS);
    const counted = await ask();
    if (counted !== null) [this.tokens, this.guessed] = [counted, false];
    if (!this.element.isConnected) return;
    this.draw();
    this.say(this.words.textContent);
  }

  draw() {
    const left = Math.max(0, this.tokens - this.known);
    const few = left < FEW_TOKENS;
    const text = few ? "waiting for the first token" : `reading ${this.guessed ? "about " : ""}${count(left)} tokens`;
    if (this.words.textContent !== text) this.words.textContent = text;
    this.bar.hidden = few || !this.rate;
    this.bar.value = Math.min(MOST, ((performance.now() - this.startMs) / 1000) * (this.rate / Math.max(1, left)));
  }

  end() {
    clearTimeout(this.begin);
    clearInterval(this.timer);
    this.element.remove();
  }
}

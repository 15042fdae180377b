// One turn of the conversation: its text, the model's reasoning before it, and a mark if it was cut off.

import { byId, make, plural, seconds } from "../dom.js";

const MAX_TURNS = 200;

export class Turn {
  constructor(role, text) {
    this.text = text;
    this.tokens = 0;
    this.said = make("p", { className: "said" }, text);
    const speaker = make("span", { className: "unseen" }, role === "user" ? "You said: " : "The model answered: ");
    this.element = make("li", { className: `turn ${role}` }, speaker, this.said);
    byId("turns").append(this.element);
    while (byId("turns").childElementCount > MAX_TURNS) byId("turns").firstElementChild.remove();
  }

  running(on) {
    this.element.classList.toggle("running", on);
    if (on) this.element.setAttribute("aria-busy", "true");
    else this.element.removeAttribute("aria-busy");
  }

  add({ text, reasoning }) {
    if (reasoning) this.think(reasoning);
    if (!text) return;
    this.text += text;
    this.said.append(text);
    this.thought();
  }

  think(text) {
    if (!this.thoughts) {
      this.thinkingMs = performance.now();
      this.summary = make("summary", {}, "reasoning");
      this.thoughts = make("p");
      this.details = make("details", { className: "reasoning", open: true }, this.summary, this.thoughts);
      this.said.before(this.details);
    }
    this.thoughts.append(text);
  }

  /** End the reasoning, because the answer starts or the stream ended. Fold it if there is an answer. */
  thought() {
    if (!this.thoughts || this.thinkingMs === null) return;
    this.summary.textContent = `reasoned for ${seconds((performance.now() - this.thinkingMs) / 1000)}`;
    this.details.open = !this.text;
    this.thinkingMs = null;
  }

  /** Mark the turn as cut off at its token limit. `go`: continues it. */
  cut(tokens, go) {
    const button = this.text ? make("button", { type: "button", onclick: go }, "Continue") : null;
    this.mark = make("p", { className: "cut" }, `cut off at ${plural(tokens, "token")}${this.text ? "" : ", during the reasoning"}`, button);
    this.element.append(this.mark);
  }

  /** Remove the mark, because the answer continues. */
  uncut() {
    this.mark?.remove();
  }

  /** Remove the button, because another turn follows. */
  close() {
    this.mark?.querySelector("button")?.remove();
  }

  /** Show why there is no answer; return true. */
  failed(message) {
    this.element.classList.add("failed");
    this.element.append(make("p", { className: "trouble", role: "alert" }, message));
    return true;
  }

  /** Replace the element under the turn. */
  under(element) {
    this.below?.remove();
    this.below = element;
    this.element.append(element);
  }
}

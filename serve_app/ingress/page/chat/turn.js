// What one side said, on the page: text, what the model thought before it, and where it was cut.

import { byId, make, plural, seconds } from "../dom.js";

const MAX_TURNS = 200;

export class Turn {
  constructor(role, text) {
    this.text = text;
    this.tokens = 0;
    this.said = make("p", { className: "said" }, text);
    const who = make("span", { className: "unseen" }, role === "user" ? "You said: " : "The model answered: ");
    this.element = make("li", { className: `turn ${role}` }, who, this.said);
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

  /** The answer itself begins, or nothing more comes: what led to it is folded, for whoever wants to read it. */
  thought() {
    if (!this.thoughts || this.thinkingMs === null) return;
    this.summary.textContent = `reasoned for ${seconds((performance.now() - this.thinkingMs) / 1000)}`;
    this.details.open = !this.text;
    this.thinkingMs = null;
  }

  /** It ended at its limit of tokens; `go`: to have it continued. */
  cut(tokens, go) {
    const button = this.text ? make("button", { type: "button", onclick: go }, "Continue") : null;
    this.mark = make("p", { className: "cut" }, `cut at ${plural(tokens, "token")}${this.text ? "" : ", while it reasoned"}`, button);
    this.element.append(this.mark);
  }

  /** It goes on: the mark is no longer true. */
  uncut() {
    this.mark?.remove();
  }

  /** Another turn followed: it can be continued no more. */
  close() {
    this.mark?.querySelector("button")?.remove();
  }

  failed(message) {
    this.element.classList.add("failed");
    this.element.append(make("p", { className: "trouble", role: "alert" }, message));
  }

  /** What stands under it, in the place of what stood there. */
  under(element) {
    this.below?.remove();
    this.below = element;
    this.element.append(element);
  }
}

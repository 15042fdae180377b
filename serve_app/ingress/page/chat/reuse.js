// The lines under an answer: the reused part of its prompt, its replica, and the time saved.

import { count, make, percent, seconds } from "../dom.js";

const ENOUGH_TOKENS = 256;

export class Reuse {
  /** `measured`: the speed of cold prompts, shared by all answers; `why`: called to show the reason for the replica. */
  constructor(cache, measured, why) {
    this.cache = cache;
    this.measured = measured;
    this.why = why;
    this.element = make("div", { className: "reuse" });
    this.ttftS = null;
    this.usage = null;
    this.decision = null;
    this.note = "";
    this.wasStopped = false;
  }

  sent() {
    this.sentMs = performance.now();
  }

  /** Record the first part of the answer. Returns whether this was the first call. */
  began() {
    if (this.ttftS !== null) return false;
    this.ttftS = (performance.now() - this.sentMs) / 1000;
    return true;
  }

  warning(text) {
    this.note = text ?? "";
  }

  used(usage) {
    this.usage = usage;
    const computed = this.prompt - this.cached;
    if (computed >= ENOUGH_TOKENS) this.measured.tokensPerS = computed / this.ttftS;
    this.show();
  }

  stopped() {
    this.wasStopped = true;
    this.show();
  }

  /** Take the decision about this request from the event stream. */
  told(decision) {
    this.decision = decision;
    this.show();
  }

  get cached() {
    return this.usage?.prompt_tokens_details?.cached_tokens ?? this.decision?.cached_tokens ?? null;
  }

  get prompt() {
    return this.usage?.prompt_tokens ?? this.decision?.prompt_tokens ?? null;
  }

  sentence() {
    if (this.prompt === null || this.cached === null) return "";
    return `${count(this.cached)} of ${count(this.prompt)} prompt tokens were reused.`;
  }

  /** Estimated seconds to the first token without a cache: by the server, or from this page's cold answers. */
  cold() {
    const { decision, ttftS, cached } = this;
    if (ttftS === null || !cached) return null;
    if (decision?.cold_ttft_s > 0) return ttftS + decision.cold_ttft_s - decision.ttft_s;
    return this.measured.tokensPerS ? ttftS + cached / this.measured.tokensPerS : null;
  }

  show() {
    const parts = [];
    const { prompt, cached } = this;
    if (prompt !== null && cached !== null) {
      parts.push(reuseBar(cached, prompt));
      parts.push(
        make("p", { className: "reused" }, make("b", {}, percent(prompt ? cached / prompt : 0)), " reused: ",
          `${count(cached)} of ${count(prompt)} prompt tokens`),
      );
    }
    parts.push(this.times());
    if (this.note) parts.push(make("p", {}, this.note));
    this.element.replaceChildren(...parts.filter(Boolean));
  }

  times() {
    const line = make("p", {});
    if (this.ttftS !== null) {
      line.append("First token after ", make("b", {}, seconds(this.ttftS)));
      const cold = this.cold();
      if (cold !== null) line.append(`, without a cache about ${seconds(cold)} (estimated)`);
      else if (this.cached === 0) line.append(", cold");
      line.append(this.cache.simulated ? "; simulated" : "");
    }
    if (this.decision || this.usage) {
      const name = this.decision ? this.cache.names.replica(this.decision.replica) : "why";
      line.append(line.childNodes.length ? " · " : "");
      line.append(make("button", { type: "button", onclick: this.why, title: `Why this replica? ${this.decision?.replica ?? ""}` }, name));
    }
    if (this.wasStopped) line.append(line.childNodes.length ? " · " : "", "stopped");
    return line.childNodes.length ? line : null;
  }
}

function reuseBar(cached, prompt) {
  const says = `${count(cached)} of ${count(prompt)} prompt tokens reused`;
  const bar = make("div", { className: "reuse-bar", role: "img", "aria-label": says });
  for (const [name, tokens] of [["reuse-warm", cached], ["reuse-cold", prompt - cached]]) {
    const part = make("span", { className: name });
    part.style.flex = `${Math.max(0, tokens)} 0 0`;
    bar.append(part);
  }
  return bar;
}

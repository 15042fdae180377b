// Playback of a recording: play, pause, speed, and a scrub bar that also works by keyboard.

import { byId, clock } from "../dom.js";

const BAR_PX = 3;

export class Player {
  /** `moved(atS, played)`: called when the time shown changes. `played`: by playback, not by a jump. */
  constructor(moved) {
    this.moved = moved;
    this.recording = null;
    this.atS = 0;
    this.playing = false;
    this.lastMs = 0;
    byId("play").addEventListener("click", () => this.toggle());
    byId("scrub").addEventListener("input", () => this.seek(Number(byId("scrub").value)));
    byId("scrub").addEventListener("keydown", (event) => {
      if (event.key !== " ") return;
      event.preventDefault();
      this.toggle();
    });
    addEventListener("resize", () => this.drawDensity());
    new MutationObserver(() => this.drawDensity()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  open(recording, isMarked) {
    this.recording = recording;
    this.isMarked = isMarked;
    byId("player").hidden = false;
    byId("scrub").max = String(recording.lengthS);
    this.drawDensity();
    this.pause();
    this.seek(0);
  }

  close() {
    this.pause();
    this.recording = null;
    byId("player").hidden = true;
  }

  toggle() {
    if (this.playing) {
      this.pause();
      return;
    }
    if (this.atS >= this.recording.lengthS) this.seek(0);
    this.playing = true;
    byId("play").textContent = "Pause";
    this.lastMs = performance.now();
    requestAnimationFrame((nowMs) => this.frame(nowMs));
  }

  pause() {
    this.playing = false;
    byId("play").textContent = "Play";
  }

  frame(nowMs) {
    if (!this.playing) return;
    const passedS = (Math.max(0, nowMs - this.lastMs) / 1000) * Number(byId("speed").value);
    this.lastMs = nowMs;
    this.seek(this.atS + passedS, true);
    if (this.atS >= this.recording.lengthS) this.pause();
    else requestAnimationFrame((next) => this.frame(next));
  }

  seek(atS, played = false) {
    this.atS = Math.min(this.recording.lengthS, Math.max(0, atS));
    const says = `${clock(this.atS)} of ${clock(this.recording.lengthS)}`;
    byId("scrub").value = String(this.atS);
    byId("scrub").setAttribute("aria-valuetext", says);
    byId("clock").textContent = `${clock(this.atS)} / ${clock(this.recording.lengthS)}`;
    this.moved(this.atS, played);
  }

  drawDensity() {
    if (!this.recording) return;
    const canvas = byId("density");
    const { clientWidth: width, clientHeight: height } = canvas;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const slices = Math.max(1, Math.floor(width / BAR_PX));
    const { counted, marked } = this.recording.density(slices, this.isMarked);
    const most = Math.max(1, ...counted);
    const style = getComputedStyle(document.documentElement);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    counted.forEach((events, slice) => {
      const tall = events ? 2 + (height - 8) * Math.sqrt(events / most) : 0;
      context.fillStyle = style.getPropertyValue(marked.has(slice) ? "--warm-fill" : "--cold-fill");
      context.fillRect(slice * BAR_PX, height - tall, BAR_PX - 1, tall);
    });
  }
}

// Makes elements. Their content is always text: nothing from the server is parsed as HTML.

const byId = (id) => document.getElementById(id);
export { byId };

/** Make an element: `properties` are set on it, `data-`, `aria-` and `role` as attributes; `children` are nodes or text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** Make an element of a drawing. */
export function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const counts = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (number) => counts.format(number);
export const compact = (number) => short.format(number);
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Money, down to what a token costs. */
export const money = (value) => value.toLocaleString("en", value && Math.abs(value) < 1 ? { maximumSignificantDigits: 2 } : { maximumFractionDigits: value < 10 ? 4 : 2 });

/** A rate: few digits. */
export const number = (value) => (value < 10 ? value.toFixed(value && value < 1 ? 2 : 1) : count(value));
/** A short duration. */
export const brief = (value) => (value < 10 ? seconds(value) : `${count(value)} s`);

/** A readable duration. */
export function seconds(value) {
  if (value < 0.9995) return `${Math.round(1000 * value)} ms`;
  return value < 60 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** Minutes and seconds of a recording. */
export function clock(value) {
  const whole = Math.max(0, Math.floor(value));
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

/** Announce items to screen readers, at most once per `everyMs`. `summary` joins the items since the last announcement. */
export function announcer(element, everyMs, summary) {
  let waiting = [];
  let timer = 0;
  let last = -Infinity;
  const flush = () => {
    timer = 0;
    last = performance.now();
    element.textContent = summary(waiting);
    waiting = [];
  };
  return (item) => {
    waiting.push(item);
    if (!timer) timer = setTimeout(flush, Math.max(0, last + everyMs - performance.now()));
  };
}

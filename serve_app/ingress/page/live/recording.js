// A recorded file: one event of the stream per line. It is read with limits, and can be played from any time.

const MAX_BYTES = 64 << 20;
const MAX_EVENTS = 400_000;
const CHECKPOINTS = 60;

/** Read a recording, and check it by applying it to `model`. Throws an Error with a sentence for the user. */
export async function readRecording(file, model) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is ${Math.round(file.size / 2 ** 20)} MiB; the limit is ${MAX_BYTES >> 20} MiB.`);
  const lines = (await file.text()).split("\n");
  const events = [];
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at].trim();
    if (!line) continue;
    const event = parsed(line, model);
    // A killed recorder may leave an incomplete last line.
    if (event === null && at >= lines.length - 1 && events.length) break;
    if (event === null) throw new Error(`Line ${at + 1} of ${file.name} is not an event: each line must be a JSON object with "type" and "at_s".`);
    events.push(event);
    if (events.length > MAX_EVENTS) throw new Error(`${file.name} has more than ${MAX_EVENTS} events; record a shorter run.`);
  }
  if (!events.some((event) => event.type === "snapshot")) throw new Error(`${file.name} has no snapshot, so the contents of the caches are unknown.`);
  events.sort((one, other) => one.at_s - other.at_s);
  return events;
}

function parsed(line, model) {
  try {
    const event = JSON.parse(line);
    if (typeof event.type !== "string" || !Number.isFinite(event.at_s)) return null;
    model.apply(event);
    return event;
  } catch {
    return null;
  }
}

export class Recording {
  /** `events`: in order of time; `begin`: makes an empty cache model with `apply` and `copy`. */
  constructor(events, begin) {
    this.events = events;
    this.startS = events[0].at_s;
    this.lengthS = Math.max(0.001, events.at(-1).at_s - this.startS);
    this.checkpoints = [];
    this.every = Math.max(200, Math.ceil(events.length / CHECKPOINTS));
    this.model = begin();
    this.begin = begin;
    this.next = 0;
  }

  /** Go to a time, in seconds from the start. Calls `happened` for each event to list on the way. */
  to(atS, happened = () => undefined) {
    if (this.next > 0 && this.events[this.next - 1].at_s - this.startS > atS) this.back(atS);
    while (this.next < this.events.length && this.events[this.next].at_s - this.startS <= atS) {
      if (this.next % this.every === 0 && !this.checkpoints[this.next / this.every]) {
        this.checkpoints[this.next / this.every] = this.model.copy();
      }
      const event = this.events[this.next];
      this.next += 1;
      this.model.apply(event).forEach(happened);
    }
    this.model.nowS = this.startS + atS;
  }

  back(atS) {
    const wanted = this.events.findIndex((event) => event.at_s - this.startS > atS);
    let checkpoint = Math.floor(Math.max(0, wanted) / this.every);
    while (checkpoint > 0 && !this.checkpoints[checkpoint]) checkpoint -= 1;
    this.model = this.checkpoints[checkpoint]?.copy() ?? this.begin();
    this.next = checkpoint * this.every;
  }

  /** The number of events by slice of time, and the slices with marked events. */
  density(slices, isMarked) {
    const counted = new Array(slices).fill(0);
    const marked = new Set();
    for (const event of this.events) {
      const slice = Math.min(slices - 1, Math.floor(((event.at_s - this.startS) / this.lengthS) * slices));
      counted[slice] += 1;
      if (isMarked(event)) marked.add(slice);
    }
    return { counted, marked };
  }
}

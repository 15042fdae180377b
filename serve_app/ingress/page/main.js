// Connects the parts of the page: chat, live events or a recording, header, map, lists, and details.

import { ask, keyOf, ownKey, problemOf, setKey, mapModel } from "./api.js";
import { Chat, describeSystem } from "./chat/chat.js";
import { byId, clock, make } from "./dom.js";
import { Cache } from "./live/cache.js";
import { Connection } from "./live/connection.js";
import { Player } from "./live/player.js";
import { readRecording, Recording } from "./live/recording.js";
import { Sessions } from "./live/sessions.js";
import { refusalAlarms, Tenants } from "./live/tenants.js";
import { Lists } from "./lists.js";
import { arc } from "./map/arcs.js";
import { Colours } from "./map/colours.js";
import { CacheMap } from "./map/map.js";
import { Alarms } from "./top/alarms.js";
import { drawLinks, wireLinks } from "./top/links.js";
import { drawVitals } from "./top/vitals.js";
import { Why } from "./why.js";
import { isIncident, isMarked, Words } from "./words.js";

const DRAW_EVERY_MS = 120;
const MAX_TOLD = 3000; // the list of requests shows a sample of them
const MAX_KEPT = 500;

const live = new Cache();
let state = { name: "connecting", says: "connecting", sinceS: 0 };
let skewS = 0;
let kept = [];
let lastDrawnMs = 0;
let changed = true;

const shown = () => player.recording?.model ?? live;
const view = new Proxy({}, { get: (_, name) => bound(shown(), name) });
const words = new Words(view, timeOf);
const why = new Why(view, words);
const colours = new Colours();
const map = new CacheMap(view, colours, timeOf, ({ replica, node }) => {
  const found = shown().tree(replica).find(({ id }) => id === node);
  if (found) why.prefix(replica, found);
  else why.replica(shown().replicas.get(replica) ?? shown().lost.get(replica));
});
const lists = new Lists(words, timeOf, (event) => why.event(event));
const sessions = new Sessions(live);
const tenants = new Tenants(live, colours, words, timeOf, (event) => why.event(event), () => {
  colours.learnTenants(tenants.rows.map(({ tenant }) => tenant));
  changed = true;
});
const alarms = new Alarms(view, timeOf, () => tenants.refusals && refusalAlarms(tenants.refusals, (tenant) => tenants.open(tenant)));
const chat = new Chat(live, (body, decision) => why.request(body, decision));

/** The time of day or, in a recording, the time since its start. */
function timeOf(atS) {
  if (player.recording) return clock(atS - player.recording.startS);
  return new Date(atS * 1000).toLocaleTimeString("en-GB");
}

/** A property of the model that is shown now: the live one, or the open recording's. */
function bound(model, name) {
  const value = model[name];
  return typeof value === "function" ? value.bind(model) : value;
}

const player = new Player((atS, played) => {
  if (played) {
    player.recording.to(atS, happened);
  } else {
    const told = [];
    player.recording.to(atS, (event) => told.push(event));
    lists.clear();
    told.forEach((event, at) => {
      if (at >= told.length - MAX_TOLD || isIncident(event)) lists.add(event, { aloud: false });
    });
  }
  changed = true;
});

/** Show an event of the current model as a line in a list and a movement on the map. */
function happened(event) {
  changed = true;
  lists.add(event, { own: chat.owns(event) });
  map.pulse(event.replica, event.node);
  if (event.pull_from && event.pull_tokens) arc(byId("arcs"), map.elementOf(event.pull_from), map.elementOf(event.replica));
}

const connection = new Connection(
  (event) => {
    const told = live.apply(event);
    chat.told(event);
    changed = true;
    if (event.type === "snapshot") skewS = event.at_s - Date.now() / 1000;
    kept = [...kept, ...told.filter(isIncident)].slice(-MAX_KEPT);
    if (player.recording) return;
    if (event.type === "snapshot") told.forEach((before) => lists.add(before, { aloud: false }));
    else told.forEach(happened);
  },
  (now) => {
    state = now;
    if (now.name === "refused") live.clear();
    changed = true;
  },
);

function draw(nowMs) {
  requestAnimationFrame(draw);
  if (nowMs - lastDrawnMs < (changed ? DRAW_EVERY_MS : 1000) || document.hidden) return;
  lastDrawnMs = nowMs;
  changed = false;
  if (!player.recording) live.nowS = Math.max(live.nowS, Date.now() / 1000 + skewS);
  const model = shown();
  const stale = !player.recording && ["lost", "busy"].includes(state.name);
  document.body.classList.toggle("stale", stale);
  map.render(stale);
  lists.render();
  alarms.render(player.recording ? null : state);
  drawVitals(model);
  byId("engine").hidden = !model.simulated;
  byId("engine").textContent = model.simulated ? "simulated: no model runs; times come from a cost model" : "";
  if (model.model) byId("model-name").textContent = model.model;
  drawLinks(live.links);
  const operator = live.seesAll;
  document.body.classList.toggle("operator", operator);
  // The key may also come from a proxy that has signed its user in.
  const chatless = keyOf("chat") === "" ? live.needsKey : ownKey("map") === "";
  document.body.classList.toggle("no-chat", operator && chatless);
  drawState(model);
}

function drawState(model) {
  const { name, says } = player.recording ? { name: "playback", says: "a recording" } : state;
  byId("connection").dataset.state = name;
  const text = { refused: "not connected", busy: "not connected; trying again" }[name] ?? says;
  if (byId("connection-text").textContent !== text) byId("connection-text").textContent = text;
  byId("sessions").hidden = player.recording !== null;
  tenants.pause(player.recording !== null);
  byId("empty").hidden = model.replicas.size > 0 || model.lately().length > 0;
  const [lead, more] = EMPTY[name === "live" && model.asleep() ? "asleep" : name] ?? ["The map is not connected", name === "busy" ? `${says} The page keeps trying.` : says];
  byId("empty-lead").textContent = lead;
  byId("empty-more").textContent = more;
  byId("give-key").hidden = !(name === "refused" && state.needsKey);
  byId("give-key").textContent = keyOf("map") ? "Enter another key" : "Enter a key";
}

const EMPTY = {
  connecting: ["Connecting", "The replicas and their prefixes will appear here."],
  live: ["No replicas yet", "They will appear here when they join."],
  asleep: ["The model is asleep", "Without requests it has no replica. The next request starts one."],
  lost: ["The server does not answer", "The page keeps trying. Meanwhile, you can open a recording."],
  playback: ["No replicas at this time", "Move to another time in the recording."],
};

/** By name of a model: the one whose replicas serve it. */
let owners = new Map();

/** Fill the list of models. This is also the first request that reports a wrong key. */
async function loadModels() {
  const note = byId("settings-note");
  try {
    const response = await ask("v1/models");
    if (!response.ok) throw new Error(response.status === 401 && !keyOf("chat") ? "an API key is needed" : await problemOf(response));
    const { data } = await response.json();
    owners = new Map(data.map(({ id, parent, root }) => [id, parent ?? root]));
    mapModel("");
    byId("model").replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
    byId("model-name").textContent = data[0]?.id ?? "";
    note.textContent = data[0]?.id ?? "no model";
    note.classList.remove("wrong");
  } catch (error) {
    note.textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
    note.classList.add("wrong");
    byId("settings").open = true;
  }
}

async function loadSample() {
  const response = await fetch("page/sample.txt");
  const text = response.ok ? await response.text() : "";
  byId("system").value = text;
  describeSystem(byId("system").value);
  byId("say").value = "Is it free?";
  byId("say").focus();
}

async function openRecording(file) {
  if (!file) return;
  try {
    const recording = new Recording(await readRecording(file, new Cache()), () => new Cache());
    player.open(recording, isMarked);
  } catch (error) {
    why.show("This file cannot be played", [error.message], []);
  }
}

/** Clear the page: the next key's owner must not see data of the previous key. */
function forget() {
  live.clear();
  why.clear();
  sessions.clear();
  tenants.clear();
  kept = [];
  if (!player.recording) lists.clear();
  changed = true;
}

function wireSettings() {
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  for (const [id, which] of [["key", "chat"], ["map-key", "map"]]) {
    byId(id).value = ownKey(which);
    byId(id).addEventListener("change", () => {
      setKey(which, byId(id).value);
      forget();
      loadModels();
      connection.start();
    });
  }
  byId("give-key").addEventListener("click", () => {
    byId("settings").open = true;
    byId(ownKey("map") ? "map-key" : "key").focus();
  });
  byId("model").addEventListener("change", () => {
    const { value } = byId("model");
    const [before, owner] = [byId("settings-note").textContent, value].map((name) => owners.get(name));
    byId("settings-note").textContent = value;
    if (before === owner) return; // an adapter or another name of the same model
    mapModel(value);
    forget();
    connection.start();
  });
  byId("system").addEventListener("input", () => describeSystem(byId("system").value));
  byId("sample").addEventListener("click", loadSample);
  byId("clear-system").addEventListener("click", () => {
    byId("system").value = "";
    describeSystem("");
  });
}

function wireRecording() {
  const picker = byId("recording-file");
  byId("open-recording").addEventListener("click", () => picker.click());
  picker.addEventListener("change", async () => {
    await openRecording(picker.files[0]);
    picker.value = "";
  });
  byId("live").addEventListener("click", () => {
    player.close();
    byId("sessions").hidden = false;
    sessions.look();
    lists.clear();
    for (const event of [...kept, ...live.decisions]) lists.add(event, { aloud: false });
    changed = true;
    byId("open-recording").focus();
  });
  const dropping = (on) => document.body.classList.toggle("dropping", on);
  const ours = (event) => event.dataTransfer.types.includes("Files") || !event.target.closest?.("input, textarea");
  addEventListener("dragover", (event) => {
    if (!ours(event)) return; // text dragged into a field
    event.preventDefault();
    dropping(event.dataTransfer.types.includes("Files"));
  });
  addEventListener("dragleave", () => dropping(false));
  addEventListener("drop", (event) => {
    if (!ours(event)) return;
    event.preventDefault();
    dropping(false);
    openRecording(event.dataTransfer.files[0]);
  });
}

wireSettings();
wireRecording();
wireLinks((...shown) => why.show(...shown));
why.clear();
loadModels();
tenants.look();
connection.start();
requestAnimationFrame(draw);

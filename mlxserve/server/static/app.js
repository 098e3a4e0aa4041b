// The chat page: what is on the screen, what the person does, what is kept in the browser.

import { abilities, chat, models } from "./api.js";
import { copy, show } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "thinking", "theme", "key"];
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

const state = { turns: [], running: null, atEnd: true };

// -- what is kept ------------------------------------------------------------------------------------

const kept = {
  get: (name, otherwise) => {
    try { return JSON.parse(localStorage.getItem(`mlxserve.${name}`)) ?? otherwise; } catch { return otherwise; }
  },
  set: (name, value) => {
    try { localStorage.setItem(`mlxserve.${name}`, JSON.stringify(value)); } catch { /* full, or forbidden */ }
  },
};

function keepTurns() {
  kept.set("turns", state.turns.map(({ role, content, thought, note }) => ({ role, content, thought, note })));
}

function loadSettings() {
  const values = kept.get("settings", {});
  for (const name of SETTINGS) $(name).value = values[name] ?? "";
  applyTheme();
}

function keepSettings() {
  kept.set("settings", Object.fromEntries(SETTINGS.map((name) => [name, $(name).value])));
  applyTheme();
}

function applyTheme() {
  const theme = $("theme").value;
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

// -- models ------------------------------------------------------------------------------------------

async function loadModels() {
  try {
    const names = await models($("key").value);
    const before = $("model").value || kept.get("model", "");
    $("model").replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(before)) $("model").value = before;
    await showAbilities();
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    else fault(error.message);
  }
}

async function showAbilities() {
  const model = (await abilities($("key").value))[$("model").value];
  $("thinking-row").hidden = !model?.template_variables.includes("enable_thinking");
}

function askForKey(message) {
  openSettings(true);
  $("key").setCustomValidity(message);
  $("key").reportValidity();
  $("key").focus();
}

// -- the conversation --------------------------------------------------------------------------------

function turnNode(turn) {
  const node = document.createElement("article");
  node.className = `turn ${turn.role}`;
  node.setAttribute("aria-label", turn.role === "user" ? "You" : "Model");
  const body = document.createElement("div");
  body.className = "body";
  const foot = document.createElement("div");
  foot.className = "foot";
  node.append(body, foot);
  turn.node = node;
  paint(turn);
  return node;
}

function paint(turn) {
  const body = turn.node.querySelector(".body");
  if (turn.role === "user") body.textContent = turn.content;
  else {
    paintThought(turn, body);
    show(body, turn.content);
  }
  turn.node.classList.toggle("busy", Boolean(turn.busy));
  paintFoot(turn);
}

function paintThought(turn, body) {
  if (!turn.thought) return;
  let box = turn.node.querySelector("details.thought");
  if (!box) {
    box = document.createElement("details");
    box.className = "thought";
    box.append(document.createElement("summary"), document.createElement("div"));
    body.before(box);
  }
  const thinking = turn.busy && !turn.content;
  box.firstChild.textContent = thinking ? "Thinking…" : turn.thought_s >= 0.05 ? `Thought for ${turn.thought_s.toFixed(1)} s` : "Thoughts";
  if (box.lastChild.textContent !== turn.thought) box.lastChild.textContent = turn.thought.trim();
}

function paintFoot(turn) {
  const parts = [];
  if (!turn.busy) {
    parts.push(button("Copy", (event) => copy(turn.content, event.target)));
    if (turn.role === "user") parts.push(button("Edit", () => editFrom(turn)));
    else if (turn === state.turns.at(-1)) parts.push(button("Again", again));
  }
  if (turn.note) parts.push(Object.assign(document.createElement("span"), { textContent: turn.note, className: "note" }));
  turn.node.querySelector(".foot").replaceChildren(...parts);
}

function button(text, act) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  made.addEventListener("click", act);
  return made;
}

function addTurn(turn) {
  const before = state.turns.at(-1);
  state.turns.push(turn);
  $("welcome").hidden = true;
  $("log").append(turnNode(turn));
  if (before?.node) paintFoot(before);
  return turn;
}

function fault(message, place = $("log")) {
  const box = Object.assign(document.createElement("div"), { className: "fault", textContent: message });
  box.setAttribute("role", "alert");
  place.append(box);
  follow(true);
}

// Stay at the end, unless the person has scrolled away from it.
function follow(always = false) {
  state.atEnd ||= always;
  if (state.atEnd) $("log").scrollTop = $("log").scrollHeight;
}

function noteScroll() {
  const log = $("log");
  state.atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function cutFrom(index) {
  for (const turn of state.turns.splice(index)) turn.node.remove();
  $("log").querySelectorAll(":scope > .fault").forEach((box) => box.remove());
  $("welcome").hidden = state.turns.length > 0;
  keepTurns();
}

function editFrom(turn) {
  if (state.running) return;
  $("input").value = turn.content;
  cutFrom(state.turns.indexOf(turn));
  grow();
  $("input").focus();
}

function again() {
  if (state.running) return;
  cutFrom(state.turns.length - 1);
  answer();
}

// -- one answer --------------------------------------------------------------------------------------

function requestBody() {
  const system = $("system").value.trim();
  const messages = state.turns.map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  const body = { model: $("model").value, messages };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if (!$("thinking-row").hidden && $("thinking").value) {
    body.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
  }
  return body;
}

async function answer() {
  const body = requestBody();
  const turn = addTurn({ role: "assistant", content: "", thought: "", busy: true });
  const control = new AbortController();
  setRunning(control);
  const clock = { started: performance.now(), first: 0, painted: 0 };
  try {
    for await (const delta of chat(body, $("key").value, control.signal)) take(turn, delta, clock);
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    if (error.name !== "AbortError") fault(error.message, turn.node);
    else turn.note = [turn.note, "stopped"].filter(Boolean).join(" · ");
  }
  turn.busy = false;
  setRunning(null);
  cancelAnimationFrame(clock.painted);
  paint(turn);
  follow();
  keepTurns();
  showAbilities().catch(() => {});
}

function take(turn, delta, clock) {
  const now = performance.now();
  if (delta.reasoning_content || delta.content) clock.first ||= now;
  if (delta.content && turn.thought && !turn.thought_s) turn.thought_s = (now - clock.first) / 1000;
  turn.thought += delta.reasoning_content ?? "";
  turn.content += delta.content ?? "";
  if (delta.finish === "length") turn.note = "cut at the limit";
  if (delta.usage) turn.note = [figures(delta.usage, clock, now), turn.note].filter(Boolean).join(" · ");
  clock.painted ||= requestAnimationFrame(() => {
    clock.painted = 0;
    paint(turn);
    follow();
  });
}

function figures(usage, clock, now) {
  const count = usage.completion_tokens;
  const seconds = (now - clock.first) / 1000;
  const rate = count > 1 && seconds > 0.05 ? `${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
  const wait = clock.first ? `first after ${((clock.first - clock.started) / 1000).toFixed(2)} s` : "";
  return [rate, `${count} tokens`, wait].filter(Boolean).join(" · ");
}

function setRunning(control) {
  state.running = control;
  $("stop").hidden = !control;
  $("send").hidden = Boolean(control);
  allowSending();
}

// -- what the person does ----------------------------------------------------------------------------

function send() {
  const text = $("input").value.trim();
  if (!text || state.running || !$("model").value) return;
  $("input").value = "";
  grow();
  addTurn({ role: "user", content: text });
  follow(true);
  keepTurns();
  answer();
}

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  allowSending();
}

function allowSending() {
  $("send").disabled = Boolean(state.running) || !$("input").value.trim();
}

function openSettings(open) {
  $("settings").hidden = !open;
  $("open-settings").setAttribute("aria-expanded", String(open));
  if (open) $("system").focus();
  else $("input").focus();
}

function newChat() {
  state.running?.abort();
  cutFrom(0);
  $("input").focus();
}

function onKey(event) {
  const mod = event.ctrlKey || event.metaKey;
  if (event.key === "Escape" && state.running) state.running.abort();
  else if (event.key === "Escape" && !$("settings").hidden) openSettings(false);
  else if (mod && event.shiftKey && event.key.toLowerCase() === "o") newChat();
  else if (mod && event.key === ",") openSettings($("settings").hidden);
  else if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) $("input").focus();
  else return;
  event.preventDefault();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("stop").addEventListener("click", () => state.running?.abort());
$("new").addEventListener("click", newChat);
$("open-settings").addEventListener("click", () => openSettings($("settings").hidden));
$("close-settings").addEventListener("click", () => openSettings(false));
$("model").addEventListener("change", () => { kept.set("model", $("model").value); showAbilities().catch(() => {}); });
for (const name of SETTINGS) $(name).addEventListener("change", keepSettings);
$("key").addEventListener("change", () => { $("key").setCustomValidity(""); loadModels(); });
document.addEventListener("keydown", onKey);
$("log").addEventListener("scroll", noteScroll, { passive: true });
new ResizeObserver(() => follow()).observe($("log"));

loadSettings();
for (const turn of kept.get("turns", [])) addTurn({ thought: "", ...turn });
follow(true);
grow();
loadModels();

"use strict";
// Reads /stats twice a second while the page is visible, and draws it. No library, nothing from other hosts.

const EVERY_MS = 500, HISTORY = 240, BLANK = -2, CACHED = -1;
const at = (id) => document.getElementById(id);
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const whole = new Intl.NumberFormat("en"), short = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

let key = "";          // kept only while the page is open
let last = null;       // the stats of the poll before
let now = null;        // the stats that are drawn
let lit = null;        // the highlighted request
const rates = [];      // tokens per second, newest last
let grid = { columns: 1, cell: 8 };

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

function hue(id) {
  const number = Number(id.replace(/\D/g, "")) || 0;
  return (number * 137.508 + 175) % 360;  // the golden angle: neighbours differ
}
const colour = (id) => `hsl(${hue(id).toFixed(1)} ${dark.matches ? "55% 58%" : "62% 42%"})`;

async function poll() {
  if (document.visibilityState === "visible") {
    try {
      const reply = await fetch("stats", { headers: headers(), cache: "no-store" });
      at("key-form").hidden = reply.status !== 401;
      if (reply.ok) show(await reply.json());
      else setState(reply.status === 401 ? "locked" : "unreachable");
    } catch {
      setState("unreachable");
    }
  }
  setTimeout(poll, EVERY_MS);
}

function setState(state) {
  const pill = at("state");
  if (pill.dataset.state === state) return;  // screen readers announce changes only
  pill.dataset.state = state;
  pill.textContent = state;
}

function show(stats) {
  last = now;
  now = stats;
  setState(stats.state === "ready" && stats.step_age_s > 10 ? "stalled" : stats.state);
  at("model").textContent = stats.model;
  remember();
  numbers();
  drawSpark();
  drawPool();
  listDrafts();
  listHolders();
}

function remember() {
  if (!last || now.time_s <= last.time_s) return;
  const made = now.tokens.generated - last.tokens.generated;
  rates.push(Math.max(0, made / (now.time_s - last.time_s)));
  if (rates.length > HISTORY) rates.shift();
}

function numbers() {
  const recent = rates.slice(-4), { prefilled, cached } = now.tokens;
  const rate = recent.reduce((sum, one) => sum + one, 0) / (recent.length || 1);
  const texts = {
    rate: whole.format(Math.round(rate)),
    running: whole.format(now.requests.running),
    waiting: whole.format(now.requests.waiting),
    used: whole.format(now.pages.used),
    total: whole.format(now.pages.total),
    cached: whole.format(now.pages.cached),
    saved: whole.format(now.pages.saved),
    offloaded: whole.format(now.pages.offloaded),
    offloadable: whole.format(now.pages.offloadable),
    hits: short.format((100 * cached) / (prefilled + cached || 1)),
    step: short.format(now.last_step_s * 1000),
    preempted: whole.format(now.preempted),
    steps: whole.format(now.steps),
    slots: now.page_size ?? "some",
  };
  for (const [id, text] of Object.entries(texts)) at(id).textContent = text;
  at("host").hidden = !now.pages.offloadable;
}

// Size a canvas to its place on the page, in device pixels.
function canvas(id, height) {
  const element = at(id), scale = devicePixelRatio || 1, width = element.clientWidth;
  element.width = Math.round(width * scale);
  element.height = Math.round(height * scale);
  const brush = element.getContext("2d");
  brush.scale(scale, scale);
  return [brush, width];
}

function drawSpark() {
  const height = 56, [brush, width] = canvas("spark", height);
  const most = Math.max(1, ...rates), x = (i) => width - (rates.length - 1 - i) * (width / (HISTORY - 1));
  const y = (rate) => height - 2 - (height - 8) * (rate / most);
  brush.beginPath();
  rates.forEach((rate, i) => brush.lineTo(x(i), y(rate)));
  brush.strokeStyle = ink("--strong");
  brush.lineWidth = 1.6;
  brush.lineJoin = "round";
  brush.stroke();
  if (!rates.length) return;
  brush.lineTo(x(rates.length - 1), height);
  brush.lineTo(x(0), height);
  brush.globalAlpha = 0.15;
  brush.fillStyle = ink("--strong");
  brush.fill();
}

// One cell per page if the server sends a map; otherwise one cell for several pages, in proportion.
function cells() {
  if (now.map) return { owners: now.map.cells, shared: new Set(now.map.shared), pages: 1 };
  const { total, used, cached } = now.pages, pages = Math.max(1, Math.ceil(total / 2048));
  const held = now.holders.flatMap((holder, i) => Array(holder.pages).fill(i));
  const owners = Array.from({ length: Math.ceil(total / pages) }, (_, i) => {
    const page = i * pages;
    if (page < used) return held.length ? held[Math.floor((page * held.length) / used)] : 0;
    return page < used + cached ? CACHED : BLANK;
  });
  return { owners, shared: new Set(), pages };
}

// The requested number of columns, or slightly fewer if that fills the last row.
function fitting(count, wanted) {
  for (let columns = wanted; columns > 0.75 * wanted; columns--) if (count % columns === 0) return columns;
  return wanted;
}

function drawPool() {
  const { owners, shared, pages } = cells(), width = at("pool").clientWidth;
  const columns = fitting(owners.length, Math.max(16, Math.min(128, Math.round(width / (width < 600 ? 9 : 14)))));
  const cell = width / columns, gap = cell > 10 ? 2 : 1;
  grid = { columns, cell, owners, shared, pages };
  const height = Math.ceil(owners.length / columns) * cell;
  at("pool").style.height = `${height}px`;
  const [brush] = canvas("pool", height);
  const plain = { [BLANK]: ink("--blank"), [CACHED]: ink("--cached") }, ring = ink("--ring");
  const colours = now.holders.map((holder) => colour(holder.id));
  owners.forEach((owner, i) => {
    const x = (i % columns) * cell, y = Math.floor(i / columns) * cell, side = cell - gap;
    brush.globalAlpha = lit === null || owner < 0 || now.holders[owner]?.id === lit ? 1 : 0.25;
    brush.fillStyle = plain[owner] ?? colours[owner] ?? plain[CACHED];
    brush.fillRect(x, y, side, side);
    if (shared.has(i)) {
      brush.strokeStyle = ring;
      brush.lineWidth = 1.5;
      brush.strokeRect(x + 1, y + 1, side - 2, side - 2);
    }
  });
  const { total, used, cached, saved } = now.pages;
  at("pool").setAttribute("aria-label",
    `${total} pages: ${used} in use, ${cached} free but caching a prefix; sharing saves ${saved}`);
}

function describe(event) {
  const box = at("pool").getBoundingClientRect(), { columns, cell, owners, shared, pages } = grid;
  const column = Math.floor((event.clientX - box.left) / cell);
  const place = Math.floor((event.clientY - box.top) / cell) * columns + column;
  if (!owners || !(place in owners)) return;
  const owner = owners[place], holder = now.holders[owner];
  const what = owner === BLANK ? "blank" : owner === CACHED ? "free, caches a prefix"
    : holder ? `held by ${holder.id}${shared.has(place) ? ", shared" : ""}` : "held";
  at("hint").textContent = `${pages > 1 ? `Pages ${place * pages + 1} to ${(place + 1) * pages}` : `Page ${place + 1}`}: ${what}`;
  light(holder ? holder.id : null);
}

function light(id) {
  if (lit === id) return;
  lit = id;
  for (const row of at("holders").children) row.classList.toggle("lit", row.dataset.id === id);
  if (now) drawPool();
}

// A bar for each position of a draft: the share of steps with drafts in which it was accepted.
function listDrafts() {
  const drafts = now.speculation;
  at("drafts").hidden = !drafts;
  if (!drafts) return;
  at("acceptance").textContent = drafts.drafts ? short.format(drafts.mean_acceptance_length) : "no";
  at("accepted").textContent = whole.format(drafts.accepted_tokens);
  at("drafted").textContent = whole.format(drafts.draft_tokens);
  at("no-drafts").hidden = !drafts.failed;
  at("positions").replaceChildren(...drafts.accepted_per_position.map((accepted, i) => {
    const row = document.createElement("li"), bar = document.createElement("i");
    const share = `${Math.round((100 * accepted) / (drafts.drafts || 1))}%`;
    bar.style.width = share;
    row.append(`${i + 1}`, bar, share);
    return row;
  }));
}

function listHolders() {
  const most = Math.max(1, ...now.holders.map((holder) => holder.pages)), body = at("holders");
  while (body.children.length > now.holders.length) body.lastChild.remove();
  now.holders.forEach((holder, i) => fill(body.children[i] ?? body.appendChild(newRow()), holder, most));
  at("no-requests").hidden = now.holders.length > 0;
}

function newRow() {
  const row = document.createElement("tr");
  for (let i = 0; i < 7; i++) row.append(document.createElement("td"));
  row.children[0].append(Object.assign(document.createElement("span"), { className: "dot" }), "");
  row.children[2].className = "bar";
  row.children[3].className = row.children[5].className = "extra";
  row.children[2].append(document.createElement("i"));
  row.addEventListener("pointerenter", () => light(row.dataset.id));
  row.addEventListener("pointerleave", () => light(null));
  return row;
}

function fill(row, holder, most) {
  const [name, pages, bar, prompt, made, samples, age] = row.children;
  row.dataset.id = holder.id;
  row.classList.toggle("lit", lit === holder.id);
  const tint = holder.pages ? colour(holder.id) : "";
  name.firstChild.style.background = tint;
  name.lastChild.textContent = holder.id;
  pages.textContent = holder.pages || "in line";
  bar.firstChild.style.width = `${(100 * holder.pages) / most}%`;
  bar.firstChild.style.background = tint;
  prompt.textContent = whole.format(holder.prompt_tokens);
  if (holder.tokens !== null) made.textContent = whole.format(holder.tokens);  // otherwise unchanged: a long step is running
  samples.textContent = holder.samples;
  age.textContent = `${short.format(holder.age_s)} s`;
}

let asking = null;

async function send(event) {
  event.preventDefault();
  asking?.abort();
  asking = new AbortController();
  const n = Number(at("samples").value);
  const boxes = Array.from({ length: n }, () => document.createElement("p"));
  at("answers").replaceChildren(...boxes);
  at("stop").hidden = false;
  try {
    await stream({ prompt: at("prompt").value, n, max_tokens: Number(at("length").value), stream: true }, boxes);
  } catch (error) {
    if (error.name !== "AbortError") complain(boxes[0], error.message);
  }
  at("stop").hidden = true;
}

async function stream(body, boxes) {
  const reply = await fetch("v1/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: asking.signal,
  });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  let rest = "";
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const one of events) take(one.replace(/^data: /, ""), boxes);
  }
}

function take(data, boxes) {
  if (data === "[DONE]" || data.startsWith(":")) return;
  const { choices, error } = JSON.parse(data);
  if (error) throw new Error(error.message);
  for (const choice of choices) boxes[choice.index].append(choice.text);
}

function complain(box, message) {
  box.className = "bad";
  box.textContent = message;
}

at("ask").addEventListener("submit", send);
at("stop").addEventListener("click", () => asking?.abort());
at("key-form").addEventListener("submit", (event) => { event.preventDefault(); key = at("key").value; });
at("pool").addEventListener("pointermove", describe);
at("pool").addEventListener("pointerdown", describe);
at("pool").addEventListener("pointerleave", () => light(null));
addEventListener("resize", () => now && (drawSpark(), drawPool()));
dark.addEventListener("change", () => now && (drawSpark(), drawPool(), listHolders()));
poll();

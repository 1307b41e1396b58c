"use strict";
// Shared by the figures: elements, numbers as text, controls, a player. No library; `lab` and `theme` are the only
// global names.

const lab = {
  data: JSON.parse(document.getElementById("data").textContent),
  figures: {},  // name -> (panel, data) => functions for tests and other figures
  redraw: [],   // called when the theme changes
  still: matchMedia("(prefers-reduced-motion: reduce)"),
};

// An element: attributes by name, "on..." for listeners, children as nodes or text.
lab.make = (space) => (tag, attributes = {}, ...children) => {
  const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value === "boolean") element[name] = value;
    else if (value != null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
};
lab.h = lab.make(null);
lab.s = lab.make("http://www.w3.org/2000/svg");

lab.text = (x, y, content, kind = "", anchor = "start") => lab.s("text", { x, y, class: kind, "text-anchor": anchor }, content);

lab.at = (id) => document.getElementById(id);
lab.clamp = (x, low, high) => Math.min(high, Math.max(low, x));
lab.colour = (angle) => `oklch(var(--tone) var(--chroma) ${(angle % 360).toFixed(1)})`;  // of one brightness, in both themes
lab.distinct = (i) => lab.colour(i * 137.508 + 190);  // the golden angle: neighbours differ
lab.set = (element, attributes) => {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

lab.whole = (x) => Math.round(x).toLocaleString("en");
lab.number = (x, digits = 3) => {
  if (!Number.isFinite(x)) return x > 0 ? "∞" : x < 0 ? "−∞" : "–";
  return x.toFixed(digits).replace(/^-(0(\.0+)?)$/, "$1").replace("-", "−");
};
lab.significant = (x, digits = 3) => {
  if (!Number.isFinite(x) || x === 0) return lab.number(x, 0);
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(x)) + 1e-12));
  const shown = Math.min(places, 12);
  return Number(x.toPrecision(digits)).toLocaleString("en", { minimumFractionDigits: shown, maximumFractionDigits: shown });
};
lab.scaled = (x, units, base) => {
  let i = 0;
  while (i < units.length - 1 && Math.abs(x) >= base * 0.9995) { x /= base; i++; }
  return `${lab.significant(x)} ${units[i]}`;
};
lab.bytes = (x) => (x < 1000 ? `${lab.whole(x)} B` : lab.scaled(x / 1000, ["kB", "MB", "GB", "TB", "PB"], 1000));
lab.seconds = (x) => (x === 0 ? "0 s" : x < 1 ? lab.scaled(x * 1e6, ["µs", "ms"], 1000) : x < 120 ? `${lab.significant(x)} s`
  : x < 7200 ? `${lab.significant(x / 60)} min` : `${lab.significant(x / 3600)} h`);
lab.tokens = (n) => (n >= 2 ** 20 ? `${n / 2 ** 20}M` : n >= 1024 ? `${n / 1024}k` : `${n}`);

// One of several: radio buttons that look like one control. options: [value, text] pairs.
lab.choice = (name, label, options, value, onChange) => {
  const field = lab.h("fieldset", { class: "choice" }, lab.h("legend", {}, label));
  const row = lab.h("div", {});
  for (const [each, text] of options) {
    const input = lab.h("input", { type: "radio", name, value: each, checked: each === value });
    input.addEventListener("change", () => onChange(each));
    row.append(lab.h("label", {}, input, lab.h("span", {}, text)));
  }
  field.append(row);
  return field;
};

// A range, with its value as text after its label. show(value): that text.
lab.slider = (id, label, { min = 0, max, step = 1, value, show = String }, onInput) => {
  const output = lab.h("output", { for: id, id: `${id}-value` });
  const input = lab.h("input", { id, type: "range", min, max, step, value });
  const updateLabel = () => {
    const text = show(Number(input.value));
    output.textContent = text;
    input.setAttribute("aria-valuetext", text);
  };
  input.addEventListener("input", () => { updateLabel(); onInput(Number(input.value)); });
  updateLabel();
  const box = lab.h("div", { class: "slider" }, lab.h("label", { for: id }, label, " ", output), input);
  return Object.assign(box, { input, put: (x) => { input.value = x; updateLabel(); } });
};

// Play, step and scrub over frames 0 to count - 1. show(frame) draws one; pace: frames a second.
lab.player = (id, count, show, { pace = 4, label = "Step", text = (i) => `${i + 1} of ${count}` } = {}) => {
  let frame = 0, timer = 0, total = count, speed = pace, name = text;
  const icon = (path) => lab.s("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, lab.s("path", { d: path }));
  const button = (kind, text, path, size = "small") =>
    lab.h("button", { type: "button", id: `${id}-${kind}`, class: `round ${size}`, "aria-label": text }, icon(path));
  const PLAY = "M4 2.5v11l9-5.5z", PAUSE = "M4 3h3v10H4zM9 3h3v10H9z";
  const play = button("play", "Play", PLAY, ""), back = button("back", "Step back", "M3 3h2v10H3zM13 3v10L6 8z");
  const next = button("next", "Step forward", "M11 3h2v10h-2zM3 3v10l7-5z");
  const range = lab.h("input", { type: "range", id, min: 0, max: Math.max(0, count - 1), value: 0, "aria-label": label });
  const output = lab.h("output", { for: id });
  const go = (to) => {
    frame = lab.clamp(to, 0, total - 1);
    range.value = frame;
    show(frame);
    output.textContent = name(frame);
    range.setAttribute("aria-valuetext", name(frame));
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.replaceChildren(icon(PLAY));
    play.setAttribute("aria-label", "Play");
  };
  const start = () => {
    if (frame >= total - 1) go(0);
    play.replaceChildren(icon(PAUSE));
    play.setAttribute("aria-label", "Pause");
    timer = setInterval(() => { if (frame >= total - 1) stop(); else go(frame + 1); }, 1000 / speed);
  };
  play.addEventListener("click", () => (timer ? stop() : start()));
  back.addEventListener("click", () => { stop(); go(frame - 1); });
  next.addEventListener("click", () => { stop(); go(frame + 1); });
  range.addEventListener("input", () => { stop(); go(Number(range.value)); });
  const element = lab.h("div", { class: "player", role: "group", "aria-label": label }, back, play, next, range, output);
  return {
    element, go, stop, start,
    get frame() { return frame; },
    get playing() { return timer !== 0; },
    reset(newCount, { pace: newPace = speed, at = 0, text: newText = name } = {}) {
      stop();
      total = newCount;
      speed = newPace;
      name = newText;
      range.max = Math.max(0, total - 1);
      go(at);
    },
  };
};

// Named numbers that can be updated by name.
lab.facts = (entries) => {
  const values = {}, list = lab.h("dl", { class: "facts" });
  for (const [name, label, kind = ""] of entries) {
    values[name] = lab.h("dd", { "data-fact": name, class: kind });
    list.append(lab.h("div", {}, lab.h("dt", {}, label), values[name]));
  }
  return Object.assign(list, { update: (name, text) => { values[name].textContent = text; } });
};

// An svg in screen pixels: draw(width) is called once at the start, and again when the width changes.
lab.sized = (svg, height, draw) => {
  let width = 0;
  const tall = typeof height === "function" ? height : () => height;
  const render = () => {
    if (!width) return;
    lab.set(svg, { viewBox: `0 0 ${width} ${tall(width)}`, width, height: tall(width) });
    draw(width);
  };
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now && now !== width) { width = now; render(); }
  }).observe(svg.parentElement ?? svg);
  lab.redraw.push(render);
  return render;
};

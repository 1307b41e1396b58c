"use strict";
// The algebra of onchip/core/state.py over one row, values of two numbers, with scores to drag.

lab.state = {
  lift(scores, values) {
    const m = Math.max(-Infinity, ...scores), pivot = m === -Infinity ? 0 : m;
    const p = scores.map((s) => Math.exp(s - pivot));
    const acc = [0, 1].map((d) => p.reduce((sum, weight, j) => sum + weight * values[j][d], 0));
    return { m, l: p.reduce((sum, weight) => sum + weight, 0), acc };
  },
  merge(a, b) {
    const m = Math.max(a.m, b.m), pivot = m === -Infinity ? 0 : m;
    const wa = Math.exp(a.m - pivot), wb = Math.exp(b.m - pivot);
    return { m, l: a.l * wa + b.l * wb, acc: a.acc.map((x, d) => x * wa + b.acc[d] * wb), wa, wb };
  },
  finalize({ m, l, acc }) {
    return { out: acc.map((x) => x / (l || 1)), lse: m + Math.log(l || 1) };
  },
};

lab.figures.algebra = (panel, data) => {
  const LOW = -6, HIGH = 13, HEIGHT = 250, TOP = 18, FLOOR = 214, REACH = 28, FP16_MAX = 65504;
  const scores = data.scores.slice(), values = data.values, count = scores.length;
  let cut = 4, step = 0;
  const y = (s) => TOP + ((HIGH - s) / (HIGH - LOW)) * (FLOOR - TOP);

  const svg = lab.s("svg", { class: "bars", role: "group", "aria-label": "Scores of eight keys" });
  const line = lab.s("line", { class: "cut" });
  const bars = scores.map((_, j) => bar(j));
  const share = lab.h("div", { class: "share", role: "img" });
  const cells = { a: card("side-a", "first keys"), b: card("side-b", "the others"), both: card("both", "merged: all keys") };
  const plain = lab.h("p", { class: "say note", role: "status" });
  const slider = lab.slider("algebra-cut", "split the keys after", { max: count, value: cut }, (x) => { cut = x; draw(); });
  const restore = () => { data.scores.forEach((s, j) => { scores[j] = s; }); draw(); };
  const again = lab.h("button", { type: "button", class: "act", onclick: restore }, "as recorded");
  const op = (text) => lab.h("span", { class: "op", "aria-hidden": "true" }, text);
  panel.append(
    svg,
    lab.h("div", { class: "controls" }, slider, again),
    lab.h("div", { class: "states" }, cells.a.box, op("⊕"), cells.b.box, op("="), cells.both.box),
    lab.h("div", {}, lab.h("p", { class: "note" }, "Weights of the values, which sum to 1:"), share),
    plain,
  );

  function card(kind, title) {
    const fields = {}, list = lab.h("dl", {});
    for (const name of kind === "both" ? ["m", "l", "acc", "out", "lse"] : ["m", "l", "acc", "scaled by"]) {
      fields[name] = lab.h("dd", { "data-value": name });
      list.append(lab.h("dt", {}, name), fields[name]);
    }
    return { box: lab.h("div", { class: `state ${kind}` }, lab.h("h3", {}, title), list), fields };
  }

  function bar(j) {
    const body = lab.s("rect", { class: "body", rx: 5 }), knob = lab.s("circle", { class: "knob", r: 9 });
    const hit = lab.s("rect", { class: "hit" });
    const text = lab.s("text", { "text-anchor": "middle" }), name = lab.s("text", { "text-anchor": "middle", class: "soft tiny" });
    const about = { role: "slider", "aria-valuemin": LOW, "aria-valuemax": HIGH, "aria-label": `Score of key ${j + 1}` };
    const group = lab.s("g", { tabindex: 0, "data-key": j, ...about }, body, hit, knob, text, name);
    name.textContent = `key ${j + 1}`;
    const at = (event) => {
      const box = svg.getBoundingClientRect(), s = HIGH - ((event.clientY - box.top - TOP) / (FLOOR - TOP)) * (HIGH - LOW);
      put(j, s < LOW - 0.4 ? -Infinity : lab.clamp(Math.round(s * 10) / 10, LOW, HIGH));
    };
    // Elements of an svg have no touch-action: without this, dragging a knob by touch would scroll the page.
    group.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
    group.addEventListener("pointerdown", (event) => { group.setPointerCapture(event.pointerId); at(event); });
    group.addEventListener("pointermove", (event) => { if (group.hasPointerCapture(event.pointerId)) at(event); });
    group.addEventListener("keydown", (event) => {
      const s = Number.isFinite(scores[j]) ? scores[j] : LOW - 0.5;
      const by = { ArrowUp: 0.5, ArrowRight: 0.5, ArrowDown: -0.5, ArrowLeft: -0.5, PageUp: 4, PageDown: -4 }[event.key];
      const to = by === undefined ? { Home: -Infinity, Delete: -Infinity, End: HIGH }[event.key] : s + by;
      if (to === undefined) return;
      event.preventDefault();
      put(j, to < LOW ? -Infinity : Math.min(HIGH, Math.round(to * 10) / 10));
    });
    return { group, body, knob, hit, text, name };
  }

  function put(j, s) {
    scores[j] = s;
    draw();
  }

  // Built once for each width: replacing a bar would end the drag on it.
  function layout(width) {
    step = width / count;
    svg.replaceChildren(lab.s("line", { class: "axis", x1: 0, x2: width, y1: y(0), y2: y(0) }), line, ...bars.map((b) => b.group));
    bars.forEach((b, j) => {
      const middle = (j + 0.5) * step, wide = Math.min(46, step * 0.62);
      lab.set(b.body, { x: middle - wide / 2, width: wide });
      lab.set(b.hit, { x: middle - step / 2, width: step, height: 2 * REACH });
      lab.set(b.knob, { cx: middle });
      lab.set(b.text, { x: middle });
      lab.set(b.name, { x: middle, y: HEIGHT - 4 });
    });
  }

  function place() {
    const x = lab.clamp(cut * step, 1, count * step - 1);
    lab.set(line, { x1: x, x2: x, y1: 4, y2: HEIGHT - 18 });
    scores.forEach((s, j) => {
      const { group, body, knob, hit, text } = bars[j], masked = s === -Infinity, top = masked ? FLOOR + 8 : y(s);
      group.setAttribute("class", `bar ${j < cut ? "side-a" : "side-b"}${masked ? " masked" : ""}`);
      lab.set(body, { y: top, height: Math.max(0, FLOOR + 4 - top) });
      lab.set(knob, { cy: top });
      lab.set(hit, { y: top - REACH });
      lab.set(text, { y: Math.max(11, top - 14) });
      text.textContent = masked ? "masked" : lab.number(s, 1);
      lab.set(group, { "aria-valuenow": masked ? LOW : s, "aria-valuetext": masked ? "masked" : String(s) });
    });
  }

  function showState(card, state, factor) {
    const { out, lse } = lab.state.finalize(state), pair = (x) => x.map((one) => lab.number(one)).join(" ");
    const texts = { m: lab.number(state.m, 1), l: lab.number(state.l), acc: pair(state.acc), out: pair(out), lse: lab.number(lse) };
    texts["scaled by"] = lab.number(factor);
    for (const [name, cell] of Object.entries(card.fields)) cell.textContent = texts[name];
  }

  function weights(state) {
    const parts = scores.map((s) => Math.exp(s - state.m) / state.l || 0);
    share.replaceChildren(...parts.map((p, j) => {
      const part = lab.h("span", { class: j < cut ? "side-a" : "side-b" }, p > 0.06 ? `${Math.round(100 * p)} %` : "");
      part.style.flexGrow = p;
      part.style.flexBasis = 0;
      return part;
    }));
    share.setAttribute("aria-label", `Weights: ${parts.map((p) => lab.number(p, 2)).join(", ")}`);
  }

  function warn() {
    const sum = scores.reduce((total, s) => total + Math.exp(s), 0);
    plain.textContent = sum > FP16_MAX
      ? `Without subtracting m, the sum of exp(s) would be ${lab.whole(sum)}: fp16 ends at 65,504 and overflows.`
      : `Without subtracting m, the sum of exp(s) would be ${lab.significant(sum, 4)}; fp16 overflows at 65,504.`;
  }

  function draw() {
    const part = (from, to) => lab.state.lift(scores.slice(from, to), values.slice(from, to));
    const first = part(0, cut), rest = part(cut, count);
    const both = lab.state.merge(first, rest);
    showState(cells.a, first, both.wa);
    showState(cells.b, rest, both.wb);
    showState(cells.both, both);
    weights(both);
    warn();
    if (step) place();
  }
  lab.sized(svg, HEIGHT, (width) => { layout(width); place(); });
  draw();
  return { put, scores, get cut() { return cut; } };
};

"use strict";
// The events of benchmarks/ring_timeline.py over all devices: an event happens a duration after the last of those it
// waits for. The durations of kernels, merges and messages were recorded; the order is computed here, and a test compares it.

lab.timeline = ({ n, backward, costs, messages, node }) => {
  const at = new Map(), spans = [];
  const ranks = Array.from({ length: n }, (_, r) => r);
  const crosses = (r) => node && Math.floor(r / node) !== Math.floor(((r + 1) % n) / node);
  const add = (kind, round, lasts, ...causes) => {
    const known = causes.filter(([cause]) => at.has(cause));
    const started = (r) => Math.max(0, ...known.map(([cause, shift]) => at.get(cause)[(r + shift + n) % n]));
    const times = ranks.map((r) => started(r) + (lasts ? lasts(r) : 0));
    at.set(`${kind} ${round}`, times);
    for (const r of lasts ? ranks : []) {
      if (lasts(r)) spans.push({ device: r, what: kind, round, start: times[r] - lasts(r), end: times[r] });
    }
  };
  // Rank r holds the keys of rank r - round: its own, those of a lower rank, or of a higher one.
  const cost = (which, round) => (r) => costs[round === 0 ? 0 : r >= round ? 1 : 2][which];
  const message = (which) => (r) => messages[which][crosses(r) ? 1 : 0];
  const send = (kind, round, posted, before) =>
    add(kind, round, message(kind === "kv" ? 0 : 1), [posted, 0], [posted, 1], [before, 0]);
  const awaited = (key) => [[key, 0], [key, -1]];
  for (let i = 0; i < n; i++) {
    add("begun", i, null, [`merge ${i - 1}`, 0], ...awaited(`kv ${i - 1}`));
    if (backward && i) send("dkv", i - 1, `merge ${i - 1}`, `kv ${i - 1}`);
    if (i < n - 1) send("kv", i, `begun ${i}`, `dkv ${i - 1}`);
    add("kernel", i, cost(0, i), [`begun ${i}`, 0]);
    add("merge", i, cost(1, i), [`kernel ${i}`, 0], ...awaited(`dkv ${i - 1}`));
  }
  if (backward && n > 1) send("dkv", n - 1, `merge ${n - 1}`, `kv ${n - 1}`);
  add("end", 0, null, [`merge ${n - 1}`, 0], ...awaited(`dkv ${n - 1}`));
  const [own, lower, upper] = costs.map(([kernel, merge]) => kernel + merge);
  const seconds = Math.max(...at.get("end 0")), busy = own + (n - 1) * Math.max(lower, upper);
  return { spans, seconds, busy, exposed: seconds - busy > 1e-9 * seconds ? seconds - busy : 0 };
};

lab.figures.ring = (panel, data) => {
  const FRAMES = 400, CENTRE = 120, RADIUS = 88;
  const chosen = { layout: 1, fabric: 2, backward: 0, devices: 1, length: 2 };
  let line = null, clock = 0;
  const count = () => data.devices[chosen.devices];
  const owner = (span) => (span.device - span.round + count()) % count();  // of the keys of this span
  const colour = (rank) => lab.colour((rank * 360) / count() + 190);
  const pick = (name) => (x) => { chosen[name] = x; compute(); };
  const numbered = (list) => list.map((text, i) => [i, String(text)]);
  const links = data.fabrics.map((fabric) => fabric.name.replace(", ", " + "));

  const wheel = lab.s("svg", { viewBox: "0 0 240 240", role: "img" }), chart = lab.s("svg", { role: "img" });
  const chartBox = lab.h("div", {}, chart), mark = lab.s("line", { class: "now" });
  const facts = lab.facts([["seconds", "the step"], ["busy", "busiest GPU computes", "of-a"],
    ["exposed", "network shows", "of-b"], ["idle", "idle, all GPUs"]]);
  const hint = lab.h("p", { class: "say note", role: "status" }, "Point at a bar to see what it is.");
  const moment = () => (line ? lab.seconds(clock * line.seconds) : "");
  const player = lab.player("ring-time", FRAMES, (frame) => { clock = frame / (FRAMES - 1); drawNow(); },
    { pace: 40, label: "Time", text: moment });
  const length = { max: data.lengths.length - 1, value: chosen.length, show: (i) => lab.tokens(data.lengths[i]) };
  const key = (kind, text) => lab.h("li", {}, lab.h("i", { class: `key ${kind}` }), text);
  panel.append(
    lab.h("div", { class: "controls" },
      lab.choice("ring-layout", "layout", numbered(data.layouts), chosen.layout, pick("layout")),
      lab.choice("ring-pass", "pass", numbered(["forward", "backward"]), chosen.backward, pick("backward")),
      lab.choice("ring-devices", "GPUs", numbered(data.devices), chosen.devices, pick("devices"))),
    lab.h("div", { class: "controls" },
      lab.choice("ring-fabric", "link between neighbours", numbered(links), chosen.fabric, pick("fabric")),
      lab.slider("ring-length", "tokens in all", length, pick("length"))),
    facts,
    lab.h("div", { class: "ring-view" }, lab.h("div", {}, wheel), chartBox),
    player.element, hint,
    lab.h("ul", { class: "legend" }, key("rainbow", "attention; the colour is the rank of the keys"), key("merge", "merge"),
      key("kv", "K, V travel"), key("dkv", "dK, dV travel")));
  const { num_heads: heads, num_kv_heads: keyHeads, head_dim: dim } = data.shape;
  lab.at("ring-note").textContent = `One causal layer with ${heads} heads, ${keyHeads} of keys, head_dim ${dim}, 16 bits. `
    + `Kernels as measured on an ${data.machine}; links as specified by their makers. With two links, nodes of `
    + `${data.fabrics.at(-1).node} GPUs have the first inside. Events are those of benchmarks/ring_timeline.py.`;

  function setting() {
    const { layout, fabric, backward, devices, length: tokens } = chosen;
    return {
      n: count(), backward: Boolean(backward), node: data.fabrics[fabric].node,
      costs: data.costs[layout][backward][devices][tokens], messages: data.messages[fabric][backward][devices][tokens],
    };
  }

  function compute() {
    line = lab.timeline(setting());
    const work = line.spans.filter((s) => !travels(s)).reduce((sum, s) => sum + s.end - s.start, 0);
    facts.update("seconds", lab.seconds(line.seconds));
    facts.update("busy", lab.seconds(line.busy));
    facts.update("exposed", line.exposed ? lab.seconds(line.exposed) : "nothing");
    facts.update("idle", `${(100 * (1 - work / (count() * line.seconds))).toFixed(1)} %`);
    render();
    player.reset(FRAMES, { at: Math.round(0.29 * (FRAMES - 1)) });
  }

  const travels = (span) => span.what === "kv" || span.what === "dkv";
  const lanes = (width) => ({ left: width < 500 ? 34 : 46, top: 6, pitch: count() > 8 ? 21 : count() > 4 ? 34 : 56 });

  function drawLanes(width) {
    if (!line) return;
    const n = count(), { left, top, pitch } = lanes(width), parts = [];
    for (let r = 0; r < n; r++) {
      const under = top + (r + 1) * pitch - 2.5;
      parts.push(lab.text(0, top + r * pitch + pitch / 4 + 5, width < 500 ? `${r}` : `GPU ${r}`, "soft tiny"),
        lab.s("line", { class: "lane", x1: left, x2: width, y1: under, y2: under }));
    }
    parts.push(...line.spans.map((span) => bar(span, width)));
    lab.set(mark, { y1: 0, y2: top + n * pitch });
    chart.replaceChildren(...parts, mark);
    chart.setAttribute("aria-label", `What ${n} GPUs do in a step of ${lab.seconds(line.seconds)}`);
    drawNow();
  }

  // Computation of a device above, its messages below.
  function bar(span, width) {
    const { left, top, pitch } = lanes(width), thick = pitch * 0.5, thin = Math.max(4, pitch * 0.22), sent = travels(span);
    const x = (t) => left + (t / line.seconds) * (width - left - 2), gap = sent ? 0 : 0.6;
    const below = sent ? thick + 2 + (span.what === "dkv" ? thin * 0.5 : 0) : 0;
    const rect = lab.s("rect", {
      class: `span-${span.what}`, x: x(span.start), width: Math.max(0.4, x(span.end) - x(span.start) - gap), rx: sent ? 1.5 : 2.5,
      y: top + span.device * pitch + below, height: sent ? thin * (chosen.backward ? 0.45 : 0.8) : thick,
    });
    if (span.what === "kernel") rect.style.fill = colour(owner(span));
    const told = () => { hint.textContent = `${describe(span)}: ${lab.seconds(span.end - span.start)}, from ${lab.seconds(span.start)} on.`; };
    rect.addEventListener("pointerenter", told);
    return rect;
  }

  function describe(span) {
    const { device, what, round } = span, to = (device + 1) % count();
    if (what === "kernel") return `GPU ${device} attends to the keys of GPU ${owner(span)}`;
    if (what === "merge") return `GPU ${device} merges the result of round ${round}`;
    return `${what === "kv" ? "K and V" : "dK and dV"} of GPU ${owner(span)} go from GPU ${device} to GPU ${to}`;
  }

  // The current time in the lanes, and the positions of the keys in the ring.
  function drawNow() {
    if (!line) return;
    const width = chartBox.clientWidth, { left } = lanes(width), x = left + clock * (width - left - 2), t = clock * line.seconds;
    lab.set(mark, { x1: x, x2: x });
    const now = line.spans.filter((s) => s.start <= t && t < s.end), n = count();
    const busy = new Map(now.filter((s) => !travels(s)).map((s) => [s.device, s]));
    const nodes = Array.from({ length: n }, (_, r) => device(r, busy.get(r))).flat();
    wheel.replaceChildren(lab.s("circle", { cx: CENTRE, cy: CENTRE, r: RADIUS, class: "axis" }), ...nodes,
      ...now.filter(travels).map((s) => parcel(s, (t - s.start) / (s.end - s.start))),
      lab.text(CENTRE, CENTRE - 2, `${busy.size} of ${n}`, "middle", "middle"), lab.text(CENTRE, CENTRE + 18, "compute", "soft", "middle"));
    wheel.setAttribute("aria-label", `${busy.size} of ${n} GPUs compute at ${lab.seconds(t)}`);
  }

  function place(rank, radius) {
    const angle = (2 * Math.PI * rank) / count() - Math.PI / 2;
    return [CENTRE + radius * Math.cos(angle), CENTRE + radius * Math.sin(angle)];
  }

  function device(rank, span) {
    const [x, y] = place(rank, RADIUS), size = count() > 8 ? 13 : count() > 4 ? 19 : 25, on = span ? " on" : "";
    const circle = lab.s("circle", { cx: x, cy: y, r: size, class: `gpu${on}` });
    if (span?.what === "kernel") circle.style.fill = colour(owner(span));
    return [circle, lab.text(x, y + 4, `${rank}`, `gpu-label${on}`, "middle")];
  }

  function parcel(span, share) {
    const [x, y] = place(span.device + share, span.what === "kv" ? RADIUS : RADIUS + 24);
    const box = lab.s("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 2.5, class: `parcel ${span.what}` });
    box.style.fill = colour(owner(span));
    return box;
  }

  let render = () => {};
  render = lab.sized(chart, (width) => lanes(width).top + lanes(width).pitch * count() + 2, drawLanes);
  compute();
  return { setting, chosen, compute, get line() { return line; } };
};

"use strict";
// The events of onchip/parallel/simulate.py over all devices: an event happens a duration after the last of those it
// waits for. What kernels, merges and messages last was recorded; the order is computed here, and compared in a test.

lab.timeline = ({ n, backward, costs, messages, node }) => {
  const at = new Map(), spans = [];
  const crosses = (r) => node && Math.floor(r / node) !== Math.floor(((r + 1) % n) / node);
  const ranks = Array.from({ length: n }, (_, r) => r);
  const add = (kind, round, lasts, ...causes) => {
    const known = causes.filter(([cause]) => at.has(cause));
    const times = ranks.map((r) => Math.max(0, ...known.map(([cause, shift]) => at.get(cause)[(r + shift + n) % n])) + (lasts ? lasts(r) : 0));
    at.set(`${kind} ${round}`, times);
    if (lasts) ranks.forEach((r) => { if (lasts(r)) spans.push({ device: r, what: kind, round, start: times[r] - lasts(r), end: times[r] }); });
  };
  // Rank r holds the keys of rank r - round: its own, those of a lower rank, or of a higher one.
  const cost = (which, round) => (r) => costs[round === 0 ? 0 : r >= round ? 1 : 2][which];
  const message = (which) => (r) => messages[which][crosses(r) ? 1 : 0];
  const send = (kind, round, posted, before) => add(kind, round, message(kind === "kv" ? 0 : 1), [posted, 0], [posted, 1], [before, 0]);
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
  return { spans, seconds, busy, exposed: Math.max(0, seconds - busy) > 1e-9 * seconds ? seconds - busy : 0 };
};

lab.figures.ring = (panel, data) => {
  const FRAMES = 400;
  const chosen = { layout: 1, fabric: 2, backward: 0, devices: 1, length: 2 };
  let line = null, clock = 0;
  const hue = (rank) => lab.colour((rank * 360) / data.devices[chosen.devices] + 190);
  const pick = (name) => (x) => { chosen[name] = x; compute(); };
  const numbered = (list) => list.map((text, i) => [i, text]);
  const wheel = lab.s("svg", { viewBox: "0 0 240 240", role: "img" }), chart = lab.s("svg", { role: "img" });
  const chartBox = lab.h("div", {}, chart);
  const facts = lab.facts([["seconds", "the step"], ["busy", "busiest GPU computes", "of-a"], ["exposed", "network shows", "of-b"], ["idle", "idle, all GPUs"]]);
  const hint = lab.h("p", { class: "say note", role: "status" }, "Point at a bar to see what it is.");
  const player = lab.player("ring-time", FRAMES, (frame) => { clock = frame / (FRAMES - 1); drawNow(); },
    { pace: 40, label: "Time", text: () => (line ? lab.seconds(clock * line.seconds) : "") });
  panel.append(
    lab.h("div", { class: "controls" },
      lab.choice("ring-layout", "layout", numbered(data.layouts), chosen.layout, pick("layout")),
      lab.choice("ring-pass", "pass", [[0, "forward"], [1, "backward"]], 0, pick("backward")),
      lab.choice("ring-devices", "GPUs", numbered(data.devices.map(String)), chosen.devices, pick("devices"))),
    lab.h("div", { class: "controls" },
      lab.choice("ring-fabric", "link between neighbours", data.fabrics.map((f, i) => [i, f.name.replace(", ", " + ")]), chosen.fabric, pick("fabric")),
      lab.slider("ring-length", "tokens in all", { max: data.lengths.length - 1, value: chosen.length, show: (i) => lab.tokens(data.lengths[i]) }, pick("length"))),
    facts,
    lab.h("div", { class: "ring-view" }, lab.h("div", {}, wheel), chartBox),
    player.element, hint,
    lab.h("ul", { class: "legend" }, lab.h("li", {}, lab.h("i", { class: "key rainbow" }), "attention; the colour is whose keys"),
      lab.h("li", {}, lab.h("i", { class: "key merge" }), "merge"), lab.h("li", {}, lab.h("i", { class: "key kv" }), "K, V travel"),
      lab.h("li", {}, lab.h("i", { class: "key dkv" }), "dK, dV travel")),
  );
  const { num_heads, num_kv_heads, head_dim } = data.shape;
  lab.at("ring-note").textContent = `One causal layer with ${num_heads} heads, ${num_kv_heads} of keys, head_dim ${head_dim}, 16 bits. Kernels as measured on an ${data.machine}; links as stated by their makers. Events are those of onchip.parallel.simulate.`;

  function setting() {
    const { layout, fabric, backward, devices, length } = chosen;
    return { n: data.devices[devices], backward: Boolean(backward), costs: data.costs[layout][backward][devices][length],
      messages: data.messages[fabric][backward][devices][length], node: data.fabrics[fabric].node };
  }

  function compute() {
    line = lab.timeline(setting());
    const n = data.devices[chosen.devices], work = line.spans.filter((s) => s.what === "kernel" || s.what === "merge").reduce((sum, s) => sum + s.end - s.start, 0);
    facts.tell("seconds", lab.seconds(line.seconds));
    facts.tell("busy", lab.seconds(line.busy));
    facts.tell("exposed", line.exposed ? lab.seconds(line.exposed) : "nothing");
    facts.tell("idle", `${(100 * (1 - work / (n * line.seconds))).toFixed(1)} %`);
    render();
    player.reset(FRAMES, { at: Math.round(0.35 * (FRAMES - 1)) });
  }

  const laneOf = (width) => { const n = data.devices[chosen.devices]; return { left: width < 500 ? 34 : 46, top: 6, pitch: n > 8 ? 21 : n > 4 ? 34 : 56 }; };

  function drawLanes(width) {
    if (!line) return;
    const n = data.devices[chosen.devices], { left, top, pitch } = laneOf(width);
    const x = (t) => left + (t / line.seconds) * (width - left - 2), parts = [];
    const both = Boolean(chosen.backward), thick = pitch * 0.5, thin = Math.max(4, pitch * 0.22);
    for (let r = 0; r < n; r++) {
      const label = lab.s("text", { x: 0, y: top + r * pitch + thick * 0.5 + 5, class: "soft tiny" });
      label.textContent = width < 500 ? `${r}` : `GPU ${r}`;
      parts.push(label, lab.s("line", { class: "lane", x1: left, x2: width, y1: top + (r + 1) * pitch - 2.5, y2: top + (r + 1) * pitch - 2.5 }));
    }
    for (const span of line.spans) {
      const sending = span.what === "kv" || span.what === "dkv", from = (span.device - span.round + n) % n;
      const y = top + span.device * pitch + (sending ? thick + 2 + (span.what === "dkv" ? thin * 0.5 : 0) : 0);
      const rect = lab.s("rect", { x: x(span.start), width: Math.max(0.4, x(span.end) - x(span.start) - (sending ? 0 : 0.6)), y, rx: sending ? 1.5 : 2.5,
        height: sending ? thin * (both ? 0.45 : 0.8) : thick, class: `span-${span.what}` });
      if (span.what === "kernel") rect.style.fill = hue(from);
      const what = { kernel: `GPU ${span.device} attends to the keys of GPU ${from}`, merge: `GPU ${span.device} merges round ${span.round}`, kv: `K and V of GPU ${from} go from ${span.device} to ${(span.device + 1) % n}`,
        dkv: `dK and dV of GPU ${from} go from ${span.device} to ${(span.device + 1) % n}` }[span.what];
      rect.addEventListener("pointerenter", () => { hint.textContent = `${what}: ${lab.seconds(span.end - span.start)}, from ${lab.seconds(span.start)} on.`; });
      parts.push(rect);
    }
    chart.replaceChildren(...parts, lab.s("line", { class: "now", id: "ring-now", y1: 0, y2: top + n * pitch }));
    chart.setAttribute("aria-label", `What ${n} GPUs do in a step of ${lab.seconds(line.seconds)}`);
    drawNow();
  }

  // Where keys are at this moment, in the middle of what each GPU is doing.
  function drawNow() {
    if (!line) return;
    const t = clock * line.seconds, n = data.devices[chosen.devices], mark = chart.querySelector("#ring-now"), width = chartBox.clientWidth;
    if (mark) { const { left } = laneOf(width), x = left + clock * (width - left - 2); lab.set(mark, { x1: x, x2: x }); }
    const place = (r, radius) => { const angle = (2 * Math.PI * r) / n - Math.PI / 2; return [120 + radius * Math.cos(angle), 120 + radius * Math.sin(angle)]; };
    const size = n > 8 ? 13 : n > 4 ? 19 : 25, parts = [lab.s("circle", { cx: 120, cy: 120, r: 88, class: "axis" })];
    let working = 0;
    for (let r = 0; r < n; r++) {
      const kernel = line.spans.find((s) => s.device === r && s.what === "kernel" && s.start <= t && t < s.end);
      const merge = line.spans.find((s) => s.device === r && s.what === "merge" && s.start <= t && t < s.end);
      const [x, y] = place(r, 88), node = lab.s("circle", { cx: x, cy: y, r: size, class: kernel || merge ? "gpu on" : "gpu" });
      if (kernel) node.style.fill = hue((r - kernel.round + n) % n);
      working += Boolean(kernel || merge);
      const label = lab.s("text", { x, y: y + 4, "text-anchor": "middle", class: kernel || merge ? "gpu-label on" : "gpu-label" });
      label.textContent = r;
      parts.push(node, label);
    }
    for (const s of line.spans) {
      if ((s.what !== "kv" && s.what !== "dkv") || t < s.start || t >= s.end) continue;
      const [x, y] = place(s.device + (t - s.start) / (s.end - s.start), s.what === "kv" ? 88 : 112);
      const box = lab.s("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 2.5, class: `parcel ${s.what}` });
      box.style.fill = hue((s.device - s.round + n) % n);
      parts.push(box);
    }
    const middle = lab.s("text", { x: 120, y: 118, "text-anchor": "middle", class: "middle" }), under = lab.s("text", { x: 120, y: 138, "text-anchor": "middle", class: "soft" });
    middle.textContent = `${working} of ${n}`;
    under.textContent = "compute";
    wheel.replaceChildren(...parts, middle, under);
    wheel.setAttribute("aria-label", `${working} of ${n} GPUs compute at ${lab.seconds(t)}`);
  }

  let render = () => {};
  render = lab.sized(chart, (width) => { const { top, pitch } = laneOf(width); return top + pitch * data.devices[chosen.devices] + 2; }, drawLanes);
  compute();
  return { setting, chosen, compute, get line() { return line; } };
};

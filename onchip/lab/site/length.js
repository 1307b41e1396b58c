"use strict";
// Memory and least time against length: bytes and operations per head as counted, rates as published or measured.

lab.figures.length = (panel, data) => {
  const chosen = { n: 7, d: 1, heads: 5, dtype: 0, device: 2 };
  const KINDS = [["standard", "b"], ["flash", "a"]], HEIGHT = 250, LEFT = 54, BOTTOM = 26, TOP = 10;
  const device = () => data.devices[chosen.device];
  const pick = (name) => (x) => { chosen[name] = x; draw(); };
  const numbered = (list) => list.map((text, i) => [i, String(text)]);
  const slider = (name, label, list, show) =>
    lab.slider(`length-${name}`, label, { max: list.length - 1, value: chosen[name], show: (i) => show(list[i]) }, pick(name));
  const choice = (name, label, list) => lab.choice(`length-${name}`, label, numbered(list), chosen[name], pick(name));
  const key = (kind, text) => lab.h("li", {}, lab.h("i", { class: `key ${kind}` }), text);

  const facts = lab.facts([["standard-memory", "standard: memory", "of-b"], ["flash-memory", "flash: memory", "of-a"],
    ["standard-time", "standard: least time", "of-b"], ["flash-time", "flash: least time", "of-a"]]);
  const memory = lab.s("svg", { role: "img", "aria-label": "Memory against length, both logarithmic" });
  const time = lab.s("svg", { role: "img", "aria-label": "Least time against length, both logarithmic" });
  const say = lab.h("p", { class: "say", role: "status", id: "length-say" });
  const chart = (title, svg) => lab.h("div", {}, lab.h("h3", {}, title), lab.h("div", {}, svg));
  panel.append(
    lab.h("div", { class: "controls" },
      slider("n", "tokens", data.lengths, lab.tokens), slider("heads", "heads × batch", data.heads, lab.whole)),
    lab.h("div", { class: "controls" }, choice("d", "head_dim", data.head_dims), choice("dtype", "numbers", data.dtypes),
      choice("device", "device", data.devices.map((one) => one.name.replace("NVIDIA ", "")))),
    facts,
    lab.h("div", { class: "charts" }, chart("memory without the inputs", memory), chart("least time", time)),
    say,
    lab.h("ul", { class: "legend" }, key("of-b", "standard"), key("of-a", "flash"), key("of-c", "flash as measured on an H200")));
  lab.at("length-note").textContent = "Forward, no mask. Bytes and operations are those of onchip.lab.traffic, with each tensor "
    + "moved as rarely as its algorithm allows. The least time is that of the slowest unit, if all others "
    + "overlap with it (onchip.cost.roofline). Measured: onchip's kernel in bf16, with as many heads as fill the GPU.";

  // {memory, seconds, binds} of a kind at a length: the rule of roofline.bound.
  function cell(kind, n = chosen.n) {
    const { d, dtype } = chosen, heads = data.heads[chosen.heads], rates = device();
    const [bytes, flops, exps, extra] = data.counts[kind][dtype][d][n];
    const products = rates.has_tensor[dtype] ? "the tensor cores" : "the fp32 lanes";
    const alone = {
      HBM: (heads * bytes) / rates.bytes_s, [products]: (heads * flops) / rates.flops[dtype],
      "the exp unit": (heads * exps) / rates.exps_s, "the launch": rates.launch_s,
    };
    const binds = Object.keys(alone).reduce((a, b) => (alone[b] > alone[a] ? b : a));
    return { memory: heads * extra, seconds: alone[binds], binds };
  }

  // [position of a length, seconds] of onchip's kernel as measured.
  function measured() {
    const { dtype, d } = chosen, { measured: known } = data, rates = known.tflops[data.head_dims[d]];
    if (device().name !== known.device || data.dtypes[dtype] !== known.dtype || !rates) return [];
    return known.lengths.map((n, i) => {
      const at = data.lengths.indexOf(n), flops = data.counts.flash[dtype][d][at][1] * data.heads[chosen.heads];
      return [at, flops / (rates[i] * 1e12)];
    });
  }

  function draw() {
    const standard = cell("standard"), flash = cell("flash");
    for (const [kind, now] of [["standard", standard], ["flash", flash]]) {
      facts.update(`${kind}-memory`, lab.bytes(now.memory));
      facts.update(`${kind}-time`, lab.seconds(now.seconds));
    }
    const fits = standard.memory <= device().memory_bytes ? "" : ` and does not fit into its ${lab.bytes(device().memory_bytes)}`;
    say.textContent = `At ${lab.tokens(data.lengths[chosen.n])} tokens on an ${device().name}, standard attention waits for `
      + `${standard.binds}${fits}; flash waits for ${flash.binds}.`;
    renders.forEach((render) => render());
  }

  // Both axes are logarithms; value(kind, n) is drawn, limit is drawn as a horizontal line.
  function plot(svg, width, value, format, { limit, dots = [] } = {}) {
    const all = KINDS.flatMap(([kind]) => data.lengths.map((_, n) => value(kind, n))).concat(limit ?? []);
    const low = Math.floor(Math.log10(Math.min(...all))), high = Math.ceil(Math.log10(Math.max(...all)));
    const x = (n) => LEFT + (n / (data.lengths.length - 1)) * (width - LEFT - 10);
    const y = (v) => TOP + ((high - Math.log10(v)) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const level = (v, kind) => lab.s("line", { class: kind, x1: LEFT, x2: width, y1: y(v), y2: y(v) });
    const parts = [];
    for (let p = low; p <= high; p += high - low > 7 ? 2 : 1) {
      const label = format(10 ** p).replace(/\.0+ /, " ");
      parts.push(level(10 ** p, "axis"), lab.text(LEFT - 6, y(10 ** p) + 4, label, "soft tiny", "end"));
    }
    data.lengths.forEach((n, i) => { if (i % 2 === 0) parts.push(lab.text(x(i), HEIGHT - 8, lab.tokens(n), "soft tiny", "middle")); });
    parts.push(lab.s("line", { class: "now faint", x1: x(chosen.n), x2: x(chosen.n), y1: TOP, y2: HEIGHT - BOTTOM }));
    if (limit) parts.push(level(limit, "limit"), lab.text(LEFT + 4, y(limit) - 5, `all of its ${format(limit)}`, "soft tiny"));
    for (const [kind, colour] of KINDS) {
      const path = data.lengths.map((_, n) => `${n ? "L" : "M"}${x(n).toFixed(1)} ${y(value(kind, n)).toFixed(1)}`).join("");
      parts.push(lab.s("path", { class: `curve of-${colour}`, d: path }),
        lab.s("circle", { class: `dot of-${colour}`, cx: x(chosen.n), cy: y(value(kind, chosen.n)), r: 5 }));
    }
    parts.push(...dots.map(([n, v]) => lab.s("circle", { class: "measured", cx: x(n), cy: y(v), r: 4 })));
    svg.replaceChildren(...parts);
  }

  const renders = [
    lab.sized(memory, HEIGHT, (width) => plot(memory, width, (kind, n) => cell(kind, n).memory, lab.bytes, { limit: device().memory_bytes })),
    lab.sized(time, HEIGHT, (width) => plot(time, width, (kind, n) => cell(kind, n).seconds, lab.seconds, { dots: measured() })),
  ];
  draw();
  return { cell, chosen, measured };
};

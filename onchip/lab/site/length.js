"use strict";
// Memory and least time against length: bytes and operations per head as counted, rates as published or measured.

lab.figures.length = (panel, data) => {
  const chosen = { n: 7, d: 1, heads: 5, dtype: 0, device: 2 };
  const KINDS = [["standard", "b"], ["flash", "a"]];
  const pick = (name) => (x) => { chosen[name] = x; draw(); };
  const numbered = (list) => list.map((text, i) => [i, String(text)]);
  const facts = lab.facts([["standard-memory", "standard: memory", "of-b"], ["flash-memory", "flash: memory", "of-a"], ["standard-time", "standard: least time", "of-b"], ["flash-time", "flash: least time", "of-a"]]);
  const memory = lab.s("svg", { role: "img" }), time = lab.s("svg", { role: "img" }), say = lab.h("p", { class: "say", role: "status", id: "length-say" });
  panel.append(
    lab.h("div", { class: "controls" },
      lab.slider("length-n", "tokens", { max: data.lengths.length - 1, value: chosen.n, show: (i) => lab.tokens(data.lengths[i]) }, pick("n")),
      lab.slider("length-heads", "heads × batch", { max: data.heads.length - 1, value: chosen.heads, show: (i) => lab.whole(data.heads[i]) }, pick("heads"))),
    lab.h("div", { class: "controls" },
      lab.choice("length-d", "head_dim", numbered(data.head_dims), chosen.d, pick("d")),
      lab.choice("length-dtype", "numbers", numbered(data.dtypes), chosen.dtype, pick("dtype")),
      lab.choice("length-device", "device", data.devices.map((d, i) => [i, d.name.replace("NVIDIA ", "")]), chosen.device, pick("device"))),
    facts,
    lab.h("div", { class: "charts" }, lab.h("div", {}, lab.h("h3", {}, "memory beside the inputs"), lab.h("div", {}, memory)), lab.h("div", {}, lab.h("h3", {}, "least time"), lab.h("div", {}, time))),
    say,
    lab.h("ul", { class: "legend" }, lab.h("li", {}, lab.h("i", { class: "key of-b" }), "standard"), lab.h("li", {}, lab.h("i", { class: "key of-a" }), "flash"),
      lab.h("li", {}, lab.h("i", { class: "key of-c" }), "flash as measured on an H200")));
  lab.at("length-note").textContent = `Forward, no mask. Bytes and operations are those of onchip.iomodel.traffic, each tensor moved as rarely as its algorithm allows; the least time is that of the slowest unit, if all others hide behind it (onchip.iomodel.roofline). Measured: onchip's kernel in bf16, with as many heads as fill the GPU.`;

  // {memory, seconds, binds} of a kind at a length; the rules of roofline.bound.
  function cell(kind, n = chosen.n, c = chosen) {
    const [bytes, flops, exps, extra] = data.counts[kind][c.dtype][c.d][n], heads = data.heads[c.heads], device = data.devices[c.device];
    const alone = { HBM: (heads * bytes) / device.bytes_s, "the tensor cores": (heads * flops) / device.flops[c.dtype], "the exp unit": (heads * exps) / device.exps_s, "the launch": device.launch_s };
    if (!device.has_tensor[c.dtype]) { alone["the fp32 lanes"] = alone["the tensor cores"]; delete alone["the tensor cores"]; }
    const binds = Object.keys(alone).reduce((a, b) => (alone[b] > alone[a] ? b : a));
    return { memory: heads * extra, seconds: alone[binds], binds };
  }

  function measured() {
    const { device, dtype, d } = chosen, rates = data.measured.tflops[data.head_dims[d]];
    if (data.devices[device].name !== data.measured.device || data.dtypes[dtype] !== data.measured.dtype || !rates) return [];
    return data.measured.lengths.map((n, i) => {
      const at = data.lengths.indexOf(n), flops = data.counts.flash[dtype][d][at][1] * data.heads[chosen.heads];
      return [at, flops / (rates[i] * 1e12)];
    });
  }

  function draw() {
    const now = Object.fromEntries(KINDS.map(([kind]) => [kind, cell(kind)])), device = data.devices[chosen.device];
    for (const [kind] of KINDS) {
      facts.tell(`${kind}-memory`, lab.bytes(now[kind].memory));
      facts.tell(`${kind}-time`, lab.seconds(now[kind].seconds));
    }
    const fits = now.standard.memory <= device.memory_bytes ? "" : ` and does not fit into its ${lab.bytes(device.memory_bytes)}`;
    say.textContent = `At ${lab.tokens(data.lengths[chosen.n])} tokens on an ${device.name}, standard attention waits for ${now.standard.binds}${fits}; flash waits for ${now.flash.binds}.`;
    renders.forEach((render) => render());
  }

  // Both axes are logarithms; get(kind, n) is the value, limit a line that nothing may cross.
  function plot(svg, width, get, format, limit, dots) {
    const HEIGHT = 250, LEFT = 54, BOTTOM = 26, TOP = 10, last = data.lengths.length - 1;
    const all = KINDS.flatMap(([kind]) => data.lengths.map((_, n) => get(kind, n))).concat(limit ?? []);
    const low = Math.floor(Math.log10(Math.min(...all))), high = Math.ceil(Math.log10(Math.max(...all)));
    const x = (n) => LEFT + (n / last) * (width - LEFT - 10), y = (v) => TOP + ((high - Math.log10(v)) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const parts = [], text = (tx, ty, content, anchor, kind = "soft tiny") => { const label = lab.s("text", { x: tx, y: ty, "text-anchor": anchor, class: kind }); label.textContent = content; parts.push(label); };
    for (let p = low; p <= high; p += high - low > 7 ? 2 : 1) {
      parts.push(lab.s("line", { class: "axis", x1: LEFT, x2: width, y1: y(10 ** p), y2: y(10 ** p) }));
      text(LEFT - 6, y(10 ** p) + 4, format(10 ** p).replace(/\.0+ /, " "), "end");
    }
    data.lengths.forEach((n, i) => { if (i % 2 === 0) text(x(i), HEIGHT - 8, lab.tokens(n), "middle"); });
    parts.push(lab.s("line", { class: "now faint", x1: x(chosen.n), x2: x(chosen.n), y1: TOP, y2: HEIGHT - BOTTOM }));
    if (limit && limit < 10 ** high) {
      parts.push(lab.s("line", { class: "limit", x1: LEFT, x2: width, y1: y(limit), y2: y(limit) }));
      text(LEFT + 4, y(limit) - 5, `all of its ${format(limit)}`, "start");
    }
    for (const [kind, colour] of KINDS) {
      parts.push(lab.s("path", { class: `curve of-${colour}`, d: data.lengths.map((_, n) => `${n ? "L" : "M"}${x(n).toFixed(1)} ${y(get(kind, n)).toFixed(1)}`).join("") }));
      parts.push(lab.s("circle", { class: `dot of-${colour}`, cx: x(chosen.n), cy: y(get(kind, chosen.n)), r: 5 }));
    }
    for (const [n, v] of dots ?? []) parts.push(lab.s("circle", { class: "measured", cx: x(n), cy: y(v), r: 4 }));
    svg.replaceChildren(...parts);
  }

  const renders = [
    lab.sized(memory, 250, (width) => { plot(memory, width, (kind, n) => cell(kind, n).memory, lab.bytes, data.devices[chosen.device].memory_bytes); memory.setAttribute("aria-label", "Memory against length, both logarithmic"); }),
    lab.sized(time, 250, (width) => { plot(time, width, (kind, n) => cell(kind, n).seconds, lab.seconds, null, measured()); time.setAttribute("aria-label", "Least time against length, both logarithmic"); }),
  ];
  draw();
  return { cell, chosen, measured };
};

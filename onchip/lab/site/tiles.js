"use strict";
// The tile loops of the papers, step by step as kernels/papers ran them: who is loaded, who is written, and what the
// running state of a row is after each tile.

lab.figures.tiles = (panel, data) => {
  const { seqlen, tile, rows, shown } = data, count = seqlen / tile, HEAT = data.patches;
  const ORDERS = [["v1", "v1, keys outside"], ["v2", "v2, queries outside"]];
  const MASKS = { none: "no mask", causal: "causal", window: "window", blocks: "block-sparse" };
  let order = "v2", mask = "causal", row = 11, frame = 0;
  const run = () => data.runs[order][mask];

  const svg = lab.s("svg", { role: "img" });
  const facts = lab.facts([["read", "read from HBM", "of-a"], ["written", "written to HBM", "of-b"], ["visits", "tiles visited"], ["skipped", "tiles never touched"]]);
  const fields = {}, list = lab.h("dl", {});
  for (const [name, text] of [["m", "m"], ["l", "l"], ["acc", "acc"], ["out", "out"], ["exact", "finally"]]) {
    fields[name] = lab.h("dd", { "data-value": name });
    list.append(lab.h("dt", {}, text), fields[name]);
  }
  const title = lab.h("h3", {}), meters = lab.h("div", { class: "meters" });
  const state = lab.h("div", { class: "state both" }, title, list);
  const say = lab.h("p", { class: "say", id: "tiles-say" });
  const player = lab.player("tiles-step", 1, (i) => { frame = i; draw(); }, { pace: 5, label: "Tile" });
  const rowSlider = lab.slider("tiles-row", "watch row", { max: rows.length - 1, value: row, show: (i) => `${rows[i]}` }, (i) => { row = i; draw(); });
  panel.append(
    lab.h("div", { class: "controls" },
      lab.choice("tiles-order", "loop", ORDERS, order, (x) => { order = x; restart(); }),
      lab.choice("tiles-mask", "mask", Object.entries(MASKS), mask, (x) => { mask = x; restart(); })),
    lab.h("div", { class: "tile-view" }, lab.h("div", { class: "matrix" }, svg), lab.h("div", { class: "beside" }, rowSlider, state, facts, meters)),
    player.element, say);
  lab.at("tiles-note").textContent = `Recorded from paper_v1 and paper_v2 over ${lab.whole(seqlen)} tokens, head_dim ${data.head_dim}, ${data.dtype}, tiles of ${tile} × ${tile}; the bytes are those of their ledgers. “Finally” is what onchip.attention gives. Of acc and out the first ${shown} of ${data.head_dim} numbers are shown. v1 keeps acc divided by l.`;

  function restart() {
    const steps = run().steps.length;
    player.reset(steps, { text: (i) => `tile ${i + 1} of ${steps}`, at: Math.min(steps - 1, Math.round(steps * 0.45)) });
  }

  // The last state of the watched row up to this step, and whether this very step made it.
  function watched() {
    const { states } = run();
    for (let i = frame; i >= 0; i--) {
      const found = states[i].find((one) => one[0] === row);
      if (found) return { m: found[1], l: found[2], acc: found.slice(3), now: i === frame };
    }
    return { m: "-inf", l: 0, acc: new Array(shown).fill(0), now: false };
  }

  function draw() {
    const { steps } = run(), [i, j, read, written] = steps[frame], s = watched();
    const number = (x) => lab.number(typeof x === "string" ? Number(x.replace("inf", "Infinity")) : x, 4);
    title.textContent = `row ${rows[row]} after this tile`;
    fields.m.textContent = number(s.m);
    fields.l.textContent = number(s.l);
    fields.acc.textContent = s.acc.map(number).join("  ");
    fields.out.textContent = (order === "v1" ? s.acc : s.acc.map((x) => (s.l ? x / s.l : 0))).map(number).join("  ");
    fields.exact.textContent = data.exact[mask][row].map(number).join("  ");
    state.classList.toggle("fresh-state", s.now);
    facts.tell("read", lab.bytes(read));
    facts.tell("written", lab.bytes(written));
    facts.tell("visits", `${frame + 1} of ${steps.length}`);
    facts.tell("skipped", `${count * count - steps.length} of ${count * count}`);
    measure(read + written);
    say.textContent = sentence(i, j);
    render();
  }

  function sentence(i, j) {
    const { steps } = run(), before = steps[frame - 1];
    const held = order === "v1" ? `Keys ${j * tile} to ${(j + 1) * tile - 1} stay on chip` : `Queries ${i * tile} to ${(i + 1) * tile - 1} stay on chip`;
    if (order === "v1") return `${held}; q, out, l and m of rows ${i * tile} to ${(i + 1) * tile - 1} come, and out, l and m go back.`;
    const last = !steps[frame + 1] || steps[frame + 1][0] !== i;
    return `${before && before[0] === i ? held : `${held} from now on`}; keys ${j * tile} to ${(j + 1) * tile - 1} come${last ? ", and out is written, once" : ""}.`;
  }

  // Bytes so far against the totals of both loops and of standard attention.
  function measure(sofar) {
    const totals = [["v1", data.runs.v1[mask].total], ["v2", data.runs.v2[mask].total], ["standard", data.standard[mask]]];
    const most = Math.max(...totals.map(([, bytes]) => bytes));
    meters.replaceChildren(...totals.map(([name, bytes]) => {
      const bar = lab.h("i", {}), part = lab.h("b", {});
      bar.style.width = `${(100 * bytes) / most}%`;
      part.style.width = `${name === order ? (100 * sofar) / bytes : 100}%`;
      bar.append(part);
      return lab.h("div", { class: `meter ${name === order ? "chosen-meter" : ""}` }, lab.h("span", {}, name), lab.h("span", { class: "track" }, bar), lab.h("span", { class: "mono", "data-total": name }, lab.bytes(bytes)));
    }));
  }

  function paint(width) {
    const { steps } = run(), pad = 30, size = (width - pad - 30) / count, [i, j] = steps[frame], parts = [];
    const visited = new Map(steps.map(([a, b], n) => [`${a} ${b}`, n]));
    const strip = (x, y, w, h, kind) => parts.push(lab.s("rect", { x, y, width: w, height: h, rx: 4, class: kind }));
    const text = (x, y, content, kind = "soft tiny", anchor = "middle") => { const label = lab.s("text", { x, y, "text-anchor": anchor, class: kind }); label.textContent = content; parts.push(label); };
    text(pad + count * size / 2, 10, "K, V");
    text(12, pad + count * size / 2 + 4, "Q");
    text(width - 7, pad + count * size / 2 + 4, "O");
    for (let a = 0; a < count; a++) {
      strip(pad + a * size + 1.5, 15, size - 3, 10, a === j ? "strip key on" : "strip");
      strip(20, pad + a * size + 1.5, 7, size - 3, a === i ? "strip q on" : "strip");
      const ended = steps.slice(0, frame + 1).some((s) => s[0] === a) && (order === "v1" || !steps.slice(frame + 1).some((s) => s[0] === a));
      strip(pad + count * size + 4, pad + a * size + 1.5, 7, size - 3, ended ? (a === i && (order === "v1" || ended) ? "strip o on" : "strip o done") : "strip");
      for (let b = 0; b < count; b++) {
        const n = visited.get(`${a} ${b}`), x = pad + b * size + 1.5, y = pad + a * size + 1.5;
        const kind = n === undefined ? "tile never" : n < frame ? "tile done" : n === frame ? "tile on" : "tile";
        strip(x, y, size - 3, size - 3, kind);
        if (n === frame) heat(parts, a, b, x, y, size - 3);
      }
    }
    const y = pad + (rows[row] / seqlen) * count * size;
    parts.push(lab.s("line", { x1: pad - 2, x2: pad + count * size + 2, y1: y, y2: y, class: "watch" }));
    svg.replaceChildren(...parts);
    svg.setAttribute("aria-label", `Tile ${frame + 1} of ${steps.length}: rows ${i * tile} to ${(i + 1) * tile - 1}, keys ${j * tile} to ${(j + 1) * tile - 1}`);
  }

  // The scores of the tile that exists now: the largest of each patch, a dot where all are hidden.
  function heat(parts, a, b, x, y, size) {
    const digits = data.scores[mask][a * count + b], cell = size / HEAT;
    for (let n = 0; n < HEAT * HEAT; n++) {
      if (digits[n] === ".") continue;
      parts.push(lab.s("rect", { x: x + (n % HEAT) * cell, y: y + Math.floor(n / HEAT) * cell, width: cell + 0.3, height: cell + 0.3, class: "heat", "fill-opacity": (parseInt(digits[n], 16) + 1) / 16 }));
    }
  }

  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientY - box.top - 30) / (box.width - 60)) * rows.length;
    if (at >= 0 && at < rows.length) { row = Math.floor(at); rowSlider.put(row); draw(); }
  });
  let render = () => {};
  render = lab.sized(svg, (width) => width - 60 + 34, paint);
  restart();
  return { player, watched, get run() { return run(); } };
};

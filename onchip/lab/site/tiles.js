"use strict";
// The tile loops of the papers, step by step, recorded from lab/published: the tiles that are loaded and written, and the
// running state of a row after each tile.

lab.figures.tiles = (panel, data) => {
  const { seqlen, tile, rows, shown, patches } = data, count = seqlen / tile;
  const ORDERS = [["v1", "v1, keys outside"], ["v2", "v2, queries outside"]];
  const MASKS = [["none", "no mask"], ["causal", "causal"], ["window", "window"], ["blocks", "block-sparse"]];
  const LOOPS = {
    v1: "for each tile of K, V:           # kept on chip\n    for each tile of Q:\n        load O, l, m;  fold;  store O, l, m",
    v2: "for each tile of Q:              # kept on chip\n    for each visible tile of K, V:\n        fold into m, l, acc\n    store O = acc / l",
  };
  const PAD = 30, RIGHT = 30;  // margins of the matrix, for loaded and written tiles
  let order = "v2", mask = "causal", row = 11, frame = 0;
  const run = () => data.runs[order][mask];
  const range = (i) => `${i * tile} to ${(i + 1) * tile - 1}`;
  const number = (x) => lab.number(typeof x === "string" ? Number(x.replace("inf", "Infinity")) : x, 4);
  const several = (list) => list.map(number).join("  ");

  const svg = lab.s("svg", { role: "img" }), title = lab.h("h3", {}), list = lab.h("dl", {}), fields = {};
  for (const name of ["m", "l", "acc", "out", "finally"]) {
    fields[name] = lab.h("dd", { "data-value": name });
    list.append(lab.h("dt", {}, name), fields[name]);
  }
  const facts = lab.facts([["read", "read from HBM", "of-a"], ["written", "written to HBM", "of-b"],
    ["visits", "tiles visited"], ["skipped", "tiles skipped"]]);
  const state = lab.h("div", { class: "state both" }, title, list), meters = lab.h("div", { class: "meters" });
  const loop = lab.h("pre", { class: "loop" });
  const say = lab.h("p", { class: "say", id: "tiles-say" });
  const player = lab.player("tiles-step", 1, (i) => { frame = i; draw(); }, { pace: 5, label: "Tile" });
  const watch = lab.slider("tiles-row", "watch row", { max: rows.length - 1, value: row, show: (i) => `${rows[i]}` },
    (i) => { row = i; draw(); });
  panel.append(
    lab.h("div", { class: "controls" },
      lab.choice("tiles-order", "loop", ORDERS, order, (x) => { order = x; restart(); }),
      lab.choice("tiles-mask", "mask", MASKS, mask, (x) => { mask = x; restart(); })),
    lab.h("div", { class: "tile-view" },
      lab.h("div", { class: "matrix" }, lab.h("div", {}, svg), loop), lab.h("div", { class: "beside" }, watch, state, facts, meters)),
    player.element, say);
  lab.at("tiles-note").textContent = `Recorded from paper_v1 and paper_v2 over ${lab.whole(seqlen)} tokens, head_dim ${data.head_dim}, `
    + `${data.dtype}, tiles of ${tile} × ${tile}; the bytes are those of their ledgers. “finally” is what onchip.attention `
    + `gives. Of acc and out the first ${shown} of ${data.head_dim} numbers are shown; `
    + `v1 stores acc / l, and visits tiles that causal and window hide.`;

  function restart() {
    const steps = run().steps.length;
    loop.textContent = LOOPS[order];
    player.reset(steps, { text: (i) => `tile ${i + 1} of ${steps}`, at: Math.min(steps - 1, Math.round(steps * 0.45)) });
  }

  // The last state of the watched row up to this step, and whether this step changed it.
  function watched() {
    const { states } = run();
    for (let i = frame; i >= 0; i--) {
      const found = states[i].find(([place]) => place === row);
      if (found) return { m: found[1], l: found[2], acc: found.slice(3), now: i === frame };
    }
    return { m: "-inf", l: 0, acc: new Array(shown).fill(0), now: false };
  }

  function draw() {
    const { steps } = run(), [, , read, written] = steps[frame], s = watched();
    title.textContent = `row ${rows[row]} after this tile`;
    fields.m.textContent = number(s.m);
    fields.l.textContent = number(s.l);
    fields.acc.textContent = several(s.acc);
    fields.out.textContent = several(order === "v1" ? s.acc : s.acc.map((x) => x / (s.l || 1)));
    fields.finally.textContent = several(data.exact[mask][row]);
    state.classList.toggle("fresh-state", s.now);
    facts.update("read", lab.bytes(read));
    facts.update("written", lab.bytes(written));
    facts.update("visits", `${frame + 1} of ${steps.length}`);
    facts.update("skipped", `${count * count - steps.length} of ${count * count}`);
    measure(read + written);
    say.textContent = sentence();
    render();
  }

  function sentence() {
    const { steps } = run(), [i, j] = steps[frame], first = steps[frame - 1]?.[0] !== i, last = steps[frame + 1]?.[0] !== i;
    if (order === "v1") return `Keys ${range(j)} stay on chip; q, out, l and m of rows ${range(i)} are read, and out, l and m are written.`;
    return `Queries ${range(i)} stay on chip${first ? " from now on" : ""}; keys ${range(j)} are read${last ? ", and out is written once" : ""}.`;
  }

  // Bytes so far against the totals of both loops and of standard attention.
  function measure(sofar) {
    const totals = { v1: data.runs.v1[mask].total, v2: data.runs.v2[mask].total, standard: data.standard[mask] };
    const most = Math.max(...Object.values(totals));
    meters.replaceChildren(...Object.entries(totals).map(([name, bytes]) => {
      const part = lab.h("b", {}), bar = lab.h("i", {}, part), mine = name === order;
      bar.style.width = `${(100 * bytes) / most}%`;
      part.style.width = `${mine ? (100 * sofar) / bytes : 100}%`;
      return lab.h("div", { class: mine ? "meter chosen-meter" : "meter" }, lab.h("span", {}, name),
        lab.h("span", { class: "track" }, bar), lab.h("span", { class: "mono", "data-total": name }, lab.bytes(bytes)));
    }));
  }

  function paint(width) {
    const size = (width - PAD - RIGHT) / count, far = PAD + count * size, middle = PAD + (count * size) / 2 + 4;
    const y = PAD + (rows[row] / seqlen) * count * size, [i, j] = run().steps[frame];
    svg.replaceChildren(lab.text(middle, 10, "K, V", "soft tiny", "middle"), lab.text(12, middle, "Q", "soft tiny", "middle"),
      lab.text(width - 7, middle, "O", "soft tiny", "middle"), ...strips(size, far), ...matrix(size),
      lab.s("line", { x1: PAD - 2, x2: far + 2, y1: y, y2: y, class: "watch" }));
    svg.setAttribute("aria-label", `Tile ${frame + 1} of ${run().steps.length}: rows ${range(i)}, keys ${range(j)}`);
  }

  // On chip: a tile of K and V, a tile of Q. In HBM: the part of O that has been written.
  function strips(size, far) {
    const { steps } = run(), [i, j] = steps[frame], long = size - 3;
    const begun = (a) => steps.slice(0, frame + 1).some((step) => step[0] === a);
    const ended = (a) => begun(a) && (order === "v1" || !steps.slice(frame + 1).some((step) => step[0] === a));
    const strip = (x, y, width, height, kind) => lab.s("rect", { x, y, width, height, rx: 4, class: `strip ${kind}` });
    return Array.from({ length: count }, (_, a) => {
      const along = PAD + a * size + 1.5, out = !ended(a) ? "" : a === i ? "o on" : "o done";
      return [strip(along, 15, long, 10, a === j ? "key on" : ""), strip(20, along, 7, long, a === i ? "q on" : ""),
        strip(far + 4, along, 7, long, out)];
    }).flat();
  }

  function matrix(size) {
    const visits = new Map(run().steps.map(([a, b], n) => [a * count + b, n])), parts = [];
    for (let place = 0; place < count * count; place++) {
      const n = visits.get(place), x = PAD + (place % count) * size + 1.5, y = PAD + Math.floor(place / count) * size + 1.5;
      const kind = n === undefined ? "never" : n < frame ? "done" : n === frame ? "on" : "";
      parts.push(lab.s("rect", { x, y, width: size - 3, height: size - 3, rx: 4, class: `tile ${kind}` }));
      if (n === frame) parts.push(...heat(data.scores[mask][place], x, y, (size - 3) / patches));
    }
    return parts;
  }

  // The scores of the current tile: the largest of each patch, empty if all of it is hidden.
  function heat(digits, x, y, cell) {
    return [...digits].map((digit, n) => (digit === "." ? null : lab.s("rect", {
      class: "heat", x: x + (n % patches) * cell, y: y + Math.floor(n / patches) * cell, width: cell + 0.3, height: cell + 0.3,
      "fill-opacity": (parseInt(digit, 16) + 1) / 16,
    }))).filter(Boolean);
  }

  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const at = Math.floor(((event.clientY - box.top - PAD) / (box.width - PAD - RIGHT)) * rows.length);
    if (!(at in rows)) return;
    row = at;
    watch.put(row);
    draw();
  });
  let render = () => {};
  render = lab.sized(svg, (width) => width - RIGHT + 4, paint);
  restart();
  return { player, watched, get run() { return run(); } };
};

"use strict";
// A race at one bandwidth: what standard attention, FlashAttention and FlashAttention-2 move between HBM and the chip.

lab.figures.bytes = (panel, data) => {
  const FRAMES = 360, names = Object.keys(data.runs);
  let length = data.lengths.length - 3, device = 2, clock = 1;
  const lanes = names.map(lane);
  const levels = lab.h("table", { class: "levels" });
  const player = lab.player("bytes-time", FRAMES, (frame) => { clock = frame / (FRAMES - 1); draw(); },
    { pace: 45, label: "Time", text: () => lab.seconds(clock * slowest()) });
  const say = lab.h("p", { class: "say" });
  panel.append(
    lab.h("div", { class: "controls" },
      lab.choice("bytes-device", "GPU", data.devices.map((d, i) => [i, d.name.replace("NVIDIA ", "")]), device, (x) => { device = x; table(); player.go(player.frame); }),
      lab.slider("bytes-length", "tokens", { max: data.lengths.length - 1, value: length, show: (i) => lab.tokens(data.lengths[i]) }, (x) => { length = x; player.go(player.frame); })),
    lab.h("div", { class: "race" }, lanes.map((one) => one.box)),
    player.element, say, levels);
  lab.at("bytes-note").textContent = `One head, head_dim ${data.head_dim}, ${data.dtype}, ${lab.bytes(data.sram_bytes)} of SRAM, forward. To ${lab.tokens(data.executed)} tokens the bytes were counted while the paper kernels ran; beyond, by onchip.iomodel.traffic, which equals those ledgers byte for byte.`;

  const run = (name) => data.runs[name][length];
  const rate = () => data.devices[device].levels[0].bytes_s;
  const total = (name) => run(name).phases.reduce((sum, phase) => sum + phase.read + phase.write, 0);
  function slowest() { return Math.max(...names.map(total)) / rate(); }

  function lane(name) {
    const canvas = lab.h("canvas", { role: "img" }), amount = lab.h("b", { "data-bytes": name }), all = lab.h("span", { class: "soft", "data-total": name }), note = lab.h("span", { class: "note" }), parts = lab.h("ul", { class: "parts" });
    const box = lab.h("div", { class: "lane-box" }, lab.h("h3", {}, data.titles[name]), lab.h("p", { class: "amount" }, amount, " ", all), canvas, note, parts);
    return { name, canvas, amount, all, note, parts, box };
  }

  // After so many bytes: which phase, and how much of it was read and written.
  function progress(name, moved) {
    let left = moved, read = 0, write = 0, now = null;
    for (const phase of run(name).phases) {
      const all = phase.read + phase.write, share = Math.min(1, left / all);
      read += phase.read * share;
      write += phase.write * share;
      left -= all * share;
      now = phase;
      if (share < 1) break;
    }
    return { read, write, phase: now };
  }

  function draw() {
    const moved = clock * slowest() * rate(), style = getComputedStyle(document.documentElement);
    const inks = Object.fromEntries(["--a", "--b", "--a-soft", "--b-soft", "--ink", "--on", "--faint"].map((name) => [name, style.getPropertyValue(name).trim()]));
    for (const one of lanes) {
      const all = total(one.name), mine = Math.min(moved, all), done = moved >= all * (1 - 1e-9);
      const p = progress(one.name, mine);
      one.amount.textContent = lab.bytes(done ? all : mine);
      one.all.textContent = done ? "in all" : `of ${lab.bytes(all)}`;
      one.note.textContent = done ? `done after ${lab.seconds(all / rate())}` : p.phase.what;
      one.box.classList.toggle("done", done);
      stream(one, p, mine / Math.max(...names.map(total)), done, (name) => inks[name]);
      list(one);
    }
    const [most, , least] = names.map(total);
    say.textContent = `Standard attention moves ${lab.significant(most / least)} times what FlashAttention-2 moves, for the same numbers.`;
  }

  function list(one) {
    const tensors = Object.entries(run(one.name).tensors), most = Math.max(...names.flatMap((name) => Object.values(run(name).tensors).map(([read, write]) => read + write)));
    one.parts.replaceChildren(...tensors.map(([tensor, [read, write]]) => {
      const bar = lab.h("span", { class: "two" }, lab.h("i", { class: "reads" }), lab.h("i", { class: "writes" }));
      bar.children[0].style.width = `${(100 * read) / most}%`;
      bar.children[1].style.width = `${(100 * write) / most}%`;
      return lab.h("li", {}, lab.h("span", { class: "mono" }, tensor), bar, lab.h("span", { class: "mono soft" }, lab.bytes(read + write)));
    }));
  }

  // The chip above, HBM below, and drops between them: up what is read, down what is written. The bar in HBM grows with
  // the bytes, on one scale for all.
  function stream(one, { read, write, phase }, share, done, ink) {
    const { canvas } = one, scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const brush = canvas.getContext("2d");
    brush.scale(scale, scale);
    const box = (x, y, w, h, colour) => { brush.fillStyle = colour; brush.beginPath(); brush.roundRect(x, y, w, h, Math.min(7, w / 2)); brush.fill(); };
    const label = (text, y, colour) => { brush.fillStyle = colour; brush.fillText(text, width / 2, y); };
    brush.font = "600 11px system-ui, sans-serif";
    brush.textAlign = "center";
    const chip = Math.min(72, width * 0.4), top = 36, bottom = height - 34;
    if (!done && !lab.still.matches) drops(brush, phase, share, { middle: width / 2, chip, wide: width - 20, top, bottom }, ink);
    box(width / 2 - chip / 2, 4, chip, 30, ink(done ? "--a-soft" : "--a"));
    label("chip", 23, ink(done ? "--ink" : "--on"));
    box(0, bottom + 2, width, 32, ink("--faint"));
    box(0, bottom + 2, Math.max(3, width * share), 32, ink(one.name === "standard" ? "--b-soft" : "--a-soft"));
    label("HBM", height - 12, ink("--ink"));
    canvas.setAttribute("aria-label", `${data.titles[one.name]}: ${lab.bytes(read)} read, ${lab.bytes(write)} written`);
  }

  // Places are a low-discrepancy sequence: even, without a pattern.
  function drops(brush, phase, share, { middle, chip, wide, top, bottom }, ink) {
    const DROPS = 44, rising = Math.round((DROPS * phase.read) / (phase.read + phase.write));
    for (let n = 0; n < DROPS; n++) {
      const up = (n * 7) % DROPS < rising, at = (share * 34 + n * 0.56984) % 1, along = up ? 1 - at : at;
      const x = middle + (((n * 0.75488) % 1) - 0.5) * (chip * 0.9 + along * (wide - chip * 0.9));
      brush.fillStyle = ink(up ? "--a" : "--b");
      brush.beginPath();
      brush.arc(x, top + along * (bottom - top), 2.4, 0, 7);
      brush.fill();
    }
  }

  function table() {
    const rows = data.devices[device].levels, most = Math.log(Math.max(...rows.map((r) => r.bytes_s ?? 1)) / 2e11);
    levels.replaceChildren(
      lab.h("caption", {}, `Memories of an ${data.devices[device].name}: the smaller, the faster`),
      lab.h("thead", {}, lab.h("tr", {}, ["", "holds", "bandwidth", "", "latency"].map((text) => lab.h("th", { scope: "col" }, text)))),
      lab.h("tbody", {}, rows.slice().reverse().map((level) => {
        const bar = lab.h("i", { class: "speed" });
        bar.style.width = `${level.bytes_s ? (100 * Math.log(level.bytes_s / 2e11)) / most : 0}%`;
        return lab.h("tr", {}, lab.h("th", { scope: "row" }, level.name), lab.h("td", {}, lab.bytes(level.size_bytes)),
          lab.h("td", {}, level.bytes_s ? `${lab.bytes(level.bytes_s)}/s` : "not published"), lab.h("td", { class: "bar-cell" }, bar),
          lab.h("td", {}, level.latency_s ? `${lab.significant(level.latency_s * 1e9)} ns` : "–"));
      })));
  }

  table();
  lab.redraw.push(draw);
  new ResizeObserver(draw).observe(panel);
  player.go(Math.round(0.12 * FRAMES));
  return { player, total, progress, get length() { return length; } };
};

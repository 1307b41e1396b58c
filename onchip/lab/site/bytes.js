"use strict";
// A race at one bandwidth: the bytes that standard attention, FlashAttention and FlashAttention-2 move between HBM and
// the chip.

lab.figures.bytes = (panel, data) => {
  const FRAMES = 360, INKS = ["--a", "--b", "--a-soft", "--b-soft", "--ink", "--on", "--faint"];
  const names = Object.keys(data.runs);
  let length = data.lengths.length - 3, device = 2, clock = 1;
  const run = (name) => data.runs[name][length];
  const rate = () => data.devices[device].levels[0].bytes_s;
  const total = (name) => run(name).phases.reduce((sum, phase) => sum + phase.read + phase.write, 0);
  const most = () => Math.max(...names.map(total));

  const lanes = names.map(lane), levels = lab.h("table", { class: "levels" }), say = lab.h("p", { class: "say" });
  const player = lab.player("bytes-time", FRAMES, (frame) => { clock = frame / (FRAMES - 1); draw(); },
    { pace: 45, label: "Time", text: () => lab.seconds((clock * most()) / rate()) });
  const again = () => player.go(player.frame);
  const devices = data.devices.map((one, i) => [i, one.name.replace("NVIDIA ", "")]);
  const tokens = { max: data.lengths.length - 1, value: length, show: (i) => lab.tokens(data.lengths[i]) };
  panel.append(
    lab.h("div", { class: "controls" },
      lab.choice("bytes-device", "GPU", devices, device, (x) => { device = x; table(); again(); }),
      lab.slider("bytes-length", "tokens", tokens, (x) => { length = x; again(); })),
    lab.h("div", { class: "race" }, lanes.map((one) => one.box)),
    player.element, say, levels);
  lab.at("bytes-note").textContent = `One head, head_dim ${data.head_dim}, ${data.dtype}, ${lab.bytes(data.sram_bytes)} of SRAM, forward. `
    + `To ${lab.tokens(data.executed)} tokens the bytes were counted while the paper kernels ran; beyond, by onchip.lab.traffic, which `
    + "equals those ledgers byte for byte.";

  function lane(name) {
    const canvas = lab.h("canvas", { role: "img" }), amount = lab.h("b", { "data-bytes": name });
    const all = lab.h("span", { class: "soft", "data-total": name }), note = lab.h("span", { class: "note" });
    const parts = lab.h("ul", { class: "parts" }), title = lab.h("h3", {}, data.titles[name]);
    const box = lab.h("div", { class: "lane-box" }, title, lab.h("p", { class: "amount" }, amount, " ", all), canvas, note, parts);
    return { name, canvas, amount, all, note, parts, box };
  }

  // The phase after so many bytes, and the bytes read and written.
  function progress(name, moved) {
    let left = moved, read = 0, write = 0, phase = null;
    for (phase of run(name).phases) {
      const all = phase.read + phase.write, share = Math.min(1, left / all);
      read += phase.read * share;
      write += phase.write * share;
      left -= all * share;
      if (share < 1) break;
    }
    return { read, write, phase };
  }

  function draw() {
    const moved = clock * most(), style = getComputedStyle(document.documentElement);
    const inks = Object.fromEntries(INKS.map((name) => [name, style.getPropertyValue(name).trim()]));
    for (const one of lanes) {
      const all = total(one.name), mine = Math.min(moved, all), done = moved >= all * (1 - 1e-9), now = progress(one.name, mine);
      one.amount.textContent = lab.bytes(done ? all : mine);
      one.all.textContent = done ? "in all" : `of ${lab.bytes(all)}`;
      one.note.textContent = done ? `done after ${lab.seconds(all / rate())}` : now.phase.what;
      stream(one, now, mine / most(), done, (name) => inks[name]);
      list(one);
    }
    const ratio = lab.significant(total("standard") / total("v2"));
    say.textContent = `Standard attention moves ${ratio} times what FlashAttention-2 moves, for the same numbers.`;
  }

  function list(one) {
    const tensors = (name) => Object.entries(run(name).tensors);
    const largest = Math.max(...names.flatMap(tensors).map(([, [read, write]]) => read + write));
    one.parts.replaceChildren(...tensors(one.name).map(([tensor, [read, write]]) => {
      const bars = [["reads", read], ["writes", write]].map(([kind, bytes]) => {
        const bar = lab.h("i", { class: kind });
        bar.style.width = `${(100 * bytes) / largest}%`;
        return bar;
      });
      return lab.h("li", {}, lab.h("span", { class: "mono" }, tensor), lab.h("span", { class: "two" }, bars),
        lab.h("span", { class: "mono soft" }, lab.bytes(read + write)));
    }));
  }

  // The chip above, HBM below, and drops between them: upwards for reads, downwards for writes. The bar in HBM grows with
  // the bytes, on one scale for all.
  function stream(one, { read, write, phase }, share, done, ink) {
    const { canvas } = one, scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const brush = canvas.getContext("2d"), chip = Math.min(72, width * 0.4), top = 36, bottom = height - 34;
    const box = (x, y, w, h, colour) => {
      brush.fillStyle = colour;
      brush.beginPath();
      brush.roundRect(x, y, w, h, Math.min(7, w / 2));
      brush.fill();
    };
    const label = (text, y, colour) => { brush.fillStyle = colour; brush.fillText(text, width / 2, y); };
    brush.scale(scale, scale);
    brush.font = "600 11px system-ui, sans-serif";
    brush.textAlign = "center";
    if (!done && !lab.still.matches) drops(brush, phase, share, { middle: width / 2, chip, wide: width - 20, top, bottom }, ink);
    box(width / 2 - chip / 2, 4, chip, 30, ink(done ? "--a-soft" : "--a"));
    label("chip", 23, ink(done ? "--ink" : "--on"));
    box(0, bottom + 2, width, 32, ink("--faint"));
    box(0, bottom + 2, Math.max(3, width * share), 32, ink(one.name === "standard" ? "--b-soft" : "--a-soft"));
    label("HBM", height - 12, ink("--ink"));
    canvas.setAttribute("aria-label", `${data.titles[one.name]}: ${lab.bytes(read)} read, ${lab.bytes(write)} written`);
  }

  // Positions are a low-discrepancy sequence: even, without a pattern.
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

  // Bars are logarithms of the bandwidth, from a tenth of the slowest on.
  function table() {
    const { name, levels: rows } = data.devices[device], known = rows.map((row) => row.bytes_s).filter(Boolean);
    const least = Math.min(...known) / 10, widest = Math.log(Math.max(...known) / least);
    const head = ["", "holds", "bandwidth", "", "latency"].map((text) => lab.h("th", { scope: "col" }, text));
    const row = ({ name: level, size_bytes: size, bytes_s: speed, latency_s: latency }) => {
      const bar = lab.h("i", { class: "speed" });
      bar.style.width = `${speed ? (100 * Math.log(speed / least)) / widest : 0}%`;
      return lab.h("tr", {}, lab.h("th", { scope: "row" }, level), lab.h("td", {}, lab.bytes(size)),
        lab.h("td", {}, speed ? `${lab.bytes(speed)}/s` : "not published"), lab.h("td", { class: "bar-cell" }, bar),
        lab.h("td", {}, latency ? `${lab.significant(latency * 1e9)} ns` : "–"));
    };
    levels.replaceChildren(lab.h("caption", {}, `Memories of an ${name}: the nearer, the faster`),
      lab.h("thead", {}, lab.h("tr", {}, head)), lab.h("tbody", {}, rows.slice().reverse().map(row)));
  }

  table();
  lab.redraw.push(draw);
  new ResizeObserver(draw).observe(panel);
  player.go(Math.round((0.6 * FRAMES * total("v2")) / most()));  // before any of the three is done
  return { player, total, progress, get length() { return length; } };
};

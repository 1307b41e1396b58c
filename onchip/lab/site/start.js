"use strict";
// The frame: theme, contents, the picture at the top; then the figures.

(() => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)"), button = lab.at("theme");
  const kept = () => { try { return localStorage.getItem("onchip-theme"); } catch { return null; } };
  const keep = (theme) => { try { localStorage.setItem("onchip-theme", theme); } catch { /* a page that may store nothing */ } };
  const shown = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
  const tell = () => {
    const other = shown() === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "☾ dark" : "☀ light";
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
  };
  const changed = () => { tell(); for (const draw of lab.redraw) draw(); };
  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  button.addEventListener("click", () => { root.dataset.theme = shown() === "dark" ? "light" : "dark"; keep(root.dataset.theme); changed(); });
  dark.addEventListener("change", changed);

  lab.at("version").textContent = lab.data.version;
  const sections = [...document.querySelectorAll("section.figure")], links = new Map();
  for (const section of sections) {
    const link = lab.h("a", { href: `#${section.id}` }, section.dataset.short);
    links.set(section, link);
    lab.at("contents").append(lab.h("li", {}, link));
    const panel = section.querySelector("[data-figure]"), name = panel.dataset.figure;
    lab.figures[name] = Object.assign(lab.figures[name](panel, lab.data[name]) ?? {}, { panel });
  }
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(target).setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-40% 0px -55% 0px" });
  sections.forEach((section) => seen.observe(section));
  weave();
  tell();
  root.dataset.ready = Math.round(performance.now());  // milliseconds since the page was asked for

  // The matrix that is not there: one tile of it is, along a causal sweep or under the pointer.
  function weave() {
    const svg = lab.at("weave"), N = 10, PITCH = 27, LEFT = 60, TOP = 16, cells = [];
    const visible = [];
    for (let i = 0; i < N; i++) {
      for (let j = 0; j <= i; j++) {
        const cell = lab.s("rect", { x: LEFT + j * PITCH, y: TOP + i * PITCH, width: PITCH - 4, height: PITCH - 4, rx: 5, class: "cell" });
        visible.push({ i, j, cell });
        cells.push(cell);
      }
    }
    const row = Array.from({ length: N }, (_, i) => lab.s("rect", { x: LEFT - 34, y: TOP + i * PITCH, width: 22, height: PITCH - 4, rx: 5, class: "query" }));
    const column = Array.from({ length: N }, (_, j) => lab.s("rect", { x: LEFT + j * PITCH, y: TOP + N * PITCH + 6, width: PITCH - 4, height: 8, rx: 4, class: "key-strip" }));
    svg.append(...cells, ...row, ...column);
    let at = 0, held = false;
    const lightUp = (index) => {
      visible.forEach(({ cell }, n) => { cell.setAttribute("class", n === index ? "cell on" : n < index && visible[n].i === visible[index].i ? "cell done" : "cell"); });
      row.forEach((r, i) => r.setAttribute("class", i === visible[index].i ? "query on" : i < visible[index].i ? "query done" : "query"));
      column.forEach((c, j) => c.setAttribute("class", j === visible[index].j ? "key-strip on" : "key-strip"));
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = Math.min(box.width / 360, box.height / 300);
      const x = (event.clientX - box.left - (box.width - 360 * scale) / 2) / scale, y = (event.clientY - box.top - (box.height - 300 * scale) / 2) / scale;
      const found = visible.findIndex(({ i, j }) => i === Math.floor((y - TOP) / PITCH) && j === Math.floor((x - LEFT) / PITCH));
      held = found >= 0;
      if (held) { at = found; lightUp(at); }
    });
    svg.addEventListener("pointerleave", () => { held = false; });
    lightUp(at = 24);
    setInterval(() => {
      if (held || lab.still.matches || document.hidden || scrollY > innerHeight) return;
      at = (at + 1) % visible.length;
      lightUp(at);
    }, 220);
  }
})();

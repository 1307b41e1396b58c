"use strict";
// Theme, contents and the picture at the top; then the figures.

(() => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)"), button = lab.at("theme");
  const shown = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
  const updateLabel = () => {
    const other = shown() === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "☾ dark" : "☀ light";
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
  };
  const changed = () => { updateLabel(); for (const draw of lab.redraw) draw(); };
  button.addEventListener("click", () => {
    root.dataset.theme = shown() === "dark" ? "light" : "dark";
    theme.keep(root.dataset.theme);
    changed();
  });
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
  updateLabel();
  root.dataset.ready = Math.round(performance.now());  // milliseconds since the request of the page

  // The picture at the top: one tile of the matrix, along a causal sweep or under the pointer.
  function weave() {
    const svg = lab.at("weave"), N = 10, PITCH = 27, LEFT = 60, TOP = 16, SIZE = PITCH - 4, tiles = [];
    const rect = (x, y, width, height) => lab.s("rect", { x, y, width, height, rx: Math.min(5, height / 2) });
    for (let i = 0; i < N; i++) for (let j = 0; j <= i; j++) tiles.push({ i, j, cell: rect(LEFT + j * PITCH, TOP + i * PITCH, SIZE, SIZE) });
    const queries = Array.from({ length: N }, (_, i) => rect(LEFT - 34, TOP + i * PITCH, 22, SIZE));
    const keys = Array.from({ length: N }, (_, j) => rect(LEFT + j * PITCH, TOP + N * PITCH + 6, SIZE, 8));
    svg.append(...tiles.map((one) => one.cell), ...queries, ...keys);
    let at = 24, held = false;
    const light = () => {
      const { i, j } = tiles[at], kind = (element, name) => element.setAttribute("class", name);
      tiles.forEach((one, n) => kind(one.cell, n === at ? "cell on" : one.i === i && n < at ? "cell done" : "cell"));
      queries.forEach((element, n) => kind(element, n === i ? "query on" : n < i ? "query done" : "query"));
      keys.forEach((element, n) => kind(element, n === j ? "key-strip on" : "key-strip"));
    };
    tiles.forEach(({ cell }, n) => cell.addEventListener("pointerenter", () => { held = true; at = n; light(); }));
    svg.addEventListener("pointerleave", () => { held = false; });
    light();
    setInterval(() => {
      if (held || lab.still.matches || document.hidden || scrollY > innerHeight) return;
      at = (at + 1) % tiles.length;
      light();
    }, 220);
  }
})();

"use strict";
// The weights of a row, as attention_weights gave them for the built-in model.

lab.figures.rows = (panel, data) => {
  const { words, owners, weights } = data;
  let word = words.length - 1, layer = 0, head = 0;
  const numbered = (list) => list.map((_, i) => [i, `${i + 1}`]);
  const svg = lab.s("svg", { role: "img" });
  const buttons = words.map((text, i) => lab.h("button", { type: "button", "data-word": i, onclick: () => { word = i; draw(); } },
    text, lab.h("small", {})));
  const all = lab.h("div", { class: "heads" });
  panel.append(
    lab.h("div", { class: "controls" },
      lab.choice("rows-layer", "layer", numbered(weights), layer, (x) => { layer = x; draw(); }),
      lab.choice("rows-head", "head", numbered(weights[0]), head, (x) => { head = x; draw(); })),
    svg,
    lab.h("div", { class: "words", role: "group", "aria-label": "Words of the sentence" }, buttons),
    lab.h("p", { class: "note" }, "All heads of all layers for this word; the lighter, the less:"),
    all,
  );
  lab.at("rows-note").textContent = `Recorded from the model “${data.model}”. ${data.about[0].toUpperCase()}${data.about.slice(1)}. A trained one is recorded by the same command.`;

  // The share of each word: the sum over its tokens.
  function shares(l = layer, h = head, w = word) {
    const sums = words.map(() => 0);
    weights[l][h][w].forEach((weight, token) => { sums[owners[token]] += weight; });
    return sums;
  }

  function draw() {
    const now = shares(), most = Math.max(...now);
    buttons.forEach((button, i) => {
      button.setAttribute("aria-pressed", i === word);
      button.style.setProperty("--weight", i > word ? 0 : (0.75 * now[i]) / most);
      button.lastChild.textContent = i > word ? "later" : `${(100 * now[i]).toFixed(1)} %`;
      button.setAttribute("aria-label", `${words[i]}: ${i > word ? "comes later" : `${(100 * now[i]).toFixed(1)} percent`}`);
    });
    render();
    overview();
  }

  function overview() {
    const cells = weights.flatMap((heads, l) => heads.map((_, h) => {
      const now = shares(l, h), most = Math.max(...now);
      const strip = lab.h("span", { class: "strip" }, now.map((share) => {
        const cell = lab.h("i", {});
        cell.style.opacity = Math.max(0.06, share / most);
        return cell;
      }));
      return lab.h("button", { type: "button", "aria-pressed": l === layer && h === head, "aria-label": `Layer ${l + 1}, head ${h + 1}`,
        onclick: () => pick(l, h) }, strip);
    }));
    all.replaceChildren(...cells);
  }

  function pick(l, h) {
    layer = l;
    head = h;
    for (const [name, value] of [["rows-layer", l], ["rows-head", h]]) panel.querySelector(`input[name="${name}"][value="${value}"]`).checked = true;
    draw();
    all.children[l * weights[0].length + h].focus();
  }

  const tall = (width) => (width < 500 ? 140 : 186);

  // Arcs from the word to those it looks at, as wide as their share.
  function arcs(width) {
    const lengths = words.map((text) => text.length + 2), total = lengths.reduce((a, b) => a + b), now = shares();
    const middles = [];
    lengths.reduce((from, length) => { middles.push(((from + length / 2) / total) * width); return from + length; }, 0);
    const base = tall(width) - 26, from = middles[word], parts = [];
    words.forEach((text, i) => {
      if (i > word) return;
      const to = middles[i], high = i === word ? 26 : Math.min(base - 22, 24 + Math.abs(from - to) * 0.24);
      const d = i === word ? `M${from - 7} ${base}C${from - 18} ${base - high},${from + 18} ${base - high},${from + 7} ${base}`
        : `M${from} ${base}C${from} ${base - high},${to} ${base - high},${to} ${base}`;
      parts.push(lab.s("path", { d, class: "arc", "stroke-width": Math.max(0.6, 26 * now[i]), "stroke-opacity": 0.25 + 0.6 * (now[i] / Math.max(...now)) }));
    });
    const size = lab.clamp(width / total * 1.75, 7.5, 15);
    const labels = words.map((text, i) => {
      const label = lab.s("text", { x: middles[i], y: base + 18, "text-anchor": "middle", class: i === word ? "chosen" : i > word ? "soft" : "" });
      label.style.fontSize = `${size}px`;
      label.textContent = text;
      return label;
    });
    svg.replaceChildren(...parts, ...labels);
    svg.setAttribute("aria-label", `“${words[word]}” looks at ${words.slice(0, word + 1).map((text, i) => `${text} ${(100 * now[i]).toFixed(1)} %`).join(", ")}`);
  }

  let render = () => {};
  render = lab.sized(svg, tall, arcs);
  draw();
  return { shares };
};

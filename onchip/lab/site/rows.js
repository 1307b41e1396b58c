"use strict";
// The weights of a row, from attention_weights with the built-in model.

lab.figures.rows = (panel, data) => {
  const { words, owners, weights } = data;
  let word = words.length - 1, [layer, head] = opening();
  const numbered = (list) => list.map((_, i) => [i, `${i + 1}`]);
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const tall = (width) => (width < 500 ? 140 : 186);

  const svg = lab.s("svg", { role: "img" }), heads = lab.h("div", { class: "heads" });
  const buttons = words.map((text, i) => lab.h("button", { type: "button", "data-word": i, onclick: () => { word = i; draw(); } },
    text, lab.h("small", {})));
  panel.append(
    lab.h("div", { class: "controls" },
      lab.choice("rows-layer", "layer", numbered(weights), layer, (x) => { layer = x; draw(); }),
      lab.choice("rows-head", "head", numbered(weights[0]), head, (x) => { head = x; draw(); })),
    svg,
    lab.h("div", { class: "words", role: "group", "aria-label": "Words of the sentence" }, buttons),
    lab.h("p", { class: "note" }, "All heads of all layers for this word; darker is more:"),
    heads);
  const about = data.about[0].toUpperCase() + data.about.slice(1);
  lab.at("rows-note").textContent = `Recorded from the model “${data.model}”. ${about}. For another model: onchip lab --model FOLDER.`;

  // The head with the largest weight on "river", which decides the meaning of "bank"; the first head if the word is missing.
  function opening() {
    const river = words.indexOf("river"), all = weights.flatMap((heads, l) => heads.map((_, h) => [l, h]));
    const most = Math.max(...all.map(([l, h]) => shares(l, h)[river]));
    return all.find(([l, h]) => shares(l, h)[river] === most) ?? [0, 0];
  }

  // The share of each word: the sum over its tokens.
  function shares(l = layer, h = head) {
    const sums = words.map(() => 0);
    weights[l][h][word].forEach((weight, token) => { sums[owners[token]] += weight; });
    return sums;
  }

  function draw() {
    const now = shares(), most = Math.max(...now);
    buttons.forEach((button, i) => {
      const later = i > word, share = later ? "later" : percent(now[i]);
      button.setAttribute("aria-pressed", i === word);
      button.setAttribute("aria-label", `${words[i]}: ${share}`);
      button.style.setProperty("--weight", later ? 0 : (0.75 * now[i]) / most);
      button.lastChild.textContent = share;
    });
    const each = weights.flatMap((layers, l) => layers.map((_, h) => strip(l, h)));
    heads.replaceChildren(...each);
    render();
  }

  function strip(l, h) {
    const now = shares(l, h), most = Math.max(...now);
    const parts = now.map((share) => {
      const part = lab.h("i", {});
      part.style.opacity = Math.max(0.06, share / most);
      return part;
    });
    return lab.h("button", { type: "button", "aria-pressed": String(l === layer && h === head), "aria-label": `Layer ${l + 1}, head ${h + 1}`,
      onclick: () => pick(l, h) }, lab.h("span", { class: "strip" }, parts));
  }

  function pick(l, h) {
    [layer, head] = [l, h];
    for (const [name, value] of [["rows-layer", l], ["rows-head", h]]) {
      panel.querySelector(`input[name="${name}"][value="${value}"]`).checked = true;
    }
    draw();
    heads.children[l * weights[0].length + h].focus();
  }

  // Arcs from the word to the words it attends to, as wide as their weights.
  function arcs(width) {
    const lengths = words.map((text) => text.length + 2), total = lengths.reduce((a, b) => a + b), now = shares(), middles = [];
    lengths.reduce((from, length) => { middles.push(((from + length / 2) / total) * width); return from + length; }, 0);
    const base = tall(width) - 26, most = Math.max(...now), seen = words.slice(0, word + 1);
    const paths = seen.map((_, i) => lab.s("path", {
      class: "arc", d: i === word ? loop(middles[i], base) : arc(middles[word], middles[i], base),
      "stroke-width": Math.max(0.6, 26 * now[i]), "stroke-opacity": 0.25 + 0.6 * (now[i] / most),
    }));
    const labels = words.map((text, i) => {
      const label = lab.text(middles[i], base + 18, text, i === word ? "chosen" : i > word ? "soft" : "", "middle");
      label.style.fontSize = `${lab.clamp((width / total) * 1.75, 7.5, 15)}px`;
      return label;
    });
    svg.replaceChildren(...paths, ...labels);
    svg.setAttribute("aria-label", `“${words[word]}” looks at ${seen.map((text, i) => `${text} ${percent(now[i])}`).join(", ")}`);
  }

  function arc(from, to, base) {
    const high = base - Math.min(base - 22, 24 + Math.abs(from - to) * 0.24);
    return `M${from} ${base}C${from} ${high},${to} ${high},${to} ${base}`;
  }

  function loop(x, base) {
    return `M${x - 7} ${base}C${x - 18} ${base - 26},${x + 18} ${base - 26},${x + 7} ${base}`;
  }

  let render = () => {};
  render = lab.sized(svg, tall, arcs);
  draw();
  return { shares };
};
